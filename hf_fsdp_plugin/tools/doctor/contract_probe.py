"""Probes every contract with other libraries on the installed versions.

The table of all contracts consists of the rows ``CONTRACTS`` of the files that use private names, and of the replaced
functions (:mod:`hf_fsdp_plugin.integrations.hooks`). The libraries are probed by their source files, and torch by its
modules too. The others are not imported: importing the Trainer of Transformers takes seven seconds, and parsing the
files that contain all replaced functions takes one.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.util
import json
import re
import sys
from functools import cache
from importlib.resources import files
from operator import attrgetter
from pathlib import Path
from typing import Any, Final, Literal

import yaml

from hf_fsdp_plugin.contracts import Contract
from hf_fsdp_plugin.integrations.hooks import HOOKS, Hook
from hf_fsdp_plugin.supported import installed_versions, release_of

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
ContractStatus = Literal["holds", "changed", "missing", "not installed", "not in this version"]

_TORCH_CONTRACTS: Final = files("hf_fsdp_plugin.torch_private") / "contracts.yaml"
PRIVATE_FILES: Final = (
    *(f"torch_private.{name}" for name in yaml.safe_load(_TORCH_CONTRACTS.read_text(encoding="utf-8"))),
    *(f"integrations.{name}.private" for name in ("accelerate", "transformers")),
)
"""The modules that use private names. Each has a tuple ``CONTRACTS``."""


def private_contracts() -> list[Contract]:
    """Return the rows of all files that use private names."""
    modules = [importlib.import_module(f"hf_fsdp_plugin.{name}") for name in PRIVATE_FILES]
    return list(dict.fromkeys(row for module in modules for row in module.CONTRACTS))


def hook_rows() -> list[Hook]:
    """Return the replaced functions."""
    return [hook for group in HOOKS.values() for hook in group]


def probe_contracts() -> list[dict[str, Any]]:
    """Probe all contracts, and return them as ``hf-fsdp doctor --json`` prints them. Imports torch.

    The status ``changed`` is that of a replaced function whose source differs from that of every tested version.
    """
    rows = [(row, _probe(row), False) for row in private_contracts()]
    rows += [(hook.contract, probe_hook(hook), True) for hook in hook_rows()]
    return [
        {"target": row.target, "status": status, "without": row.without, "use": row.use, "replaced": is_replaced}
        for row, status, is_replaced in rows
    ]


def probe_hook(hook: Hook) -> ContractStatus:
    """Return whether a replaced function exists, with the source of a tested version."""
    status = _probe(hook.contract)
    module, _, path = hook.target.partition(":")
    current = source_hash(module, path) if status == "holds" else None
    # A function of C++, or one that a class inherits, has no source.
    return status if current is None or current in tested_hashes().get(hook.target, []) else "changed"


@cache
def tested_hashes() -> dict[str, list[str]]:
    """Return target -> hashes of its source in the tested versions, written by ``scripts/update_contracts.py``."""
    file = files("hf_fsdp_plugin.tools.doctor") / "tested_sources.json"
    hashes: dict[str, list[str]] = json.loads(file.read_text(encoding="utf-8"))
    return hashes


def _probe(row: Contract) -> ContractStatus:
    if file_of(row.library) is None:
        return "not installed"
    if _exists(row):
        return "holds"
    installed = installed_versions().get(row.library, "")
    return "not in this version" if row.since and release_of(installed) < release_of(row.since) else "missing"


def _exists(row: Contract) -> bool:
    module, _, path = row.target.partition(":")
    if row.behavior:
        return row.name in text_of(module)
    owner = path.rpartition(".")[0]
    candidates = [f"{owner}.{name}" if owner else name for name in (row.name, *row.instead)]
    # Of torch, modules that are not loaded yet (the compiler) are not imported either.
    found = module in sys.modules and any(_has(module, each) for each in candidates)
    return found or any(defines_name(module, each) for each in candidates) or row.name == "__new__"


def _has(module: str, path: str) -> bool:
    """Whether a name exists in a module, also one that is written in C++, whose source is not there."""
    try:
        attrgetter(path)(importlib.import_module(module))
    except (ImportError, AttributeError):
        return False
    return True


@cache
def file_of(module: str) -> Path | None:
    """Return the source file of a module; ``None`` if there is none. The library must be a package."""
    package, *parts = module.split(".")
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return None
    base = Path(spec.submodule_search_locations[0]).joinpath(*parts)
    candidates = (base / "__init__.py", base.with_suffix(".py"))
    return next((file for file in candidates if file.is_file()), None)


@cache
def text_of(module: str) -> str:
    """Return the source of a module; empty if there is none."""
    file = file_of(module)
    return file.read_text(encoding="utf-8") if file is not None else ""


@cache
def _tree_of(module: str) -> ast.Module:
    return ast.parse(text_of(module))


def defines_name(module: str, path: str) -> bool:
    """Whether the source of a module contains a name, or that of a base class in another module defines it.

    Args:
        path: ``name`` or ``Class.attribute``.
    """
    name = re.escape(path.rpartition(".")[2])
    return re.search(rf"\b{name}\b", text_of(module)) is not None or source_hash(module, path) is not None


def source_hash(module: str, path: str) -> str | None:
    """Return a hash of the source of a function or method, without comments and indentation; ``None`` if not found."""
    owner, _, name = path.rpartition(".")
    found: tuple[str, Definition] | None = None
    if owner:
        bases = _located_bases(module, owner)
        methods = ((where, node) for where, cls in bases for node in cls.body if isinstance(node, Definition))
        found = next(((where, node) for where, node in methods if node.name == name), None)
        decorators = [ast.unparse(each) for each in bases[0][1].decorator_list] if bases else []
        if found is None and name == "__init__" and any("dataclass" in each for each in decorators):
            found = bases[0]  # its constructor is generated from the fields, which are in the whole class
    else:
        found = _resolve(module, name)
    if found is None:
        return None
    where, node = found
    *lines, last = text_of(where).split("\n")[node.lineno - 1 : node.end_lineno]
    lines.append(last[: node.end_col_offset])  # without a comment after the code
    code = [stripped for line in lines if (stripped := line.strip()) and not stripped.startswith("#")]
    return hashlib.sha256("\n".join(code).encode()).hexdigest()[:16]


def _located_bases(module: str, name: str, depth: int = 4) -> list[tuple[str, ast.ClassDef]]:
    """Return a class and the base classes whose source is found, each with its module."""
    where, cls = _resolve(module, name) or (module, None)
    if not isinstance(cls, ast.ClassDef) or depth == 0:
        return []
    bases = [base.id for base in cls.bases if isinstance(base, ast.Name)]
    return [(where, cls), *(pair for base in bases for pair in _located_bases(where, base, depth - 1))]


def _resolve(module: str, name: str) -> tuple[str, Definition] | None:
    """Return a function or class and the module that defines it, following imports within the library."""
    for node in ast.walk(_tree_of(module)):  # what is defined at the top comes first
        if isinstance(node, Definition) and node.name == name:
            return module, node
        if not isinstance(node, ast.ImportFrom):
            continue
        if (imported := next((each for each in node.names if (each.asname or each.name) == name), None)) is not None:
            file = file_of(module)
            package = module if file is not None and file.name == "__init__.py" else module.rpartition(".")[0]
            origin = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            same_library = origin.partition(".")[0] == module.partition(".")[0]
            return _resolve(origin, imported.name) if same_library else None
    return None


def main() -> None:
    """Print all probed contracts as JSON, for ``hf-fsdp doctor``, which runs this in a process of its own."""
    json.dump(probe_contracts(), sys.stdout)
