"""The table of contracts: complete, and true for the installed versions."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import pytest

import hf_fsdp_plugin
from hf_fsdp_plugin.tools.doctor.contract_probe import PRIVATE_FILES, defines_name, hook_rows, probe_hook, source_hash

PACKAGE = Path(hf_fsdp_plugin.__file__).parent
PRIVATE = re.compile(r"_[a-zA-Z]\w*")


def private_names(file: Path) -> set[str]:
    """Return the private attributes of objects other than ``self`` that a file reads or writes, also by ``getattr``."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) != "self":
            names.add(node.attr)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "setattr", "hasattr", "delattr"):
            names.add(str(getattr(node.args[1], "value", "")))
    return set(filter(PRIVATE.fullmatch, names))


@pytest.mark.parametrize("module", PRIVATE_FILES)
def test_every_private_name_has_a_row(module: str) -> None:
    rows = importlib.import_module(f"hf_fsdp_plugin.{module}").CONTRACTS
    # A part of a longer path, such as torch._C in torch._C._current_graph_task_id, needs no row of its own.
    known = {part for row in rows for name in (row.target, *row.instead) for part in re.split(r"[.:|]", name)}
    # `_orig_dtype` exists before torch 2.15 only, `_hf_fsdp…` are our own.
    own = {"_orig_dtype", "_getframe"}
    used = {name for name in private_names(PACKAGE / f"{module.replace('.', '/')}.py") if not name.startswith("_hf_")}
    assert used - known - own == set()


def test_every_table_of_contracts_is_probed() -> None:
    tables = {path for path in PACKAGE.rglob("*.py") if re.search(r"^CONTRACTS\b", path.read_text(), re.MULTILINE)}
    assert {".".join(path.relative_to(PACKAGE).with_suffix("").parts) for path in tables} == set(PRIVATE_FILES)


def test_replaced_functions_have_a_tested_source() -> None:
    """After a test with new versions: ``python -m scripts.update_contracts``."""
    statuses = {hook.target: probe_hook(hook) for hook in hook_rows()}
    assert {target: status for target, status in statuses.items() if status in ("missing", "changed")} == {}


def test_names_are_found_in_sources() -> None:
    assert defines_name("accelerate.accelerator", "Accelerator._models")  # set in the constructor
    assert defines_name("accelerate.utils.dataclasses", "FullyShardedDataParallelPlugin.__init__")  # generated
    assert defines_name("transformers.trainer", "update_fsdp_plugin_peft")  # imported
    assert not defines_name("accelerate.accelerator", "Accelerator._no_such_name")
    assert not defines_name("accelerate.no_such_module", "name")


def test_hash_ignores_comments_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hashes = set()
    for number, body in enumerate(("return a", "# why\n        return a", "return b")):
        package = tmp_path / f"package{number}"
        package.mkdir()
        (package / "__init__.py").write_text(f"class C:\n    def f(self, a, b):\n        {body}\n")
        monkeypatch.syspath_prepend(tmp_path)
        hashes.add(source_hash(f"package{number}", "C.f"))
    assert len(hashes) == 2 and None not in hashes
