"""What a script does after the line that it is at: the calls in its source, and the values of their arguments."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Final

from hf_fsdp_plugin.integrations.preflight.run import is_of_user

_PURE: Final = (
    ast.Name, ast.Attribute, ast.Subscript, ast.Slice, ast.Constant, ast.List, ast.Tuple, ast.Dict, ast.JoinedStr,
    ast.FormattedValue, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.operator, ast.unaryop, ast.boolop, ast.cmpop,
    ast.expr_context,
)  # fmt: skip
"""Expressions that call nothing."""
_RANK_TESTS: Final = ("is_world_process_zero", "is_local_process_zero")
"""Methods of the Trainer without side effects, which scripts call in conditions."""
_FUNCTIONS: Final = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
UNKNOWN: Final = object()
"""The value of an expression that is not known yet, or that calls something."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LaterCall:
    """A call in the code that follows.

    Attributes:
        name: as written: ``trainer.evaluate``.
        conditions: tests of the ``if`` statements around it, and whether they must be true.
    """

    name: str
    file: str
    node: ast.Call
    frame: FrameType
    conditions: tuple[tuple[ast.expr, bool], ...] = ()

    @property
    def place(self) -> str:
        """``trainer.evaluate in train.py:12``."""
        return f"{self.name} in {self.file}:{self.node.lineno}"

    @property
    def method(self) -> str:
        return self.name.rpartition(".")[2]

    @property
    def receiver(self) -> Any:
        """The object whose method is called, or `UNKNOWN`."""
        return self.value(self.node.func.value) if isinstance(self.node.func, ast.Attribute) else UNKNOWN

    def value(self, node: ast.expr) -> Any:
        """Return the value that an expression has now, or `UNKNOWN`."""
        if not all(isinstance(each, _PURE) or _is_rank_test(each) for each in ast.walk(node)):
            return UNKNOWN
        code = compile(ast.Expression(node), self.file, "eval")
        try:
            return eval(code, self.frame.f_globals, dict(self.frame.f_locals))
        except Exception:  # a name that is assigned later, for example
            return UNKNOWN

    def is_reached(self) -> bool | None:
        """Whether the conditions around the call hold; ``None`` if one of them is not known."""
        results = [(self.value(test), wanted) for test, wanted in self.conditions]
        if any(value is not UNKNOWN and bool(value) != wanted for value, wanted in results):
            return False
        return None if any(value is UNKNOWN for value, _ in results) else True


def _is_rank_test(node: ast.AST) -> bool:
    is_method = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    return is_method and node.func.attr in _RANK_TESTS and not (node.args or node.keywords)  # type: ignore[attr-defined]


def later_calls(own_file: str = "") -> list[LaterCall]:
    """Return the calls that follow the present ones of the script's functions, in the order of the source.

    Args:
        own_file: file of this package that counts as a script.
    """
    found: list[LaterCall] = []
    frame: FrameType | None = inspect.currentframe()
    while frame is not None:
        name = frame.f_code.co_filename
        if is_of_user(name) or name == own_file:
            found += _calls_after(frame)
        frame = frame.f_back
    return found


def _calls_after(frame: FrameType) -> Iterator[LaterCall]:
    try:
        tree = ast.parse(Path(frame.f_code.co_filename).read_text())
    except (OSError, SyntaxError, ValueError):  # the script was changed or deleted
        return
    body = _body_of(tree, frame)
    for statement in _rest_of(body, frame.f_lineno):
        yield from _calls_in(statement, frame, ())


def _body_of(tree: ast.Module, frame: FrameType) -> Sequence[ast.stmt]:
    code = frame.f_code
    if code.co_name == "<module>":
        return tree.body
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            if node.name == code.co_name and first == code.co_firstlineno:
                return node.body
    return ()


def _rest_of(block: Sequence[ast.stmt], line: int) -> Iterator[ast.stmt]:
    """Yield the statements that run after the one at a line: those of the inner blocks first."""
    for number, statement in enumerate(block):
        if statement.lineno <= line <= (statement.end_lineno or statement.lineno):
            yield from _rest_of_inner(statement, line)
            yield from block[number + 1 :]
            return


def _rest_of_inner(statement: ast.stmt, line: int) -> Iterator[ast.stmt]:
    for name in ("body", "orelse", "finalbody"):
        inner = getattr(statement, name, [])
        if inner and inner[0].lineno <= line <= (inner[-1].end_lineno or 0):
            yield from _rest_of(inner, line)
            if isinstance(statement, ast.Try):
                yield from statement.orelse if name == "body" else []
                yield from statement.finalbody if name != "finalbody" else []
            return


def _calls_in(node: ast.AST, frame: FrameType, conditions: tuple[tuple[ast.expr, bool], ...]) -> Iterator[LaterCall]:
    if isinstance(node, _FUNCTIONS):
        return
    if isinstance(node, ast.Call) and not _is_rank_test(node):
        file = Path(frame.f_code.co_filename).name
        name = ast.unparse(node.func)
        yield LaterCall(name=name, file=file, node=node, frame=frame, conditions=conditions)
    if isinstance(node, ast.If):
        yield from _calls_in(node.test, frame, conditions)
        for branch, wanted in ((node.body, True), (node.orelse, False)):
            for statement in branch:
                yield from _calls_in(statement, frame, (*conditions, (node.test, wanted)))
        return
    for child in ast.iter_child_nodes(node):
        yield from _calls_in(child, frame, conditions)
