"""What a rank says on stderr: by the first rank, each thing once, however many models and configs repeat it."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable
from types import TracebackType

from hf_fsdp_plugin.problems import Problem, SpecError

_told: set[str] = set()
_quiet = False
_FIRST_WORD = 10.0
"""Seconds that the first rank has to say what is wrong with a config, before the other ranks say it too. A launcher
ends them sooner, so that it is said once; where only another rank has the problem, it is said all the same."""


def be_quiet() -> None:
    """Errors only, from here on."""
    global _quiet
    _quiet = True


def tell_warnings(problems: Iterable[Problem], *, told_by_launcher: bool = False) -> None:
    """The warnings among `problems`; with `told_by_launcher` they are taken for said."""
    for problem in problems:
        if problem.severity == "warning":
            tell(str(problem), told_by_launcher=told_by_launcher)


def tell(line: str, *, told_by_launcher: bool = False) -> None:
    if line not in _told and not told_by_launcher and not _quiet and os.environ.get("RANK", "0") == "0":
        print(f"hf-fsdp: {line}", file=sys.stderr, flush=True)
    _told.add(line)


def tell_error(error: SpecError) -> None:
    """The problems as text, without a traceback: it is the config that is wrong, not a line of code."""
    if int(os.environ.get("LOCAL_RANK") or "0") > 0:
        time.sleep(_FIRST_WORD)
    print(error, file=sys.stderr, flush=True)


def errors_without_tracebacks() -> None:
    """Let a ``SpecError`` that ends the script be shown by :func:`tell_error`; every other exception as before."""
    if not getattr(sys.excepthook, "_hf_fsdp", False):
        sys.excepthook = _hook(sys.excepthook)


def _hook(before: Callable[..., object]) -> Callable[..., None]:
    def hook(kind: type[BaseException], error: BaseException, where: TracebackType | None) -> None:
        if isinstance(error, SpecError):
            tell_error(error)
        else:
            before(kind, error, where)

    hook._hf_fsdp = True  # type: ignore[attr-defined]
    return hook
