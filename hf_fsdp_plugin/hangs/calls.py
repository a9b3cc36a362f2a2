"""What is known of the collectives of one rank: read from its record (``call_record``), compared by the diagnosis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final, NamedTuple

from hf_fsdp_plugin.text import name_ranks

ARRIVALS: Final = "arrivals"
"""The group of the plugin's own calls, before which it waits for all ranks (``backends.ranks.collective_entry``)."""
POINT_TO_POINT: Final = "point to point"
"""The group of sends and receives, which have no common order."""
_UNEVEN: Final = "all-gather (list)", "gather", "scatter"
"""Operations in which ranks may have tensors of different sizes."""
_ANY_TENSORS: Final = "all-to-all"
"""The operation in which ranks may also have no tensor."""
_DTYPES: Final = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


class Call(NamedTuple):
    """One collective call of one rank.

    Attributes:
        operation: such as ``all-gather``.
        num_elements: elements of the tensor that this rank passes; 0 without one.
        dtype: torch's name of its dtype; empty without a tensor.
        unit: the FSDP unit for which torch calls it, such as ``model.layers.3``; empty for other calls.
        peer: the other rank of a send or a receive.
    """

    operation: str
    num_elements: int = 0
    dtype: str = ""
    unit: str = ""
    peer: int | None = None

    def __str__(self) -> str:
        of_unit = f" of {self.unit}" if self.unit else ""
        dtype = _DTYPES.get(self.dtype, self.dtype)
        return f"{self.operation}{of_unit}" + (f" ({self.num_elements:,} × {dtype})" if dtype else "")

    @property
    def compared(self) -> tuple[Any, ...]:
        """The properties that the call must have in common with the calls of all other ranks of the group."""
        if self.operation == _ANY_TENSORS:
            return (self.operation, self.unit)
        if self.operation in _UNEVEN:
            return (self.operation, self.dtype, self.unit)
        return tuple(self)


@dataclass(frozen=True, slots=True)
class Counts:
    """What a process has counted.

    Attributes:
        steps: optimizer steps.
        forwards: forwards of sharded models that have begun, also without gradients; 0 if they are compiled.
        before: optimizer steps of the run that earlier processes had counted when they saved the checkpoint from which
            this process has resumed after a restart.
    """

    steps: int
    forwards: int
    before: int = 0

    @property
    def total(self) -> int:
        """Optimizer steps of the run, without those that were trained again."""
        return self.steps + self.before


@dataclass(frozen=True, slots=True)
class Wait:
    """A collective in which a rank waits, or several do.

    Attributes:
        group: its process group.
        number: its number among the collectives of the group, from 1.
        seconds: how long the rank has waited; the longest wait of several ranks.
        ranks: the ranks that wait in it; empty for the one to which the wait belongs.
    """

    group: str
    number: int
    call: Call
    seconds: float
    ranks: tuple[int, ...] = ()

    def __str__(self) -> str:
        """Return ``rank 0 has waited for 120 s in all-gather of model.layers.3 (…), number 7 of process group …``."""
        number = f", number {self.number} of process group {self.group}" if self.call.dtype else ""
        have = "has" if len(self.ranks) == 1 else "have"
        return f"{name_ranks(self.ranks)} {have} waited for {self.seconds:,.0f} s in {self.call}{number}"


@dataclass(frozen=True, slots=True)
class GroupCalls:
    """The newest collectives of one rank in one process group.

    Attributes:
        ranks: the ranks of the group, as :func:`pack_ranks` writes them; empty if they are unknown.
        last: number of the newest collective; 0 before the first.
        calls: the newest ones without gaps, the last at the end.
        enqueues: whether collectives are enqueued on an accelerator, and the thread does not wait in them.
        timeout: time-out of the group in seconds; 0 if it is unknown.
    """

    ranks: str
    last: int = 0
    calls: tuple[Call, ...] = ()
    enqueues: bool = False
    timeout: float = 0.0

    @property
    def first(self) -> int:
        """Number of the oldest known collective."""
        return self.last - len(self.calls) + 1

    def call(self, number: int) -> Call | None:
        """Return a collective by its number; ``None`` if it was not made, or is too old."""
        return self.calls[number - self.first] if self.first <= number <= self.last else None

    def before(self, number: int) -> tuple[Call, ...]:
        return self.calls[: max(0, number - self.first)]

    def since(self, number: int) -> tuple[Call, ...]:
        return self.calls[max(0, number - self.first) :]


