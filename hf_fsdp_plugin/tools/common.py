"""What several tools share: arguments, tables, progress bars, and ranks with hidden output; sizes and times as text."""

from __future__ import annotations

import argparse
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from hf_fsdp_plugin.cli.output import Color, colored, text_width
from hf_fsdp_plugin.messages import progress_bar
from hf_fsdp_plugin.problems import UsageError
from hf_fsdp_plugin.text import format_table

if TYPE_CHECKING:  # only the verbs that start ranks import these
    from hf_fsdp_plugin.launcher.world import World
    from hf_fsdp_plugin.runs.failures import AttemptResult
    from hf_fsdp_plugin.sources.handover import LaunchHandover
    from hf_fsdp_plugin.spec.fsdp_spec import FsdpSpec

Progress = Callable[[str, int, int], None]
"""Progress callback: receives the step (``merge``, ``verify``), the bytes since the last call, and the total."""
_GRACE: Final = 3.0
"""Seconds from a signal to SIGKILL for the ranks of :func:`run_job`."""


def check_needs(args: argparse.Namespace, needs: Mapping[str, Sequence[str]]) -> None:
    """Raise ``UsageError`` for a flag that has no effect, because none of the flags that it needs was written.

    Args:
        needs: attribute of a flag -> attributes of which it needs one.
    """
    for name, others in needs.items():
        if name in args.given and not any(other in args.given for other in others):
            flags = " or ".join(f"--{other.replace('_', '-')}" for other in others)
            raise UsageError(f"{args.given[name]} needs {flags}.")


def check_folder(given: str | Path, kind: str = "checkpoint") -> Path:
    """Return the folder of a path, or the one that stands for a URL. Raises ``UsageError`` if it does not exist.

    Args:
        kind: what the folder should be, for the message.
    """
    from hf_fsdp_plugin.checkpoint.storage import folder_of  # other verbs read no checkpoints

    folder = folder_of(str(given))
    if not folder.is_dir():
        what = "is not a folder" if folder.exists() else "does not exist"
        raise UsageError(f"{folder} {what}. Give the folder of a {kind}.")
    return folder


def whole_number(least: int, most: int | None = None) -> Callable[[str], int]:
    """Return the reader of a flag whose value is a whole number in a range, for ``add_argument(type=…)``."""
    limits = f"from {least} on" if most is None else f"from {least} to {most}"

    def read(text: str) -> int:
        if not (text.isascii() and text.isdecimal()) or not least <= int(text) <= (most or int(text)):
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number {limits}.")
        return int(text)

    return read


def colored_table(rows: Sequence[Sequence[str]], colors: Sequence[Color | None]) -> str:
    """Return a table that fits on the terminal, with a bold head.

    Args:
        rows: the cells of the head, then those of each row.
        colors: the color of each row after the head.
    """
    head, *lines = format_table(rows, width=text_width()).split("\n")
    shown = [line if color is None else colored(line, color) for line, color in zip(lines, colors, strict=True)]
    return "\n".join([colored(head, "bold"), *shown])


class ProgressBars(ExitStack):
    """A progress bar for each step of a verb; none if stderr is not a terminal."""

    def __init__(self) -> None:
        super().__init__()
        self._updates: dict[str, Callable[[int], object]] = {}

    def __call__(self, step: str, count: int, total: int) -> None:
        """Add ``count`` of ``total`` bytes to the bar of a step."""
        if step not in self._updates:
            self._updates[step] = self.enter_context(progress_bar(step, total, delay=0.0))
        self._updates[step](count)


def run_job(
    words: Sequence[str],
    spec: FsdpSpec,
    world: World,
    handover: LaunchHandover,
    *,
    env: Mapping[str, str],
    should_stop: Callable[[], str | None],
) -> AttemptResult:
    """Run a script or a module once on ranks of this machine, with hidden output, and return how they exited.

    Args:
        words: SCRIPT ARGS or ``-m`` MODULE ARGS.
        env: variables of the ranks in addition to those of the spec.
        should_stop: called again and again while the ranks run. Returns why they are stopped; ``None`` if they are not.
    """
    from hf_fsdp_plugin.launcher.flags import LaunchArguments
    from hf_fsdp_plugin.launcher.rank_processes import RankJob, launch_env, rank_command
    from hf_fsdp_plugin.launcher.rendezvous import Rendezvous  # imports torch
    from hf_fsdp_plugin.launcher.start_ranks import run_once
    from hf_fsdp_plugin.runs.attempts import Restarts
    from hf_fsdp_plugin.spec.fsdp_spec import LaunchSection

    job = RankJob(
        command=rank_command(words),
        num_local=world.size,
        env=launch_env(spec, world, handover, LaunchArguments(env=env)),
        grace=_GRACE,
        should_stop=should_stop,
    )
    return run_once(job, Rendezvous(LaunchSection(), replace(world, num_machines=1), Restarts()))


_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(?:([kmgt])(i?)b?|(b))?\s*", re.IGNORECASE)
SIZE_SPELLINGS = '"80GB" (80·10⁹ bytes), "80 GB", "79.6GiB" (2³⁰ bytes each), "81559MiB", or "80", which means GB'


def parse_bytes(text: str, *, plain: int = 10**9, least: int = 1 << 20) -> int | None:
    """Return the bytes of ``80GB``, ``80 GB``, ``80GiB`` or ``80``; ``None`` if it is not the size of a memory.

    Args:
        plain: bytes of the unit of a number without one.
        least: smallest number of bytes that is not refused. The largest is 1 PiB.
    """
    found = _SIZE.fullmatch(text)
    if found is None:
        return None
    number, prefix, binary, is_bytes = found.groups()
    base = 1024 if binary else 1000
    unit = base ** ("kmgt".index(prefix.lower()) + 1) if prefix else 1 if is_bytes else plain
    size = int(float(number) * unit)
    return size if least <= size <= 1 << 50 else None


def format_seconds(seconds: float) -> str:
    """Format a duration: ``12.3 ms``, or ``4.56 s`` from one second."""
    return f"{seconds * 1000:,.1f} ms" if abs(seconds) < 1 else f"{seconds:,.2f} s"


def nearest_multiples(count: int, divisor: int) -> str:
    """Return the multiples of a divisor below and above a number that is not one itself, such as ``64 or 72``."""
    below = count - count % divisor
    return f"{below} or {below + divisor}" if below > 0 else str(divisor)


def wrap_items(items: Iterable[str], width: int, *, label: str = "") -> list[str]:
    """Join items by commas, in lines of at most `width` characters. Lines are broken between items only.

    Args:
        label: start of the first line. Other lines are indented by its length.
    """
    text = ", ".join(item.replace(" ", "\N{NO-BREAK SPACE}") for item in items)
    wrapper = textwrap.TextWrapper(width, label, " " * len(label), break_long_words=False, break_on_hyphens=False)
    return [line.replace("\N{NO-BREAK SPACE}", " ") for line in wrapper.wrap(text)]
