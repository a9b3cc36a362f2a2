"""Finds names of other libraries in their source files, without importing them.

Importing Transformers' Trainer takes seven seconds; parsing the files that contain all replaced functions takes one.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
from collections.abc import Iterator
from functools import cache
from pathlib import Path

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@cache
def file_of(module: str) -> Path | None:
    """Return the source file of a module; ``None`` if there is none. The library must be a package."""
    package, *parts = module.split(".")
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return None
    base = Path(spec.submodule_search_locations[0]).joinpath(*parts)
    candidates = (base / "__init__.py", base.with_suffix(".py"))
    return next((file for file in candidates if file.is_file()), None)


@cache
def text_of(module: str) -> str:
    """Return the source of a module; empty if there is none."""
    file = file_of(module)
    return file.read_text(encoding="utf-8") if file is not None else ""


@cache
def _lines_of(module: str) -> list[str]:
    return text_of(module).split("\n")


@cache
def _tree_of(module: str) -> ast.Module:
    return ast.parse(text_of(module))


def defines(module: str, path: str) -> bool:
    """Whether a module has a name, or a class of it an attribute.

    Args:
        path: ``name`` or ``Class.attribute``. The attribute may be one that a method sets on ``self``, or inherited
            from a class whose source is found.
    """
    owner, _, attribute = path.rpartition(".")
    if not owner:
        return attribute in _module_names(module)
    return any(attribute in _class_names(found) for found in _with_bases(module, owner))


def source_hash(module: str, path: str) -> str | None:
    """Return a hash of the source of a function or method, without comments and indentation; ``None`` if not found."""
    owner, _, name = path.rpartition(".")
    if not owner:
        found = _resolve(module, name)
        nodes = [found] if found is not None else []
    else:
        nodes = [
            (where, node)
            for where, cls in _located_bases(module, owner)
            for node in cls.body
            if isinstance(node, Definition) and node.name == name
        ]
    if not nodes and name == "__init__":
        nodes = [(where, cls) for where, cls in _located_bases(module, owner)[:1] if _is_dataclass(cls)]
    if not nodes:
        return None
    where, node = nodes[0]
    *lines, last = _lines_of(where)[node.lineno - 1 : node.end_lineno]
    lines.append(last[: node.end_col_offset])  # without a comment behind it
    code = [stripped for line in lines if (stripped := line.strip()) and not stripped.startswith("#")]
    return hashlib.sha256("\n".join(code).encode()).hexdigest()[:16]


def _is_dataclass(cls: ast.ClassDef) -> bool:
    """Whether a class has a generated constructor. Its hash is that of the whole class, which has the fields."""
    return any("dataclass" in ast.unparse(decorator) for decorator in cls.decorator_list)


@cache
def _module_names(module: str) -> frozenset[str]:
    """Return the names that a module defines or imports, at the top level or in a condition or ``try``."""
    return frozenset(name for node in _top_level(_tree_of(module)) for name in _bound_names(node))


def _top_level(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        yield child
        if isinstance(child, ast.If | ast.Try | ast.With | ast.ExceptHandler):
            yield from _top_level(child)


def _bound_names(node: ast.AST) -> Iterator[str]:
    if isinstance(node, Definition):
        yield node.name
    elif isinstance(node, ast.Import | ast.ImportFrom):
        yield from (alias.asname or alias.name for alias in node.names)
    elif isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        for target in targets:
            yield from (name.id for name in ast.walk(target) if isinstance(name, ast.Name))


@cache
def _class_names(cls: ast.ClassDef) -> frozenset[str]:
    """Return the names in the body of a class, and those that its methods set on ``self``."""
    names = {name for node in _top_level(cls) for name in _bound_names(node)}
    names |= {"__init__"} if _is_dataclass(cls) else set()
    for node in ast.walk(cls):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name):
            names |= {node.attr} if node.value.id in ("self", "cls") else set()
    return frozenset(names)


def _with_bases(module: str, name: str) -> list[ast.ClassDef]:
    return [cls for _, cls in _located_bases(module, name)]


def _located_bases(module: str, name: str, depth: int = 4) -> list[tuple[str, ast.ClassDef]]:
    """Return a class and the base classes whose source is found, each with its module."""
    found = _resolve(module, name)
    where, cls = found if found is not None else (module, None)
    if not isinstance(cls, ast.ClassDef) or depth == 0:
        return []
    bases = [base.id for base in cls.bases if isinstance(base, ast.Name)]
    return [(where, cls), *(pair for base in bases for pair in _located_bases(where, base, depth - 1))]


def _resolve(module: str, name: str) -> tuple[str, Definition] | None:
    """Return a function or class and the module that defines it, following imports within the library."""
    for node in _top_level(_tree_of(module)):
        if isinstance(node, Definition) and node.name == name:
            return module, node
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    origin = _imported_module(module, node)
                    same_library = origin.partition(".")[0] == module.partition(".")[0]
                    return _resolve(origin, alias.name) if same_library else None
    return None


def _imported_module(module: str, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    file = file_of(module)
    is_package = file is not None and file.name == "__init__.py"
    parts = module.split(".")[: len(module.split(".")) - node.level + is_package]
    return ".".join([*parts, *([node.module] if node.module else [])])
