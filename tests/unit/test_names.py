"""A public type has one name in the whole package, and a name means one type."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import hf_fsdp_plugin
from tests.support.syntax_trees import tree_of

PACKAGE = Path(hf_fsdp_plugin.__file__).parent


def defined_types(path: Path) -> Iterator[str]:
    """Yield the names of a module's public classes and type aliases: ``Row = Mapping[str, Any]``."""
    for node in tree_of(path).body:
        if isinstance(node, ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Assign):
            names = [target.id for target in node.targets if isinstance(target, ast.Name)]
            yield from (name for name in names if name[0].isupper() and not name.isupper())


def test_public_types_have_unique_names():
    places: dict[str, list[str]] = defaultdict(list)
    for path in sorted(PACKAGE.rglob("*.py")):
        for name in defined_types(path):
            if not name.startswith("_"):
                places[name].append(path.relative_to(PACKAGE).as_posix())
    assert places["FsdpSpec"] == ["spec/fsdp_spec.py"]
    assert {name: paths for name, paths in places.items() if len(paths) > 1} == {}
