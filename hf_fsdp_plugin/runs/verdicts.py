"""What the launcher of one machine knows about a failed attempt: its cause and progress, and if it would come again."""

from __future__ import annotations

import builtins
import signal
from collections.abc import Iterable
from typing import Final

from hf_fsdp_plugin.runs.exits import RankExit, RunResult
from hf_fsdp_plugin.runs.failure_summary import (
    first_failure,
    has_lost_connection,
    has_waited,
    only_stopped,
    summarize,
)
from hf_fsdp_plugin.runs.restart_rule import Verdict
from hf_fsdp_plugin.runs.restarts import FailedAttempt, Restarts

PROGRAM_ERRORS: Final = (ImportError, SyntaxError, NameError, AttributeError, TypeError)
"""Exceptions that a program raises whenever it is started."""
_USAGE: Final = 2
"""Exit code of argparse."""
_CRASHES: Final = ("SIGSEGV", "SIGABRT", "SIGBUS", "SIGFPE", "SIGILL", "SIGTRAP", "SIGSYS")
"""Signals that a process receives because of what it does. The others are sent to it."""
_MAX_TEXT: Final = 200


def assess_attempt(result: RunResult, restarts: Restarts, *, machine: int, seconds: float) -> Verdict:
    """Return the verdict of this machine. The attempt must have failed, here or on another machine."""
    began, steps = _progress(result.exits)
    final = ""
    if result.signal_number:
        final = f"the launcher of machine {machine} received {signal.Signals(result.signal_number).name}."
    if result.hang is not None and not final:
        # The same code in the same unit after the same step comes from the program.
        text, same_as = result.hang.message[:_MAX_TEXT], result.hang.same_as
        attempt = FailedAttempt(
            failure=text, machine=machine, began=began, steps=steps, seconds=seconds, same_as=same_as
        )
        return Verdict(attempt=attempt)
    first = first_failure(result.exits)
    is_cause = first is not None and not only_stopped(first) and not has_lost_connection(first)
    text = f"rank {first.rank}: {summarize(first)}" if first is not None else ""
    if result.remote_failure and not is_cause:
        text = result.remote_failure
    attempt = FailedAttempt(
        failure=text[:_MAX_TEXT],
        machine=machine,
        began=began,
        steps=steps,
        seconds=seconds,
        same_as=_identity(first) if first is not None and is_cause else "",
    )
    if not final and first is not None and is_cause and not steps and not any(each.steps for each in restarts.failures):
        final = _comes_again(first)
    return Verdict(
        attempt=attempt,
        final=final,
        order=(not is_cause, first is None, first.time if first is not None else 0.0),
    )


def _comes_again(first: RankExit) -> str:
    """Return why a failure before the first optimizer step would come again; empty if it may not."""
    failure = first.failure
    if failure is None:
        return "the script's usage is wrong (exit code 2)." if first.code == _USAGE else ""
    if failure["kind"] == "spec":
        return "" if has_waited(first) else "the config has errors."
    if failure["kind"] == "exit":
        return "the script's usage is wrong (exit code 2)." if first.code == _USAGE else ""
    kind = getattr(builtins, failure["type"], None)
    if isinstance(kind, type) and issubclass(kind, PROGRAM_ERRORS):
        return f"it has failed with {failure['type']} before the first optimizer step."
    return ""


def _identity(first: RankExit) -> str:
    """Return what identifies a failure: exception and place, exit code, or crash; empty for one from outside."""
    if first.failure is not None and first.failure["frames"]:
        places = [f"{frame['file']}:{frame['line']}" for frame in first.failure["frames"]]
        own = [f"{frame['file']}:{frame['line']}" for frame in first.failure["frames"] if not frame["library"]]
        return f"{first.failure['type']} at {' '.join([*own, places[-1]])}"
    if first.code < 0:
        names = [name for name in _CRASHES if getattr(signal, name, None) == -first.code]
        return names[0] if names else ""
    return f"exit code {first.code}"


def _progress(exits: Iterable[RankExit]) -> tuple[int | None, int | None]:
    """Return the optimizer steps of the run before this attempt and at its end; ``None`` if it trained nothing."""
    counts = [rank.counts for rank in exits if rank.counts is not None]
    furthest = max(counts, key=lambda each: each.before + each.steps, default=None)
    if furthest is None or furthest.before + furthest.steps == 0:
        return None, None
    return furthest.before, furthest.before + furthest.steps
