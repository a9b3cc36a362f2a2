"""The checkpoint package has one facade, which loads its modules on first use."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import hf_fsdp_plugin
from hf_fsdp_plugin import checkpoint

PACKAGE = Path(hf_fsdp_plugin.__file__).parent
PUBLIC = {"hf_fsdp_plugin.checkpoint", "hf_fsdp_plugin.checkpoint.names"}


def test_facade_exports_exist() -> None:
    for name in dir(checkpoint):
        assert getattr(checkpoint, name) is not None


def test_facade_import_loads_no_torch() -> None:
    program = (
        "import sys; from hf_fsdp_plugin.checkpoint import merge, summarize, verify; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_other_packages_import_only_the_facade() -> None:
    found = {
        (path.relative_to(PACKAGE).as_posix(), node.module)
        for path in PACKAGE.rglob("*.py")
        if "checkpoint" not in path.relative_to(PACKAGE).parts[:1]
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("hf_fsdp_plugin.checkpoint")
    }
    assert {module for _, module in found} == PUBLIC, [entry for entry in found if entry[1] not in PUBLIC]
