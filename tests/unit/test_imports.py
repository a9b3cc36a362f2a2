"""Packages import only what is before them in the order, and reading a config loads no heavy library."""

import ast
import re
import subprocess
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import hf_fsdp_plugin
from tests.support.syntax_trees import tree_of

PACKAGE = Path(hf_fsdp_plugin.__file__).parent
HEAVY = {"torch", "transformers", "accelerate", "datasets", "numpy"}
TORCH_FREE = (
    "version",
    "state",
    "supported",
    "text",
    "problems",
    "strategies",
    "axes",
    "vocabulary",
    "sources",
    "spec",
)
OTHERS = (
    "time_limits",
    "rank_variables",
    "messages",
    "observers",
    "contracts",
    "host_memory",
    "devices",
    "torch_private",
    "plan",
    "backends",
    "checkpoint",
    "hangs",
    "runs",
    "observe",
    "metrics",
    "integrations",
    "launcher",
    "cli",
    "tools",
)
ORDER = TORCH_FREE + OTHERS
"""A package may import itself and the packages before it."""


@cache
def imported(path: Path) -> set[str]:
    """Return the names of the modules that a file imports, also inside functions."""
    names: set[str] = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def files_of(part: str) -> list[Path]:
    return sorted((PACKAGE / part).rglob("*.py")) or [PACKAGE / f"{part}.py"]


def module_name(path: Path) -> str:
    parts = ("hf_fsdp_plugin", *path.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in PACKAGE.rglob("*.py")}


def test_order_names_every_package_and_module():
    parts = {name.split(".")[1] for name in MODULES if name != "hf_fsdp_plugin"}
    assert parts - {"__main__"} == set(ORDER)


def test_architecture_document_names_every_package_in_order():
    text = (PACKAGE.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
    named = re.findall(r"^\| `([\w/]+?)(?:\.py|/)` \|", text, flags=re.MULTILINE)
    packages = {path.parent.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("__init__.py")} - {"."}
    modules = {path.stem for path in PACKAGE.glob("*.py") if not path.stem.startswith("__")}
    assert sorted(named) == sorted(packages | modules)
    assert [name for name in named if "/" not in name] == list(ORDER)


@pytest.mark.parametrize("part", ORDER)
def test_package_imports_only_what_is_before_it(part: str):
    later = set(ORDER[ORDER.index(part) + 1 :])
    for path in files_of(part):
        own = {name.split(".")[1] for name in imported(path) if name.startswith("hf_fsdp_plugin.")}
        assert not own & later, path


@pytest.mark.parametrize("part", TORCH_FREE)
def test_torch_free_package_imports_no_heavy_library(part: str):
    for path in files_of(part):
        assert not {name.partition(".")[0] for name in imported(path)} & HEAVY, path


def test_modules_import_each_other_without_cycles():
    graph = {  # a package re-exports its modules, but does not depend on them
        name: set() if path.name == "__init__.py" else imported(path) & MODULES.keys() - {name}
        for name, path in MODULES.items()
    }
    TopologicalSorter(graph).prepare()  # raises CycleError with the modules of a cycle


def test_only_commands_read_configs_of_other_programs():
    dialects = "hf_fsdp_plugin.tools.convert.dialects"
    for path in PACKAGE.rglob("*.py"):
        if path.relative_to(PACKAGE).parts[0] != "tools":
            assert not any(name.startswith(dialects) for name in imported(path)), path


def test_only_command_line_imports_package_root():
    for part in set(ORDER) - {"launcher", "cli", "tools"}:
        for path in files_of(part):
            assert "hf_fsdp_plugin" not in imported(path), path


def test_one_torch_free_file_reads_the_environment():
    readers = {
        path.name
        for part in TORCH_FREE
        for path in files_of(part)
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Attribute) and ast.unparse(node) in ("os.environ", "os.getenv")
    }
    assert readers == {"environment_variables.py"}


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


def test_folders_of_integrations_form_no_cycle():
    """A module beside the folders counts as a folder of its own."""
    prefix = "hf_fsdp_plugin.integrations."
    graph: dict[str, set[str]] = {}
    for name in filter(lambda name: name.startswith(prefix), MODULES):
        own = name.removeprefix(prefix).split(".")[0]
        imports = {
            each.removeprefix(prefix).split(".")[0]
            for each in imported(MODULES[name])
            if each in MODULES and each.startswith(prefix)
        }
        graph.setdefault(own, set()).update(imports - {own})
    TopologicalSorter(graph).prepare()
