"""The private APIs of each library are used in one place."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import hf_fsdp_plugin
from tests.support.syntax_trees import tree_of

PACKAGE = Path(hf_fsdp_plugin.__file__).parent
PRIVATE = re.compile(r"_[a-zA-Z]\w*")
HOMES = {
    "torch": "torch_private/*.py",
    "accelerate": "integrations/accelerate/private.py",
    "huggingface_hub": "integrations/accelerate/private.py",
    "torchao": "torch_private/*.py",
    "transformers": "integrations/transformers/private.py",
}
"""Library -> the files that may use its private APIs."""


STORED_NAMES = {"_StorageInfo", "_spec"}
"""Names that are part of a file format, too."""


def private_imports(tree: ast.AST, library: str) -> Iterator[str]:
    """Imports from private modules of a library, and of private names, as dotted names."""
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            first, *rest = name.split(".")
            if first == library and any(PRIVATE.fullmatch(part) for part in rest):
                yield name


def private_names(tree: ast.AST) -> Iterator[str]:
    """Private attributes of objects other than ``self``, and strings that could name one for ``getattr``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and PRIVATE.fullmatch(node.attr):
            if not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")):
                yield node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and PRIVATE.fullmatch(node.value):
            yield node.value


def dotted_names(node: ast.AST) -> list[str]:
    """The names of ``torch.ops.aten`` or ``torch.empty(1).shape``. The first one is empty for other expressions."""
    if isinstance(node, ast.Attribute):
        return [*dotted_names(node.value), node.attr]
    if isinstance(node, ast.Call | ast.Subscript):
        return dotted_names(node.func if isinstance(node, ast.Call) else node.value)
    return [node.id if isinstance(node, ast.Name) else ""]


def private_torch_functions(tree: ast.AST) -> Iterator[str]:
    """``torch._foreach_norm``, ``torch.ops.aten._softmax``: private names reached from the name ``torch``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            first, *rest = dotted_names(node)
            if first in ("torch", "nn", "dist") and any(PRIVATE.fullmatch(part) for part in rest):
                yield ".".join([first, *rest])


@pytest.fixture(scope="module")
def package() -> dict[Path, tuple[ast.Module, set[str]]]:
    """Path -> the syntax tree of a file of the package, and its private names."""
    trees = {path: tree_of(path) for path in PACKAGE.rglob("*.py")}
    return {path: (tree, set(private_names(tree))) for path, tree in trees.items()}


@pytest.mark.parametrize("library", HOMES)
def test_private_apis_are_used_in_one_place(library: str, package: dict[Path, tuple[ast.Module, set[str]]]):
    home = set(PACKAGE.glob(HOMES[library]))
    known = {name for path in home for name in package[path][1] if not name.startswith("_hf_fsdp")}
    known -= STORED_NAMES
    found = []
    for path, (tree, names) in package.items():
        if path in home:
            continue
        uses = {*private_imports(tree, library), *(known & names)}
        if library == "torch":
            uses.update(private_torch_functions(tree))
        found += [f"{path.relative_to(PACKAGE)}: {name}" for name in sorted(uses)]
    assert found == []


def test_private_uses_are_recognized():
    tree = ast.parse(
        "from torch.utils._pytree import tree_map\nimport torch.distributed\nfrom torch import nn\n"
        "torch._foreach_norm(x)\nmodule._buffers\nself._own\ngetattr(flat, '_local_shard')\n'text with _name'\n"
    )
    assert set(private_imports(tree, "torch")) == {"torch.utils._pytree.tree_map"}
    assert set(private_names(tree)) == {"_foreach_norm", "_buffers", "_local_shard"}
    assert set(private_torch_functions(tree)) == {"torch._foreach_norm"}
