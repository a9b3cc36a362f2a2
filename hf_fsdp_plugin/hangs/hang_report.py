"""The messages of a diagnosed hang, and the JSON file with everything that is known of the ranks."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from hf_fsdp_plugin.hangs.calls import ARRIVALS, RankCalls
from hf_fsdp_plugin.hangs.diagnose import Diagnosis, Difference, Waiting, compare_calls
from hf_fsdp_plugin.hangs.rank_files import write_atomically
from hf_fsdp_plugin.hangs.rank_stacks import Frame, RanksAt, describe_state, format_stack, merge_places
from hf_fsdp_plugin.problems import Problem
from hf_fsdp_plugin.text import format_names, plural
from hf_fsdp_plugin.version import SCHEMA_VERSION

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Hang:
    """A hang that ends the run.

    Attributes:
        problem: the message.
        ranks: what is known of all ranks of the run, by rank.
        stacks: the Python stacks of the ranks of this machine, outermost frame first.
    """

    problem: Problem
    diagnosis: Diagnosis
    ranks: Mapping[int, RankCalls]
    stacks: Mapping[int, Sequence[Frame]]


def describe_hang(diagnosis: Diagnosis, known: Mapping[int, RankCalls]) -> Problem:
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
    found = compare_calls(ranks)
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
    if state := describe_state(rank.state, rank.detail):
        return f"{state}{_after(rank, group) if rank.state in ('halted', 'exited') else ''}"
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


_MAX_STACKS: Final = 2
_MAX_PLACES: Final = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundHang:
    """A hang that ends the ranks of this machine, in ``RankFiles.hang``.

    Attributes:
        text: the whole output.
        message: the same in one line.
        code: of the problem.
        same_as: identifies the hang in another attempt.
        elsewhere: whether a rank of another machine has found it.
    """

    text: str
    message: str
    code: str
    same_as: str
    elsewhere: bool = False

    @classmethod
    def read(cls, path: Path) -> FoundHang | None:
        """Return the hang that a file describes; ``None`` if there is no such file."""
        try:
            return cls(**json.loads(path.read_text()))
        except (OSError, ValueError, TypeError):
            return None

    def claim(self, path: Path) -> bool:
        """Write the file. Returns ``False`` if another rank has written it before."""
        part = path.with_name(f"{path.name}.{os.getpid()}")
        try:
            part.write_text(json.dumps(asdict(self)))
            os.link(part, path)
        except FileExistsError:
            return False
        except OSError:  # such as a full disk: the other ranks of the machine end later
            return True
        finally:
            part.unlink(missing_ok=True)
        return True


def found_hang(hang: Hang, dump: Path | None) -> FoundHang:
    """Return what the ranks of this machine need to know of a hang."""
    waiting = hang.diagnosis.waiting
    return FoundHang(
        text=format_hang(hang, dump),
        message=f"hang: {hang.problem.message} [{hang.problem.code}]",
        code=hang.problem.code,
        same_as=f"{hang.problem.code} in {waiting.call.operation} of {waiting.call.unit}",
    )


def format_hang(hang: Hang, dump: Path | None) -> str:
    """Return the message, the stacks of ranks that cause the hang, the places of the others, and the file."""
    causes = hang.diagnosis.ranks
    lines = [f"hf-fsdp: hang: {hang.problem}"]
    if hang.diagnosis.kind != "different" and hang.diagnosis.difference is not None:
        lines.append(f"hf-fsdp: before, {describe_difference(hang.diagnosis.difference)}")
    for rank in [rank for rank in causes if hang.stacks.get(rank)][:_MAX_STACKS]:
        lines += [f"hf-fsdp: stack of rank {rank}:", *format_stack(hang.stacks[rank])]
    others = [] if hang.diagnosis.kind == "late" else list(causes)
    others += [rank for rank in sorted(hang.ranks) if rank not in causes]
    places = merge_places(RanksAt((rank,), hang.ranks[rank].place) for rank in others if hang.ranks[rank].place)
    lines += [f"hf-fsdp: {place}" for place in places[:_MAX_PLACES]]
    if len(places) > _MAX_PLACES:
        lines.append(f"hf-fsdp: and {plural(len(places) - _MAX_PLACES, 'more place')}")
    if dump is not None:
        lines.append(f"hf-fsdp: the collectives and stacks of the ranks are in {dump}")
    lines.append("hf-fsdp: all ranks are being ended")
    return "\n".join(lines)


def write_hang(hang: Hang, folder: Path | None, *, limit: float) -> Path | None:
    """Write the dump, and return its path; ``None`` if no folder is writable.

    Args:
        folder: where the user wants logs. By default the working directory, then the folder of temporary files.
    """
    content = json.dumps(_content(hang, limit), indent=1)
    name = f"fsdp_hang_{time.strftime('%Y%m%d_%H%M%S')}.json"
    write_atomically((folder or Path()) / name, content)
    if ((folder or Path()) / name).exists():
        return (folder or Path()) / name
    with suppress(OSError):  # a folder of this user only, because others could have put a link at a name that they know
        path = Path(tempfile.mkdtemp(prefix="fsdp_hang_")) / name
        write_atomically(path, content)
        return path if path.exists() else None
    return None


def _content(hang: Hang, limit: float) -> dict[str, Any]:
    diagnosis = hang.diagnosis
    waiting = diagnosis.waiting
    difference = diagnosis.difference
    return {
        "schema": SCHEMA_VERSION,
        "time": time.time(),
        "limit_seconds": limit,
        "code": hang.problem.code,
        "message": hang.problem.message,
        "kind": diagnosis.kind,
        "ranks": list(diagnosis.ranks),
        "waiting": [
            {
                **{"group": each.group, "number": each.number, "ranks": each.ranks, "seconds": each.seconds},
                **each.call._asdict(),
            }
            for each in (waiting, *diagnosis.others)
        ],
        "difference": difference
        and {
            "group": difference.group,
            "number": difference.number,
            "calls": [{"call": str(call), "unit": call.unit, "ranks": list(ranks)} for call, ranks in difference.calls],
            "skipped": {
                "ranks": list(difference.skipped[0]),
                "calls": [{"call": str(call), "unit": call.unit} for call in difference.skipped[1]],
            },
            "unusual_ranks": list(difference.unusual),
            "ranks_with_more_forwards": list(difference.more_forwards[0]),
        },
        "calls_of_ranks": [rank.to_json() for _, rank in sorted(hang.ranks.items())],
        "stacks": {str(rank): list(map(asdict, stack)) for rank, stack in hang.stacks.items()},
    }
