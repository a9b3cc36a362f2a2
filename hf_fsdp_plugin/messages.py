"""What is shown on stderr: messages and progress bars.

Rank 0 prints each message once, even if several models or configs cause it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import hf_fsdp_plugin.time_limits as time_limits
from hf_fsdp_plugin.problems import Problem, SpecError
from hf_fsdp_plugin.rank_variables import launched_local_rank, launched_rank
from hf_fsdp_plugin.state import process


def print_error(error: SpecError) -> None:
    """Print the problems without a traceback, because they are errors in the config, not in the code.

    A launcher usually stops the other ranks before they print, so an error of all ranks is printed once.
    """
    if launched_local_rank() > 0:
        time.sleep(time_limits.RANK_0_LEAD)
    print(error, file=sys.stderr, flush=True)


class MessagePrinter:
    """How messages are printed, and which ones were printed.

    Attributes:
        quiet: print errors only.
        listener: receives every message when it is printed, on every rank.
        printed: the messages.
    """

    def __init__(self) -> None:
        self.quiet = False
        self.listener: Callable[[object], None] | None = None
        self.printed: set[str] = set()


printer = process.owns(MessagePrinter)
"""Return what prints the messages of this process."""


def print_once(message: object, *, printed_by_launcher: bool = False) -> None:
    """Print ``hf-fsdp: MESSAGE`` unless this process, or the launcher, has printed it before."""
    line, state = str(message), printer()
    is_first = line not in state.printed and not printed_by_launcher
    state.printed.add(line)
    if is_first and state.listener is not None:
        state.listener(message)
    if is_first and not state.quiet and launched_rank() == 0:
        print(f"hf-fsdp: {line}", file=sys.stderr, flush=True)


def print_warnings(problems: Iterable[Problem], *, printed_by_launcher: bool = False) -> None:
    """Print the warnings among ``problems``, each one once."""
    for problem in problems:
        if problem.severity == "warning":
            print_once(problem, printed_by_launcher=printed_by_launcher)


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
