"""Packages import only what is before them in the order, and reading a config loads no heavy library."""

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import hf_fsdp_plugin

PACKAGE = Path(hf_fsdp_plugin.__file__).parent
HEAVY = {"torch", "transformers", "accelerate", "datasets", "numpy"}
TORCH_FREE = ("version", "problems", "text", "strategies", "vocabulary", "sources", "spec")
ORDER = (
    *TORCH_FREE,
    "devices",
    "torch_private",
    "plan",
    "backends",
    "checkpoint",
    "observe",
    "integrations",
    "cli",
)
"""A package may import itself and what is named before it."""


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


def module_name(path: Path) -> str:
    parts = ("hf_fsdp_plugin", *path.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def test_order_names_every_package_and_module():
    found = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()}
    assert found - {"__init__", "__main__"} == set(ORDER)


@pytest.mark.parametrize("part", ORDER)
def test_package_imports_only_what_is_before_it(part: str):
    allowed = set(ORDER[: ORDER.index(part) + 1])
    wrong = {str(path): parts - allowed for path in files_of(part) if (parts := parts_imported(path)) - allowed}
    assert not wrong


@pytest.mark.parametrize("part", TORCH_FREE)
def test_torch_free_package_imports_no_heavy_library(part: str):
    for path in files_of(part):
        assert not {name.partition(".")[0] for name in imported(path)} & HEAVY, path


def test_modules_import_each_other_without_cycles():
    files = {module_name(path): path for path in PACKAGE.rglob("*.py")}
    graph = {name: imported(path) & files.keys() - {name} for name, path in files.items()}
    for name, path in files.items():
        if path.name == "__init__.py":  # a package re-exports its modules; they do not import it
            graph[name] = set()
    TopologicalSorter(graph).prepare()  # raises CycleError with the modules of a cycle


def test_nothing_imports_the_package_root_but_the_command_line():
    for part in set(ORDER) - {"cli"}:
        for path in files_of(part):
            assert "hf_fsdp_plugin" not in imported(path), path


def test_one_torch_free_file_reads_the_environment():
    readers = {
        path.name
        for part in TORCH_FREE
        for path in files_of(part)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv") and isinstance(node.value, ast.Name)
        if node.value.id == "os"
    }
    assert readers == {"environment.py"}


@pytest.mark.parametrize("argv", [["check", "CONFIG"], ["check", "CONFIG", "--json"], ["schema"], ["--version"]])
def test_light_verbs_load_no_heavy_library(argv: list[str], tmp_path: Path):
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
