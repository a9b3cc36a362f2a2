"""What users read of ranks that wait: the messages of a hang, the notices before it, and the places of ranks."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Final

from hf_fsdp_plugin.hangs.calls import RankCalls, Wait
from hf_fsdp_plugin.hangs.hang_cause import Diagnosis
from hf_fsdp_plugin.hangs.python_stacks import format_stack
from hf_fsdp_plugin.hangs.watch_files import FoundHang
from hf_fsdp_plugin.problems import Problem
from hf_fsdp_plugin.text import name_ranks, plural

SILENT_EXIT: Final = "Look for os._exit, or for a library that ends the process."
_STATES: Final = {
    "ended": (
        "had ended the script",
        "Make every rank run the same number of steps, and make the same calls on all ranks.",
    ),
    "exited": ("had exited before the end of its script", SILENT_EXIT),
    "halted": (
        "did not run, because its process was stopped by SIGSTOP or a debugger",
        "Let the process continue (kill -CONT), or debug with --hang_timeout 0.",
    ),
    "unreachable": ("is on {detail}, which does not answer", "Check whether this machine runs and is reachable."),
}
"""What has happened to a rank that does not run (see ``RankCalls.state``), and what to do."""
_SAME_CALLS: Final = (
    "Make every rank call the same modules and functions in the same order. If a rank has no input for a module, such "
    "as an expert without tokens or a batch without images, call it with an empty or made-up input. Make saves, "
    "evaluations, generations and gradient clipping on all ranks."
)
_RAISE: Final = "If the rank needs this time, set a longer --hang_timeout."
_LOADER: Final = "the data loader"
_MAX_RANKS: Final = 4
_MAX_CALLS: Final = 3
_MAX_PLACES: Final = 8
_MAX_STACKS: Final = 2


def hang_problem(diagnosis: Diagnosis) -> Problem:
    """Return the message of a hang that ends the run."""
    waiting = _waits(diagnosis.waiting)
    if diagnosis.kind == "different":
        message = f"{diagnosis.difference} Since then {waiting}."
        return Problem(code="FSDP-E729", message=message, fix=_SAME_CALLS)
    if diagnosis.kind == "circle":
        calls = "; ".join(map(_waits, (diagnosis.waiting, *diagnosis.others[: _MAX_CALLS - 1])))
        message = f"{name_ranks(diagnosis.ranks)} wait for each other in different calls: {calls}."
        return Problem(code="FSDP-E730", message=message, fix=_SAME_CALLS)
    if diagnosis.kind == "stuck":
        fix = "Check the network and the processes' devices; the records show no rank that is late."
        return Problem(code="FSDP-E731", message=f"{waiting}, which every rank has begun.", fix=fix)
    return Problem(code="FSDP-E728", message=_late(diagnosis), fix=_fix(diagnosis.known[diagnosis.ranks[0]]))


def describe_busy(diagnosis: Diagnosis, ends_after: float) -> Problem:
    """Return the notice for ranks that are late, but not idle."""
    fix = "The rank is busy, or waits for files or data, so the run continues. "
    fix += f"It ends when the wait has taken {ends_after:,.0f} s."
    return Problem(code="FSDP-W732", message=_late(diagnosis), fix=fix)


def describe_standstill(known: Iterable[RankCalls], seconds: float) -> Problem:
    """Return the notice that no rank waits for another one, but none has begun a collective for a long time."""
    shown = "; ".join(f"{name_ranks([rank.rank])} {_where(rank)}" for rank in list(known)[:_MAX_RANKS])
    message = f"no rank of this machine has begun a collective for {seconds:,.0f} s, and none waits in one: {shown}."
    fix = "The run continues. If the ranks should be training, stop it with Ctrl-C, which prints their places."
    return Problem(code="FSDP-W733", message=message, fix=fix)


def found_hang(diagnosis: Diagnosis, dump: Path | None) -> FoundHang:
    """Return the message, the stacks of ranks that cause the hang, the places of the others, and the file."""
    problem = hang_problem(diagnosis)
    causes, call = diagnosis.ranks, diagnosis.waiting.call
    lines = [f"hang: {problem}"]
    if diagnosis.kind != "different" and diagnosis.difference is not None:
        lines.append(f"before, {diagnosis.difference}")
    for rank in [rank for rank in causes if diagnosis.stack_of(rank)][:_MAX_STACKS]:
        lines.append("\n".join([f"stack of rank {rank}:", *format_stack(diagnosis.stack_of(rank))]))
    others = [] if diagnosis.kind == "late" else list(causes)
    others += [rank for rank in sorted(diagnosis.known) if rank not in causes]
    lines += shown_places(diagnosis.known[rank] for rank in others if diagnosis.known[rank].place)
    if dump is not None:
        lines.append(f"the collectives and stacks of the ranks are in {dump}")
    lines.append("all ranks are being ended")
    return FoundHang(
        text="\n".join(f"hf-fsdp: {line}" for line in lines),
        message=f"hang: {problem.message} [{problem.code}]",
        same_as=f"{problem.code} in {call.operation} of {call.unit}",
    )


def shown_places(ranks: Iterable[RankCalls]) -> list[str]:
    """Return one text for each state and place of ranks, and the number of those that are not shown."""
    groups: dict[tuple[str, str], list[int]] = {}
    for rank in ranks:
        groups.setdefault((_state(rank), rank.place), []).append(rank.rank)
    texts = []
    for (state, place), numbers in groups.items():
        was = f"{'was' if len(numbers) == 1 else 'were'} {place}" if place else ""
        texts.append(f"{name_ranks(sorted(numbers))} {' and '.join(filter(None, (state, was)))}")
    more = len(texts) - _MAX_PLACES
    return texts if more <= 0 else [*texts[:_MAX_PLACES], f"and {plural(more, 'more place')}"]


def _waits(wait: Wait) -> str:
    """Return ``rank 0 has waited for 120 s in all-gather of model.layers.3 (…), number 7 of process group …``."""
    number = f", number {wait.number} of process group {wait.group}" if wait.call.dtype else ""
    have = "has" if len(wait.ranks) == 1 else "have"
    return f"{name_ranks(wait.ranks)} {have} waited for {wait.seconds:,.0f} s in {wait.call}{number}"


def _late(diagnosis: Diagnosis) -> str:
    waiting, ranks = diagnosis.waiting, diagnosis.ranks
    late = [f"{name_ranks([rank])} {_where(diagnosis.known[rank], waiting.group)}" for rank in ranks[:_MAX_RANKS]]
    if len(ranks) > _MAX_RANKS:
        late.append(f"and {plural(len(ranks) - _MAX_RANKS, 'more rank')}")
    are = "is" if len(ranks) == 1 else "are"
    return f"{name_ranks(ranks)} {are} late: {_waits(waiting)}. Meanwhile {'; '.join(late)}."


def _where(rank: RankCalls, group: str = "") -> str:
    if state := _state(rank):
        calls = rank.groups[group].calls if group in rank.groups else ()
        if rank.state not in ("halted", "exited") or not calls:
            return state
        return f"{state}{rank.place and f' {rank.place}'}, after {calls[-1]}"
    place = f"was {rank.place or 'at an unknown place'}"
    return place if rank.cpu is None else f"{place}, and its processes used {rank.cpu:.0%} of a core"


def _state(rank: RankCalls) -> str:
    return _STATES[rank.state][0].format(detail=rank.detail) if rank.state in _STATES else ""


def _fix(rank: RankCalls) -> str:
    if rank.state in _STATES:
        return _STATES[rank.state][1]
    if rank.call == _LOADER:
        return f"Look for slow reads and blocked workers of the data loader. {_RAISE}"
    return f"If only some ranks call {rank.call}, make the call on all ranks. {_RAISE}" if rank.call else _RAISE
