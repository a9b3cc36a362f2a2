"""State belongs to objects that are created and closed: what modules define at their top level does not change."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final

import hf_fsdp_plugin
from tests.support.syntax_trees import tree_of

PACKAGE: Final = Path(hf_fsdp_plugin.__file__).parent
_FILE = "a file of the package"
_INSTALLED = "an installed library or Python"
CACHES: Final = {
    "contracts.py: _read_table": _FILE,
    "checkpoint/saved_state.py: replica_of_ranks": "its arguments",
    "checkpoint/writing/dcp_files.py: _frame": "its arguments and the installed torch",
    "checkpoint/writing/state_files.py: _versions": _INSTALLED,
    "hangs/python_stacks.py: _library_roots": _INSTALLED,
    "integrations/patching.py: _replacement": "a function of the package",
    "tools/plan/page.py: _macros": _FILE,
    "tools/convert/dialects/interface.py: load_table": _FILE,
    "tools/convert/dialects/interface.py: load_yaml": _FILE,
    "tools/doctor/contract_probe.py: _tree_of": _INSTALLED,
    "tools/doctor/contract_probe.py: file_of": _INSTALLED,
    "tools/doctor/contract_probe.py: tested_hashes": _FILE,
    "tools/doctor/contract_probe.py: text_of": _INSTALLED,
    "tools/plan/estimate/machines.py: _table": _FILE,
    "tools/plan/estimate/memory/allocations.py: _attention_operators": _INSTALLED,
}
"""Cached functions of modules -> what alone decides their result."""
ATTRIBUTES: Final = {
    "state.py": "the state of an object",
    "backends/ranks/agreement.py": "an exception that all ranks have",
    "backends/sharding/forwards.py": "a unit with the dtype of its inputs, which a compiled forward reads",
    "backends/sharding/script_access.py": "a method of this package",
    "checkpoint/writing/staging_buffers.py": "a tensor of this package whose memory is pinned",
    "integrations/accelerate/plugin.py": "the arguments of a plugin, which its copies have, too",
    "integrations/transformers/private.py": "a mark of Transformers that is hidden for a call",
    "spec/load.py": "a config that was made from a spec",
    "torch_private/fsdp2.py": "a hook of this package",
    "torch_private/functions.py": "a method of this package",
    "torch_private/modules.py": "a unit with its name",
}
"""Modules that give an object of the user or of a library an attribute -> what it marks. A model has only its state."""
UNCHANGED: Final = frozenset({
    *("bytes", "float", "frozenset", "fromkeys", "getattr", "int", "len", "range", "sorted", "str", "sum", "tuple"),
    *("MappingProxyType", "ParamSpec", "Path", "Struct", "TypeVar", "attrgetter", "compile", "get_args", "getLogger"),
    *("join", "load", "load_all", "maketrans", "partial", "read_text", "safe_load", "timedelta", "with_name"),
    *("_integer", "_replace_if", "contracts_of", "contracts_in", "import_target", "owns", "safetensors_file"),
})  # fmt: skip
"""Functions of Python, libraries and this package whose results are not changed."""
CHANGING: Final = frozenset(
    {"add", "append", "clear", "discard", "extend", "insert", "pop", "popitem", "remove", "setdefault", "update"}
)


def place_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def name_of(node: ast.expr) -> str:
    """The last name of a function, a decorator or a class."""
    while isinstance(node, (ast.Call, ast.Subscript)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


@cache
def frozen_classes() -> frozenset[str]:
    """The frozen dataclasses of the package."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(tree_of(path)):
            decorators = node.decorator_list if isinstance(node, ast.ClassDef) else []
            options = [option.arg for each in decorators if isinstance(each, ast.Call) for option in each.keywords]
            if isinstance(node, ast.ClassDef) and "frozen" in options:
                found.add(node.name)
    return frozenset(found)


