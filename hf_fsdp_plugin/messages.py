"""What is shown on stderr: messages and progress bars.

Rank 0 prints each message once, even if several models or configs cause it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType

from hf_fsdp_plugin.problems import Problem, SpecError
from hf_fsdp_plugin.rank_variables import launched_local_rank, launched_rank
from hf_fsdp_plugin.state import process

_RANK_0_LEAD = 10.0
"""Seconds after which ranks other than local rank 0 print an error too.

A launcher usually stops these ranks sooner, so an error of all ranks is printed once. An error that local rank 0 does
not have is still printed.
"""


def print_error(error: SpecError) -> None:
    """Print the problems without a traceback, because they are errors in the config, not in the code."""
    if launched_local_rank() > 0:
        time.sleep(_RANK_0_LEAD)
    print(error, file=sys.stderr, flush=True)


class MessagePrinter:
    """Prints messages, and remembers which ones were printed.

    Attributes:
        quiet: print errors only.
        listener: receives every message when it is printed, on every rank.
    """

    def __init__(self) -> None:
        self.quiet = False
        self.listener: Callable[[object], None] | None = None
        self._printed: set[str] = set()
        self._previous_hook: Callable[..., object] | None = None
        self._add_remedy: Callable[[BaseException], None] = lambda error: None
        self._record: Callable[[BaseException], None] = lambda error: None

    def print_once(self, message: object, *, printed_by_launcher: bool = False) -> None:
        """Print ``hf-fsdp: MESSAGE`` unless this process, or the launcher, has printed it before."""
        line = str(message)
        is_first = line not in self._printed and not printed_by_launcher
        self._printed.add(line)
        if is_first and self.listener is not None:
            self.listener(message)
        if is_first and not self.quiet and launched_rank() == 0:
            print(f"hf-fsdp: {line}", file=sys.stderr, flush=True)

    def print_warnings(self, problems: Iterable[Problem], *, printed_by_launcher: bool = False) -> None:
        """Print the warnings among ``problems``, each one once."""
        for problem in problems:
            if problem.severity == "warning":
                self.print_once(problem, printed_by_launcher=printed_by_launcher)

    def install_excepthook(
        self, add_remedy: Callable[[BaseException], None], record: Callable[[BaseException], None]
    ) -> None:
        """Print a ``SpecError`` that ends the script with :func:`print_error`.

        Args:
            add_remedy: called with other exceptions before they are printed.
            record: called with every exception before it is printed, after ``add_remedy``.
        """
        self._add_remedy, self._record = add_remedy, record
        if self._previous_hook is None:
            self._previous_hook, sys.excepthook = sys.excepthook, self._excepthook

    def _excepthook(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, SpecError):
            self._add_remedy(error)
        self._record(error)
        if isinstance(error, SpecError):
            print_error(error)
        else:
            (self._previous_hook or sys.__excepthook__)(kind, error, trace)

    def close(self) -> None:
        """Restore ``sys.excepthook`` and forget what was printed."""
        if self._previous_hook is not None and sys.excepthook == self._excepthook:
            sys.excepthook = self._previous_hook
        self.quiet, self.listener, self._previous_hook = False, None, None
        self._printed.clear()


printer = process.owns(MessagePrinter)
"""Return what prints the messages of this process."""


def print_once(message: object, *, printed_by_launcher: bool = False) -> None:
    """Print a message as :meth:`MessagePrinter.print_once` does."""
    printer().print_once(message, printed_by_launcher=printed_by_launcher)


def print_warnings(problems: Iterable[Problem], *, printed_by_launcher: bool = False) -> None:
    """Print the warnings among ``problems``, each one once."""
    printer().print_warnings(problems, printed_by_launcher=printed_by_launcher)


@contextmanager
def progress_bar(step: str, total: int, *, delay: float = 1.0) -> Iterator[Callable[[int], object]]:
    """Show the progress of rank 0 on a terminal. Yields a function that is called with the bytes since its last call.

    Args:
        step: what is done, such as ``saving``.
        total: number of bytes.
        delay: seconds until the bar appears. With the default of one, short saves show none.
    """
    if launched_rank() != 0 or not sys.stderr.isatty():
        yield lambda num_bytes: None
        return
    from tqdm import tqdm

    with tqdm(total=total, desc=step, unit="B", unit_scale=True, leave=False, delay=delay) as bar:
        yield bar.update
