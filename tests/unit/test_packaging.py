"""The package declares what it imports, and names one minimum Python version everywhere."""

from __future__ import annotations

import ast
import configparser
import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
_DISTRIBUTIONS = {"yaml": "pyyaml"}


def _setup() -> configparser.ConfigParser:
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    return parser


def test_every_imported_library_is_declared() -> None:
    imported = set()
    for path in (ROOT / "hf_fsdp_plugin").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                imported.add(node.module.partition(".")[0])
    third_party = {_DISTRIBUTIONS.get(name, name) for name in imported - sys.stdlib_module_names - {"hf_fsdp_plugin"}}
    declared = {re.split(r"[<>=~!]", line)[0] for line in _setup()["options"]["install_requires"].split()}
    assert third_party <= declared
    assert declared - third_party == {"datasets"}  # for scripts and users; the package itself does not import it


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
