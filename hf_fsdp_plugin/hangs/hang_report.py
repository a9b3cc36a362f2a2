"""The messages of a diagnosed hang, and the JSON file with everything that is known of the ranks."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from hf_fsdp_plugin.hangs.calls import RankCalls
from hf_fsdp_plugin.hangs.diagnose import Diagnosis
from hf_fsdp_plugin.hangs.rank_files import write_atomically
from hf_fsdp_plugin.hangs.rank_stacks import Frame, describe_state, format_stack, shown_places
from hf_fsdp_plugin.problems import Problem
from hf_fsdp_plugin.text import name_ranks, plural
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
        stacks: the Python stacks of the ranks of this machine, outermost frame first.
    """

    diagnosis: Diagnosis
    stacks: Mapping[int, Sequence[Frame]]

    @property
    def problem(self) -> Problem:
        """The message."""
        diagnosis, waiting = self.diagnosis, self.diagnosis.waiting
        if diagnosis.kind == "different" and diagnosis.difference is not None:
            message = f"{diagnosis.difference} Since then {waiting}."
            return Problem(code="FSDP-E729", message=message, fix=_SAME_CALLS)
        if diagnosis.kind == "circle":
            calls = "; ".join(str(each) for each in (waiting, *diagnosis.others)[:_MAX_CALLS])
            message = f"{name_ranks(diagnosis.ranks)} wait for each other in different calls: {calls}."
            return Problem(code="FSDP-E730", message=message, fix=_SAME_CALLS)
        if diagnosis.kind == "stuck":
            message = f"{waiting}, which every rank has begun."
            fix = "Check the network and the processes' devices; the records show no rank that is late."
            return Problem(code="FSDP-E731", message=message, fix=fix)
        return Problem(code="FSDP-E728", message=_late(diagnosis), fix=_fix(diagnosis.known[diagnosis.ranks[0]]))


def describe_busy(diagnosis: Diagnosis, ends_after: float) -> Problem:
    """Return the notice for ranks that are late, but not idle."""
    does = "is busy" if diagnosis.is_busy else "waits for files or data"
    return Problem(
        code="FSDP-W732",
        message=_late(diagnosis),
        fix=f"The rank {does}, so the run continues. It ends when the wait has taken {ends_after:,.0f} s.",
    )


def describe_standstill(known: Iterable[RankCalls], seconds: float) -> Problem:
    """Return the notice that no rank waits for another one, but none has begun a collective for a long time."""
    shown = "; ".join(f"{name_ranks([rank.rank])} {_where(rank)}" for rank in list(known)[:_MAX_RANKS])
    return Problem(
        code="FSDP-W733",
        message=f"no rank of this machine has begun a collective for {seconds:,.0f} s, and none waits in one: {shown}.",
        fix="The run continues. If the ranks should be training, stop it with Ctrl-C, which prints their places.",
    )


def _late(diagnosis: Diagnosis) -> str:
    waiting, ranks = diagnosis.waiting, diagnosis.ranks
    late = [f"{name_ranks([rank])} {_where(diagnosis.known[rank], waiting.group)}" for rank in ranks[:_MAX_RANKS]]
    if len(ranks) > _MAX_RANKS:
        late.append(f"and {plural(len(ranks) - _MAX_RANKS, 'more rank')}")
    are = "is" if len(ranks) == 1 else "are"
    return f"{name_ranks(ranks)} {are} late: {waiting}. Meanwhile {'; '.join(late)}."


def _where(rank: RankCalls, group: str = "") -> str:
    if state := describe_state(rank.state, rank.detail):
        calls = rank.groups[group].calls if group in rank.groups else ()
        if rank.state in ("halted", "exited") and calls:
            place = f" {rank.place}" if rank.place else ""
            return f"{state}{place}, after {calls[-1]}"
        return state
    place = f"was {rank.place or 'at an unknown place'}"
    return place if rank.cpu is None else f"{place}, and its processes used {rank.cpu:.0%} of a core"


