"""The messages of a diagnosed hang."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from hf_fsdp_plugin.hangs.calls import ARRIVALS, RankCalls
from hf_fsdp_plugin.hangs.diagnose import Diagnosis, Difference, Waiting, compare
from hf_fsdp_plugin.problems import Problem
from hf_fsdp_plugin.text import format_names, plural

_SAME_CALLS: Final = (
    "Make every rank call the same modules and functions in the same order. If a rank has no input for a module, such "
    "as an expert without tokens or a batch without images, call it with an empty or made-up input. Make saves, "
    "evaluations, generations and gradient clipping on all ranks."
)
SILENT_EXIT: Final = "Look for os._exit, or for a library that ends the process."
_RAISE: Final = "If the rank needs this time, set a longer --hang_timeout."
_FIXES: Final[Mapping[str, str]] = {
    "halted": "Let the process continue (kill -CONT), or debug with --hang_timeout 0.",
    "exited": SILENT_EXIT,
    "ended": "Make every rank run the same number of steps, and make the same calls on all ranks.",
    "unreachable": "Check whether this machine runs and is reachable.",
}
_LOADER: Final = "the data loader"
_MAX_RANKS: Final = 4
_MAX_CALLS: Final = 3


def describe(diagnosis: Diagnosis, known: Mapping[int, RankCalls]) -> Problem:
    """Return the message of a hang that ends the run."""
    waiting = diagnosis.waiting
    if diagnosis.kind == "different" and diagnosis.difference is not None:
        message = f"{describe_difference(diagnosis.difference)} Since then {_waits(waiting)}."
        return Problem(code="FSDP-E729", message=message, fix=_SAME_CALLS)
    if diagnosis.kind == "circle":
        calls = "; ".join(_waits(each) for each in (waiting, *diagnosis.others)[:_MAX_CALLS])
        message = f"{_ranks(diagnosis.ranks)} wait for each other in different calls: {calls}."
        return Problem(code="FSDP-E730", message=message, fix=_SAME_CALLS)
    if diagnosis.kind == "stuck":
        message = f"{_waits(waiting)}, which every rank has begun."
        fix = "Check the network and the processes' devices; the records show no rank that is late."
        return Problem(code="FSDP-E731", message=message, fix=fix)
    return Problem(code="FSDP-E728", message=_late(diagnosis, known), fix=_fix(diagnosis.ranks, known))


def describe_busy(diagnosis: Diagnosis, known: Mapping[int, RankCalls], ends_after: float) -> Problem:
    """Return the notice for ranks that are late, but not idle."""
    does = "is busy" if diagnosis.is_busy else "waits for files or data"
    return Problem(
        code="FSDP-W732",
        message=_late(diagnosis, known),
        fix=f"The rank {does}, so the run continues. It ends when the wait has taken {ends_after:,.0f} s.",
    )


def describe_standstill(known: Iterable[RankCalls], seconds: float) -> Problem:
    """Return the notice for ranks of which none waits for another, and none has begun a collective for long."""
    shown = "; ".join(f"{_ranks([rank.rank])} {_where(rank)}" for rank in list(known)[:_MAX_RANKS])
    return Problem(
        code="FSDP-W733",
        message=f"no rank of this machine has begun a collective for {seconds:,.0f} s, and none waits in one: {shown}.",
        fix="The run continues. If the ranks should be training, stop it with Ctrl-C, which prints their places.",
    )


def last_call(rank: RankCalls | None) -> str:
    """Return the last collective of a rank, with its number and group; empty if there is none."""
    group = rank.last_group if rank is not None else ""
    if rank is None or not group:
        return ""
    found = rank.groups[group]
    return f"{found.calls[-1]}, number {found.last} of process group {group}"


def describe_comparison(ranks: Iterable[RankCalls]) -> str:
    """Return sentences on the collectives of ranks after a failure of the communication; empty if they are equal."""
    found = compare(ranks)
    if isinstance(found, Difference):
        return describe_difference(found)
    if found is None:
        return ""
    return f"only {_ranks(found.ranks)} had begun {found.call}, number {found.number} of process group {found.group}."


def describe_difference(difference: Difference) -> str:
    """Return sentences on the first collective in which ranks differ."""
    calls = "; ".join(f"{_ranks(ranks)}: {call}" for call, ranks in difference.calls[:_MAX_CALLS])
    where = "the plugin's calls" if difference.group == ARRIVALS else f"process group {difference.group}"
    text = f"ranks made different collective calls. Number {difference.number} of {where} was on {calls}."
    return f"{text}{_reason(difference)}"


def _reason(difference: Difference) -> str:
    """Return a sentence on the ranks that are the reason, after a space; empty if they are unknown."""
    ranks, skipped = difference.skipped
    if ranks:
        more = f" and {plural(len(skipped) - 1, 'more call')}" if len(skipped) > 1 else ""
        return f" {_ranks(ranks).capitalize()} left out {skipped[0]}{more}."
    ranks, most, few = difference.more_forwards
    if ranks and (ranks == difference.ranks or difference.unusual != difference.ranks):
        own, others = (most, few) if ranks == difference.ranks else (few, most)
        return (
            f" {_ranks(difference.ranks).capitalize()} had called the model {_times(own)}, the others {_times(others)}."
        )
    if difference.unusual == difference.ranks:
        return f" In earlier steps, the call before was not followed by that of {_ranks(difference.unusual)}."
    return ""


def _times(count: int) -> str:
    return {1: "once", 2: "twice"}.get(count, f"{count:,} times")


def _late(diagnosis: Diagnosis, known: Mapping[int, RankCalls]) -> str:
    waiting = diagnosis.waiting
    late = "; ".join(f"{_ranks([rank])} {_where(known[rank], waiting.group)}" for rank in diagnosis.ranks[:_MAX_RANKS])
    more = len(diagnosis.ranks) - _MAX_RANKS
    rest = f"; and {plural(more, 'more rank')}" if more > 0 else ""
    return f"{_ranks(diagnosis.ranks)} {_are(diagnosis.ranks)} late: {_waits(waiting)}. Meanwhile {late}{rest}."


def _waits(waiting: Waiting) -> str:
    """Return ``rank 0 has waited for 120 s in all-gather of model.layers.3 (…), number 7 of process group …``."""
    number = f", number {waiting.number} of process group {waiting.group}" if waiting.call.dtype else ""
    have = "has" if len(waiting.ranks) == 1 else "have"
    return f"{_ranks(waiting.ranks)} {have} waited for {waiting.seconds:,.0f} s in {waiting.call}{number}"


def _where(rank: RankCalls, group: str = "") -> str:
    if rank.state == "halted":
        return f"did not run, because its process was stopped by SIGSTOP or a debugger{_after(rank, group)}"
    if rank.state == "exited":
        return f"had exited before the end of its script{_after(rank, group)}"
    if rank.state == "ended":
        return "had ended the script"
    if rank.state == "unreachable":
        return f"is on {rank.detail}, which does not answer"
    place = f"was {rank.place}" if rank.place else "was at an unknown place"
    return place if rank.cpu is None else f"{place}, and its processes used {rank.cpu:.0%} of a core"


def _after(rank: RankCalls, group: str) -> str:
    """Return the last collective of a rank whose stack is unknown."""
    calls = rank.groups[group].calls if group in rank.groups else ()
    return f"{f' {rank.place}' if rank.place else ''}, after {calls[-1]}" if calls else ""


def _fix(ranks: Sequence[int], known: Mapping[int, RankCalls]) -> str:
    first = known[ranks[0]]
    if first.state in _FIXES:
        return _FIXES[first.state]
    if first.call == _LOADER:
        return f"Look for slow reads and blocked workers of the data loader. {_RAISE}"
    if first.call:
        return f"If only some ranks call {first.call}, make the call on all ranks. {_RAISE}"
    return _RAISE


def _are(ranks: Sequence[int]) -> str:
    return "is" if len(ranks) == 1 else "are"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {format_names(ranks, 16)}"
