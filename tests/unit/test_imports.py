"""Imports run leftwards, and reading a config loads no heavy library."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import hf_fsdp_plugin

PACKAGE = Path(hf_fsdp_plugin.__file__).parent
HEAVY = {"torch", "transformers", "accelerate", "datasets", "numpy"}
ORDER = ("problems", "strategies", "vocabulary", "text", "sources", "spec")
"""Leftmost first; each may import itself and what stands left of it."""


def imported(path: Path) -> set[str]:
    """Names of the modules that a file imports, anywhere in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names.add(node.module)
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def files_of(part: str) -> list[Path]:
    folder = PACKAGE / part
    return sorted(folder.rglob("*.py")) if folder.is_dir() else [PACKAGE / f"{part}.py"]


def parts_imported(path: Path) -> set[str]:
    own = [name.split(".") for name in imported(path) if name.startswith("hf_fsdp_plugin.")]
    return {parts[1] for parts in own if (PACKAGE / parts[1]).is_dir() or (PACKAGE / f"{parts[1]}.py").is_file()}


@pytest.mark.parametrize("part", ORDER)
def test_the_front_of_the_house_imports_leftwards_only(part: str):
    allowed = set(ORDER[: ORDER.index(part) + 1])
    for path in files_of(part):
        assert parts_imported(path) <= allowed, path


@pytest.mark.parametrize("part", ORDER)
def test_the_front_of_the_house_imports_no_heavy_library(part: str):
    for path in files_of(part):
        assert not {name.partition(".")[0] for name in imported(path)} & HEAVY, path


@pytest.mark.parametrize("part", ["plan", "backends", "observe", "checkpoint", "integrations"])
def test_nothing_below_the_command_line_imports_it(part: str):
    for path in files_of(part):
        assert "cli" not in parts_imported(path), path


def test_only_one_file_of_the_front_reads_the_process_environment():
    readers = {
        path.name
        for part in ORDER
        for path in files_of(part)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv") and isinstance(node.value, ast.Name)
        if node.value.id == "os"
    }
    assert readers == {"environment.py"}


@pytest.mark.parametrize("argv", [["check", "CONFIG"], ["check", "CONFIG", "--json"], ["schema"], ["--version"]])
def test_a_verb_that_needs_no_model_loads_no_heavy_library(argv: list[str], tmp_path: Path):
    config = tmp_path / "fsdp.yaml"
    config.write_text("distributed_type: FSDP\nfsdp_config:\n  fsdp_sharding_strategy: 2\n")
    argv = [str(config) if word == "CONFIG" else word for word in argv]
    program = (
        "import sys; from hf_fsdp_plugin.cli.main import main\n"
        f"code = main({argv!r})\n"
        f"loaded = sorted({HEAVY!r} & set(sys.modules))\n"
        "sys.exit(f'loaded {loaded}' if loaded else code)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env={}, timeout=60)
    assert done.returncode == 0, done.stderr