def changed_names(tree: ast.Module) -> set[str]:
    """Names whose objects a module changes by a method or an assignment, or that it assigns in a function."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CHANGING:
            found.add(getattr(node.func.value, "id", ""))
        elif isinstance(node, (ast.Subscript, ast.Attribute)) and not isinstance(node.ctx, ast.Load):
            found.add(getattr(node.value, "id", ""))
        elif isinstance(node, ast.Global):
            found.update(node.names)
    return found


@cache
def changed_by_importers() -> frozenset[str]:
    found = set()
    for path in PACKAGE.rglob("*.py"):
        nodes = [node for node in ast.walk(tree_of(path)) if isinstance(node, ast.ImportFrom)]
        imported = {alias.asname or alias.name for node in nodes for alias in node.names}
        found |= imported & changed_names(tree_of(path))
    return frozenset(found)


def assignments(tree: ast.Module) -> Iterator[tuple[str, ast.expr, str]]:
    """Yield the names that a module defines by assignments, with their values and annotations."""
    for node in tree.body:
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            annotation = ast.unparse(node.annotation) if isinstance(node, ast.AnnAssign) else ""
            for target in node.targets if isinstance(node, ast.Assign) else (node.target,):
                for each in target.elts if isinstance(target, ast.Tuple) else (target,):
                    if isinstance(each, ast.Name):
                        yield each.id, node.value, annotation


def is_state(value: ast.expr, annotation: str) -> bool:
    """Whether an object at the top level may change: an instance of a class, or an empty container."""
    if isinstance(value, ast.Call):
        return name_of(value) not in UNCHANGED | frozen_classes()
    is_empty = (isinstance(value, ast.Dict) and not value.keys) or (isinstance(value, ast.List) and not value.elts)
    return is_empty and "Mapping" not in annotation


def state_in(path: Path) -> list[str]:
    tree = tree_of(path)
    changed = changed_names(tree) | changed_by_importers()
    return [
        f"{place_of(path)}: {name}"
        for name, value, annotation in assignments(tree)
        if name in changed or is_state(value, annotation)
    ]


def test_only_the_process_is_state_of_a_module() -> None:
    assert [each for path in PACKAGE.rglob("*.py") for each in state_in(path)] == ["state.py: process"]


def test_state_of_modules_is_found(tmp_path: Path) -> None:
    source = """
from contextvars import ContextVar
from elsewhere import Watch
a = []
b: dict[str, int] = {}
c = ContextVar("c", default=None)
d = Watch()
e = {"filled": 1}
f = 0
g = {"constant": 1}
h = frozenset({1})

def change():
    global f
    f, e["new"] = 1, 2
"""
    tree = ast.parse(source)
    changed = changed_names(tree)
    found = [name for name, value, annotation in assignments(tree) if name in changed or is_state(value, annotation)]
    assert found == ["a", "b", "c", "d", "e", "f"]


def test_cached_functions_are_pure() -> None:
    found = []
    for path in PACKAGE.rglob("*.py"):
        for node in tree_of(path).body:
            if isinstance(node, ast.FunctionDef) and {"cache", "lru_cache"} & set(map(name_of, node.decorator_list)):
                found.append(f"{place_of(path)}: {node.name}")
    assert sorted(found) == sorted(CACHES)


def test_classes_have_no_empty_containers() -> None:
    """An empty container of a class would be shared by its objects."""
    classes = [(path, node) for path in PACKAGE.rglob("*.py") for node in ast.walk(tree_of(path))]
    for path, node in classes:
        for statement in node.body if isinstance(node, ast.ClassDef) else ():
            value = getattr(statement, "value", None)
            assert not (isinstance(value, ast.List) and not value.elts), path
            assert not (isinstance(value, ast.Dict) and not value.keys), path


def test_attributes_of_other_objects_are_listed() -> None:
    found = set()
    for path in PACKAGE.rglob("*.py"):
        texts = {node.value for node in ast.walk(tree_of(path)) if isinstance(node, ast.Constant)}
        if any(isinstance(text, str) and text.startswith("_hf_fsdp_") for text in texts):
            found.add(place_of(path))
    assert found == ATTRIBUTES.keys()
