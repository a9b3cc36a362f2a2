"""Messages of a rank on stderr: printed by rank 0, each one once, even if several models or configs cause it."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable
from types import TracebackType

from hf_fsdp_plugin.problems import Problem, SpecError

_RANK_0_LEAD = 10.0
"""Seconds that local rank 0 has to print an error before the other ranks print it too.

A launcher ends the other ranks sooner, so the error is printed once. It is still printed if only another rank has it.
"""


class MessagePrinter:
    """Prints messages, and remembers which ones were printed.

    Attributes:
        quiet: print errors only.
    """

    def __init__(self) -> None:
        self.quiet = False
        self._printed: set[str] = set()
        self._excepthook: Callable[..., object] | None = None

    def print_once(self, message: object, *, printed_by_launcher: bool = False) -> None:
        """Print ``hf-fsdp: MESSAGE`` unless this process, or the launcher, has printed it before."""
        line = str(message)
        is_first = line not in self._printed and not printed_by_launcher
        self._printed.add(line)
        if is_first and not self.quiet and os.environ.get("RANK", "0") == "0":
            print(f"hf-fsdp: {line}", file=sys.stderr, flush=True)

    def print_warnings(self, problems: Iterable[Problem], *, printed_by_launcher: bool = False) -> None:
        """Print the warnings among ``problems``, each one once."""
        for problem in problems:
            if problem.severity == "warning":
                self.print_once(problem, printed_by_launcher=printed_by_launcher)

    def set_quiet(self) -> None:
        """Print errors only from now on."""
        self.quiet = True

    def print_error(self, error: SpecError) -> None:
        """Print the problems without a traceback: the config is wrong, not a line of code."""
        if int(os.environ.get("LOCAL_RANK") or "0") > 0:
            time.sleep(_RANK_0_LEAD)
        print(error, file=sys.stderr, flush=True)

    def install_excepthook(self) -> None:
        """Show a ``SpecError`` that ends the script by :meth:`print_error`; other exceptions as before."""
        if self._excepthook is None:
            self._excepthook = sys.excepthook
            sys.excepthook = self._handle_exception

    def _handle_exception(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, SpecError) and self._excepthook is not None:
            self.print_error(error)
        else:
            (self._excepthook or sys.__excepthook__)(kind, error, trace)

    def close(self) -> None:
        """Restore ``sys.excepthook`` and forget what was printed."""
        if self._excepthook is not None and sys.excepthook == self._handle_exception:
            sys.excepthook = self._excepthook
        self.__init__()  # type: ignore[misc]


_printer = MessagePrinter()
close_messages = _printer.close
install_excepthook = _printer.install_excepthook
print_error = _printer.print_error
print_once = _printer.print_once
print_warnings = _printer.print_warnings
set_quiet = _printer.set_quiet
