"""The package declares what it imports, and names one minimum Python version everywhere."""

from __future__ import annotations

import ast
import configparser
import re
import sys
import tomllib
from pathlib import Path

from hf_fsdp_plugin.cli.main import TOOLS
from tests.support.syntax_trees import tree_of

ROOT = Path(__file__).parents[2]
_DISTRIBUTIONS = {"yaml": "pyyaml"}
RUNTIME = {
    "torch", "transformers", "accelerate", "datasets", "pyyaml", "numpy", "safetensors", "tqdm", "psutil", "xxhash",
    "fsspec",  # which torch requires
}  # fmt: skip


def _setup() -> configparser.ConfigParser:
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    return parser


def _imported(path: Path, *, at_import: bool = False) -> set[str]:
    """Return the distributions that a file imports; with ``at_import``, only those outside of functions."""
    tree = tree_of(path)
    nodes = tree.body if at_import else list(ast.walk(tree))
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.partition(".")[0])
    return {_DISTRIBUTIONS.get(name, name) for name in names - sys.stdlib_module_names - {"hf_fsdp_plugin"}}


def _requirements(lines: str) -> set[str]:
    return {re.split(r"[<>=~!]", line)[0] for line in lines.split()}


_ADAPTERS = {
    "integrations/accelerate/fp8.py": "torchao",
    "tools/plan/adapters.py": "peft",
    "tools/merge/folding.py": "peft",
}
"""The adapter of a library without a folder or a file of its own -> the library."""


def test_every_imported_library_is_declared() -> None:
    setup = _setup()
    declared = _requirements(setup["options"]["install_requires"])
    extras = setup["options.extras_require"]
    optional, tools = _requirements(extras["ecosystem"]), _requirements(extras["tools"])
    package = ROOT / "hf_fsdp_plugin"
    used: set[str] = set()
    for path in package.rglob("*.py"):
        imported = _imported(path)
        # An optional library is imported by its own adapter only, or by the file that the table names.
        within = path.relative_to(package)
        is_adapter = within.parts[0] == "integrations"
        adapter = within.parts[1].removesuffix(".py") if is_adapter else ""
        adapter = _ADAPTERS.get(within.as_posix(), adapter)
        assert imported - declared <= ({adapter} & optional) | (tools if within.parts[0] == "tools" else set()), path
        assert _imported(path, at_import=True) <= declared, path
        used |= imported
    assert declared - used == {"datasets"}  # for scripts and users; the package itself does not import it
    assert tools == TOOLS == used & tools
    assert "hf_fsdp_plugin[tools]" in extras["test"]
    assert declared == RUNTIME


def test_minimum_python_version_is_the_same_everywhere() -> None:
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
    minimum = _setup()["options"]["python_requires"].removeprefix(">=")
    classifiers = re.findall(r"Python :: (3\.\d+)", _setup()["metadata"]["classifiers"])
    assert classifiers[0] == minimum
    assert tools["mypy"]["python_version"] == minimum
    assert tools["ruff"]["target-version"] == f"py{minimum.replace('.', '')}"
    assert f"Python {minimum} or newer" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_files_that_are_not_python_are_packaged() -> None:
    patterns = _setup()["options.package_data"]["hf_fsdp_plugin"].split()
    package = ROOT / "hf_fsdp_plugin"
    packaged = {path for pattern in patterns for path in package.glob(pattern)}
    others = {path for path in package.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")}
    assert packaged == others