def _fix(rank: RankCalls) -> str:
    if rank.state in _FIXES:
        return _FIXES[rank.state]
    if rank.call == _LOADER:
        return f"Look for slow reads and blocked workers of the data loader. {_RAISE}"
    return f"If only some ranks call {rank.call}, make the call on all ranks. {_RAISE}" if rank.call else _RAISE


_MAX_STACKS: Final = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundHang:
    """A hang that ends the ranks of this machine, in ``RankFiles.hang``.

    Attributes:
        text: the whole output.
        message: the message of the hang in one line.
        same_as: identifies the hang in another attempt.
        elsewhere: whether a rank of another machine has found it.
    """

    text: str
    message: str
    same_as: str
    elsewhere: bool = False

    def of_machine(self, machine: str) -> FoundHang:
        """Return the hang for the ranks of other machines."""
        message = f"{machine}: {self.message}"
        text = f"hf-fsdp: the ranks of this machine were stopped because another failed: {message}"
        return replace(self, text=text, message=message, elsewhere=True)

    @classmethod
    def from_json(cls, content: Any) -> FoundHang | None:
        """Return what ``asdict`` of a hang has returned; ``None`` for anything else."""
        try:
            return cls(**content)
        except TypeError:
            return None

    @classmethod
    def read(cls, path: Path) -> FoundHang | None:
        """Return the hang that a file describes; ``None`` if there is no such file."""
        try:
            return cls.from_json(json.loads(path.read_text()))
        except (OSError, ValueError):
            return None

    def claim(self, path: Path) -> bool:
        """Write the file. Returns ``False`` if another rank has written it before."""
        part = path.with_name(f"{path.name}.{os.getpid()}")
        with suppress(OSError):  # such as a full disk: the other ranks of the machine end later
            part.write_text(json.dumps(asdict(self)))
            try:
                os.link(part, path)
            except FileExistsError:
                return False
            finally:
                part.unlink()
        return True


def found_hang(hang: Hang, dump: Path | None) -> FoundHang:
    """Return the message, the stacks of ranks that cause the hang, the places of the others, and the file."""
    diagnosis, problem = hang.diagnosis, hang.problem
    causes, call = diagnosis.ranks, diagnosis.waiting.call
    lines = [f"hang: {problem}"]
    if diagnosis.kind != "different" and diagnosis.difference is not None:
        lines.append(f"before, {diagnosis.difference}")
    for rank in [rank for rank in causes if hang.stacks.get(rank)][:_MAX_STACKS]:
        lines.append("\n".join([f"stack of rank {rank}:", *format_stack(hang.stacks[rank])]))
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


def write_hang(hang: Hang, folder: Path | None, *, limit: float) -> Path | None:
    """Write the dump, and return its path; ``None`` if no folder is writable.

    Args:
        folder: where the user wants logs. By default the working directory, then the folder of temporary files.
    """
    diagnosis = hang.diagnosis
    content = {
        "schema": SCHEMA_VERSION,
        "time": time.time(),
        "limit_seconds": limit,
        "code": hang.problem.code,
        "message": hang.problem.message,
        "kind": diagnosis.kind,
        "ranks": diagnosis.ranks,
        "waiting": [asdict(each) | each.call._asdict() for each in (diagnosis.waiting, *diagnosis.others)],
        "difference": diagnosis.difference and asdict(diagnosis.difference),
        "calls_of_ranks": [rank.to_json() for _, rank in sorted(diagnosis.known.items())],
        "stacks": {str(rank): list(map(asdict, stack)) for rank, stack in hang.stacks.items()},
    }
    text = json.dumps(content, indent=1)
    name = f"fsdp_hang_{time.strftime('%Y%m%d_%H%M%S')}.json"
    path = (folder or Path()) / name
    write_atomically(path, text)
    if not path.exists():
        with suppress(OSError):  # a new folder of this user only: others could have put a link at a known name
            path = Path(tempfile.mkdtemp(prefix="fsdp_hang_")) / name
            write_atomically(path, text)
    return path if path.exists() else None
