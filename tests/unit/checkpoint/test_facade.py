"""The checkpoint package has one facade, which loads its modules on first use."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import hf_fsdp_plugin
from hf_fsdp_plugin import checkpoint
from tests.support.syntax_trees import tree_of

PACKAGE = Path(hf_fsdp_plugin.__file__).parent
PUBLIC = {"hf_fsdp_plugin.checkpoint", "hf_fsdp_plugin.checkpoint.names"}
PINNING = ("saving.py", "hf_fsdp_plugin.checkpoint.writing.buffers")
"""The check for GPUs that measures how memory is pinned."""


def test_facade_exports_exist() -> None:
    assert all(getattr(checkpoint, name) is not None for name in dir(checkpoint))


def test_facade_import_loads_no_torch() -> None:
    program = (
        "import sys; from hf_fsdp_plugin.checkpoint import merge, summarize, verify; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_other_packages_and_scripts_import_only_the_facade() -> None:
    others = [path for path in PACKAGE.rglob("*.py") if PACKAGE / "checkpoint" not in path.parents]
    imported = {
        (path.name, module)
        for path in [*others, *(PACKAGE.parent / "scripts").rglob("*.py")]
        for node in ast.walk(tree_of(path))
        for module in _imported_modules(node)
        if module.startswith("hf_fsdp_plugin.checkpoint")
    }
    imported.remove(PINNING)
    assert {module for _, module in imported} == PUBLIC, [entry for entry in imported if entry[1] not in PUBLIC]


def _imported_modules(node: ast.AST) -> list[str]:
    if isinstance(node, ast.ImportFrom):
        return [node.module or ""]
    return [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