@dataclass(frozen=True, kw_only=True, slots=True)
class RankCalls:
    """What is known of one rank.

    Attributes:
        groups: its process groups, by name.
        last_group: the group of its newest collective; empty before the first.
        wait: the collective in which its main thread waits; ``None`` if it does not. Collectives of accelerators are
            only enqueued, so that a rank waits in none.
        idle: seconds since it began its newest collective; infinite before the first.
        state: ``running``, ``halted`` (by SIGSTOP or a debugger), ``ended`` (its script), ``exited`` (its process),
            or ``unreachable`` (its machine does not answer).
        detail: the machine that does not answer.
        place: where it is, as text (see ``hangs.rank_stacks``); empty if that is unknown.
        call: the library function that it is in, such as ``generate``; empty outside of known ones.
        cpu: share of one core that its processes have used lately; ``None`` if that was not measured.
        is_busy: whether it makes progress: its Python stack has changed meanwhile, or its processes have worked.
        reads: whether it waits for a file system or a data loader.
        counts: its optimizer steps and forwards; ``None`` if they were not counted.
    """

    rank: int
    groups: Mapping[str, GroupCalls] = field(default_factory=dict)
    last_group: str = ""
    wait: Wait | None = None
    idle: float = float("inf")
    state: str = "running"
    detail: str = ""
    place: str = ""
    call: str = ""
    cpu: float | None = None
    is_busy: bool = False
    reads: bool = False
    counts: Counts | None = None

    @property
    def on_accelerator(self) -> bool:
        """Whether it has enqueued collectives on an accelerator."""
        return any(group.enqueues for group in self.groups.values())

    @property
    def last_call(self) -> str:
        """Its last collective, with its number and group; empty before the first."""
        found = self.groups.get(self.last_group)
        return f"{found.calls[-1]}, number {found.last} of process group {self.last_group}" if found is not None else ""

    def to_json(self) -> dict[str, Any]:
        """Return a value for JSON. :func:`rank_from_json` reads it."""
        return {**asdict(self), "idle": min(self.idle, 1e9)}


def rank_from_json(content: Mapping[str, Any]) -> RankCalls:
    """Return what :meth:`RankCalls.to_json` has written."""
    wait = content["wait"] and Wait(**{**content["wait"], "call": Call(*content["wait"]["call"])})
    groups = {
        name: GroupCalls(**{**group, "calls": tuple(Call(*call) for call in group["calls"])})
        for name, group in content["groups"].items()
    }
    counts = content["counts"] and Counts(**content["counts"])
    return RankCalls(**{**content, "wait": wait, "groups": groups, "counts": counts})


def pack_ranks(ranks: Sequence[int]) -> str:
    """Return ranks as text: ``0-7`` for a range, ``0-28:4`` for every fourth, ``0,1,5`` for others."""
    if len(ranks) > 2:
        step = ranks[1] - ranks[0]
        if step > 0 and list(ranks) == list(range(ranks[0], ranks[-1] + 1, step)):
            return f"{ranks[0]}-{ranks[-1]}" + (f":{step}" if step != 1 else "")
    return ",".join(map(str, ranks))


def unpack_ranks(text: str) -> list[int]:
    """Return the ranks that :func:`pack_ranks` has written."""
    if "-" not in text:
        return [int(rank) for rank in text.split(",") if rank]
    first, _, rest = text.partition("-")
    last, _, step = rest.partition(":")
    return list(range(int(first), int(last) + 1, int(step or 1)))
