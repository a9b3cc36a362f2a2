"""The runtime imports no tool: no statement in it, also inside functions, names one, and no string but the verbs'."""

import ast
from pathlib import Path

import pytest

import hf_fsdp_plugin
from tests.support.syntax_trees import tree_of

PACKAGE = Path(hf_fsdp_plugin.__file__).parent
DOORS = {"__init__.py", "cli/main.py"}
"""The table of the public names, which a script asks for, and the verbs, in the process of ``hf-fsdp`` only."""
RUNTIME = {path.relative_to(PACKAGE).as_posix(): path for path in PACKAGE.rglob("*.py") if "tools" not in path.parts}


def named_tools(tree: ast.AST) -> list[str]:
    """Return the tools that imports name, at every depth, and the strings that name a tool's module."""
    found = []
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "relative imports are not checked"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names = [node.value]
        found += [name for name in names if name.startswith("hf_fsdp_plugin.tools")]
    return found


@pytest.mark.parametrize("name", sorted(RUNTIME.keys() - DOORS))
def test_runtime_imports_no_tool(name: str):
    assert not named_tools(tree_of(RUNTIME[name]))


def test_only_command_line_loads_tools_of_verbs():
    users = {
        name
        for name, path in RUNTIME.items()
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "tool"
    }
    assert users == {"cli/main.py", "cli/launch.py"}


@pytest.mark.parametrize(
    "source",
    [
        "import hf_fsdp_plugin.tools.plan",
        "def f():\n    from hf_fsdp_plugin.tools import plan",
        "class A:\n    def f(self):\n        if x:\n            from hf_fsdp_plugin.tools.plan.time import a",
        "importlib.import_module('hf_fsdp_plugin.tools.plan')",
    ],
)
def test_import_of_a_tool_is_found(source: str):
    assert named_tools(ast.parse(source))
