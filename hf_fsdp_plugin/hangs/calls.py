"""The collectives, optimizer steps and forwards of a rank: recorded in a file, and what others know of them.

The record is a file that is mapped into memory: other ranks and the launcher read it also while the process is stopped
or dead. A record takes about a microsecond. Nothing is recorded before ``open``. The file has a header of ten words, a
ring of the newest collectives, and a line of JSON for each process group, in the byte order of the machine::

    header   format, recorded calls, bytes of the groups, 1 + number of the call that is waited for (0: none),
             since when, last heartbeat of the thread that watches the rank, begin of the newest call, and the counts:
             optimizer steps, forwards, steps before this process (see :class:`Counts`)
    call     number in its group, elements, number of the group, operation, dtype, peer and unit as text
    group    its name, its ranks, its time-out, and whether its collectives are enqueued

Times are those of the monotonic clock in nanoseconds, which all processes of a machine share.
"""

from __future__ import annotations

import itertools
import json
import mmap
import struct
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from threading import get_ident
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from hf_fsdp_plugin.axes import AXIS_NAMES
from hf_fsdp_plugin.state import process
from hf_fsdp_plugin.text import format_dtype, short_dtype

if TYPE_CHECKING:  # torch is imported with the first process group; the launcher reads the files without it
    import torch
    import torch.distributed as dist

ARRIVALS: Final = "arrivals"
"""The group of the plugin's own calls, before which it waits for all ranks (``backends.ranks.agreement``)."""
POINT_TO_POINT: Final = "point to point"
"""The group of sends and receives, which have no common order."""
_UNEVEN: Final = "all-gather (list)", "gather", "scatter"
"""Operations in which ranks may have tensors of different sizes."""
_ANY_TENSORS: Final = "all-to-all"
"""The operation in which ranks may also have no tensor."""


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
        name = f"{self.operation} of {self.unit}" if self.unit else self.operation
        return f"{name} ({self.num_elements:,} × {short_dtype(self.dtype)})" if self.dtype else name

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


@dataclass(frozen=True, slots=True)
class GroupCalls:
    """The newest collectives of one rank in one process group.

    Attributes:
        ranks: the ranks of the group; empty if they are unknown.
        last: number of the newest collective; 0 before the first.
        calls: the newest ones without gaps, the last at the end.
        enqueues: whether collectives are enqueued on an accelerator, and the thread does not wait in them.
        timeout: time-out of the group in seconds; 0 if it is unknown.
    """

    ranks: tuple[int, ...]
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
        place: where it is, as text (see ``hangs.python_stacks``); empty if that is unknown.
        call: the library function that it is in, such as ``generate``; empty outside of known ones.
        cpu: share of one core that its processes have used lately; ``None`` if that was not measured.
        is_busy: whether it may still come: its Python stack has changed, its processes have worked, or it waits for a
            file system, the network or a data loader.
        counts: its optimizer steps and forwards; ``None`` if they were not counted.
        stack: its Python stack, outermost frame first: file, line, function, and the text of the line.
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
    counts: Counts | None = None
    stack: tuple[tuple[str, int, str, str], ...] = ()

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
        name: GroupCalls(
            **{**group, "ranks": tuple(group["ranks"]), "calls": tuple(Call(*call) for call in group["calls"])}
        )
        for name, group in content["groups"].items()
    }
    counts = content["counts"] and Counts(**content["counts"])
    stack = tuple(map(tuple, content["stack"]))
    return RankCalls(**{**content, "wait": wait, "groups": groups, "counts": counts, "stack": stack})


_HEADER: Final = struct.Struct("10Q")
_CALL: Final = struct.Struct("3Q168s")
NUM_SLOTS: Final = 512
"""Number of calls in the ring: enough for several steps of a model with some dozens of units."""
_FORMAT: Final = 3
_COUNT, _GROUP_BYTES, _WAITING, _SINCE, _BEAT, _BEGUN, _STEPS, _FORWARDS, _BEFORE = range(1, 10)
"""Positions in the header."""
_GROUPS_AT: Final = _HEADER.size + NUM_SLOTS * _CALL.size
_MAX_GROUP_BYTES: Final = 1 << 16
_NO_GROUP: Final = 1 << 32
"""Number of the groups for which the file has no space."""
_MAX_PENDING: Final = 4096
_SEPARATOR: Final = "\t"


class _GroupCount:
    """The number of collectives of one process group, and the group's number in the file."""

    __slots__ = ("group", "number")

    def __init__(self, group: int) -> None:
        self.group, self.number = group, 0


class CallRecord:
    """The record of this process.

    Attributes:
        is_open: whether collectives are recorded.
        unit: name of the FSDP unit whose collectives are being called; empty for none.
        main: the thread that trains: its waits are recorded, and its stack is the place of the rank.
        last: position of the newest collective.
        times_waits: whether waits are timed, also if nothing is recorded.
        waited_ns: nanoseconds for which this thread has waited in collectives so far.
    """

    def __init__(self) -> None:
        self.waited_ns, self.times_waits = 0, False
        self._words: Any = [0] * (_HEADER.size // 8)
        self.forget()

    def forget(self) -> None:
        """Stop recording in a forked child, which must not change what its parent has recorded."""
        self.is_open = False
        self.unit = ""
        self._words = [0] * _STEPS + list(self._words[_STEPS:])
        self._memory: mmap.mmap | None = None
        self._texts: dict[tuple[Any, ...], bytes] = {}
        self._groups: dict[str, _GroupCount] = {}
        self._num_groups = 0
        self._pending: dict[int, int] = {}
        self._positions = itertools.count()
        self.last = 0
        self.main = threading.main_thread().ident or 0

    def follow_thread(self) -> None:
        """Take the calling thread as the one that trains, which is not always the main thread of the process."""
        self.main = get_ident()

    def is_main_thread(self) -> bool:
        """Whether the calling thread is the one that trains."""
        return get_ident() == self.main

    def beat(self) -> None:
        """Record that the watcher of this rank runs."""
        self._words[_BEAT] = monotonic_ns()

    def open(self, path: Path, *, calls: bool = True) -> None:
        """Record from now on. The file survives a crash of the process. Raises ``OSError``.

        Args:
            calls: whether collectives are recorded. Optimizer steps and forwards are counted in any case.
        """
        self.close()
        size = _GROUPS_AT + _MAX_GROUP_BYTES if calls else _HEADER.size
        path.unlink(missing_ok=True)  # another process may have mapped it
        with path.open("wb+") as file:
            file.write(bytes(size))  # takes the space now: without it, a later change would end the process
            file.flush()
            self._memory = mmap.mmap(file.fileno(), size)
        self._words = memoryview(self._memory)[: _HEADER.size].cast("Q")
        self._words[0] = _FORMAT
        self.follow_thread()
        self.is_open = calls

    def close(self) -> None:
        """Stop recording, and forget the collectives that were recorded."""
        memory, words = self._memory, self._words
        self.forget()
        if memory is not None:
            words.release()
            memory.close()

    def begin(self, group: dist.ProcessGroup, operation: str, tensors: Any) -> int:
        """Record a collective before it is called, and return its position in the record.

        Args:
            operation: its name in messages.
            tensors: the tensor that this rank passes, a list of tensors, or a list of such lists; ``None`` without one.
        """
        try:
            count = self._groups.get(group.group_name) or self._add_group(group)
            while isinstance(tensors, (list, tuple)):
                tensors = tensors[0] if tensors else None
            if tensors is None:
                return self._write(count, 0, operation)
            return self._write(count, tensors.numel(), operation, tensors.dtype)
        except Exception:  # tensors of an unknown kind: the collective itself must not fail
            return self.last

    def begin_named(self, group: str, operation: str, peer: int | None = None) -> int:
        """Record a call that is no collective of torch, or a send or a receive. See :meth:`begin`.

        Args:
            peer: the other rank of a send or a receive.
        """
        count = self._groups.get(group) or self._add(group, {"group": group, "ranks": []})
        return self._write(count, 0, operation, peer="" if peer is None else str(peer))

    def _write(self, count: _GroupCount, num_elements: int, operation: str, dtype: Any = "", peer: str = "") -> int:
        if self._memory is None:
            return self.last
        key = operation, dtype, peer, self.unit
        text = self._texts.get(key)
        if text is None:
            text = self._texts[key] = _SEPARATOR.join((operation, format_dtype(dtype), peer, self.unit)).encode()
        position = next(self._positions)  # atomic: other threads have collectives too
        count.number = number = count.number + 1
        at = _HEADER.size + position % NUM_SLOTS * _CALL.size
        _CALL.pack_into(self._memory, at, number, num_elements, count.group, text)
        self._words[_BEGUN] = monotonic_ns()
        self._words[_COUNT] = position + 1
        self.last = position
        return position

    def _add_group(self, group: dist.ProcessGroup) -> _GroupCount:
        import torch.distributed as dist

        from hf_fsdp_plugin.torch_private.functions import timeout_of

        try:
            ranks: Sequence[int] = dist.get_process_group_ranks(group)
        except (KeyError, ValueError, RuntimeError):  # a group that torch does not know, such as a test's
            ranks = ()
        timeout = timeout_of(group)
        axis = str(getattr(group, "group_desc", "")).removeprefix("mesh_")
        row = {
            "group": f"{group.group_name} ({axis})" if axis in AXIS_NAMES else group.group_name,
            "ranks": list(ranks),
            "timeout": timeout.total_seconds() if timeout is not None else 0.0,
            "enqueues": dist.get_backend(group) not in ("gloo", "mpi"),
        }
        return self._add(group.group_name, row)

    def _add(self, name: str, row: dict[str, Any]) -> _GroupCount:
        """Add a group to the file, if it has space for it."""
        used, line = self._words[_GROUP_BYTES], f"{json.dumps(row)}\n".encode()
        count = self._groups[name] = _GroupCount(_NO_GROUP)
        if self._memory is not None and used + len(line) <= _MAX_GROUP_BYTES:
            self._memory[_GROUPS_AT + used : _GROUPS_AT + used + len(line)] = line
            self._words[_GROUP_BYTES] = used + len(line)
            count.group, self._num_groups = self._num_groups, self._num_groups + 1
        return count

    def started(self, work: Any, position: int) -> None:
        """Remember which collective a ``Work`` belongs to, until it is waited for."""
        if len(self._pending) >= _MAX_PENDING:  # nobody waits for these works
            self._pending.clear()
        self._pending[id(work)] = position

    def position_of(self, work: Any) -> int:
        """Return the position of the collective of a ``Work``; that of the newest one if it is unknown."""
        return self._pending.pop(id(work), self.last)

    def waits(self, position: int) -> None:
        """Record that this thread begins to wait for a collective.

        Other threads than the one that trains are ignored: they may wait for long in the background, as in a save.
        """
        if get_ident() == self.main:
            words = self._words
            words[_SINCE] = monotonic_ns()
            words[_WAITING] = position + 1

    def waited(self) -> None:
        """Record that the wait is over."""
        if get_ident() == self.main and self._words[_WAITING]:
            self._words[_WAITING] = 0
            self.waited_ns += monotonic_ns() - self._words[_SINCE]

    def on_arrival(self, call: str | None) -> None:
        """Record the plugin's own waits for all ranks: a call at its begin, ``None`` at its end."""
        if not self.is_open:
            return
        if call is None:
            self.waited()
        else:
            self.waits(self.begin_named(ARRIVALS, call))

    @property
    def counts(self) -> Counts:
        """What this process has counted."""
        return Counts(*self._words[_STEPS:])

    def resume_at(self, total: int) -> None:
        """Count on from the optimizer steps of the run that a checkpoint contains."""
        self._words[_BEFORE] = total - self._words[_STEPS]

    def count_steps(self, optimizer: torch.optim.Optimizer) -> None:
        """Count the steps of an optimizer, if a file is open. Takes less than a microsecond per step."""
        if self._memory is not None:
            optimizer.register_step_post_hook(self._add_step)

    def count_forwards(self, model: torch.nn.Module) -> None:
        """Count the forwards of a model, before they gather parameters. Takes about a microsecond per forward."""
        if self._memory is not None:
            model.register_forward_pre_hook(self._add_forward, prepend=True)

    def _add_step(self, *_: Any) -> None:
        self._words[_STEPS] += 1

    def _add_forward(self, *_: Any) -> None:
        import torch

        if not torch.compiler.is_compiling():
            self._words[_FORWARDS] += 1


record = process.owns(CallRecord, kept=True)
"""Return the record of this process. It is kept, because the run of the process counts its steps on."""


@dataclass(frozen=True, slots=True)
class RecordHeader:
    """The header of a record.

    Attributes:
        count: recorded calls.
        waiting: seconds for which the rank waits in a collective; 0 if it does not.
        idle: seconds since it began its newest collective; infinite before the first.
        beat: seconds since the last heartbeat of the rank's watcher; infinite before the first.
    """

    count: int
    waiting: float
    idle: float
    beat: float


def read_header(path: Path) -> RecordHeader | None:
    """Return the header of a record; ``None`` if there is none yet. Reads a few bytes."""
    words = _words(_read(path, _HEADER.size))
    if words is None:
        return None
    waiting = _seconds_since(words[_SINCE]) if words[_WAITING] else 0.0
    return RecordHeader(words[_COUNT], waiting, _seconds_since(words[_BEGUN]), _seconds_since(words[_BEAT]))


def read_calls(rank: int, path: Path) -> RankCalls:
    """Return what a rank has recorded; without groups if it has recorded nothing. Never raises for a torn record."""
    content = _read(path)
    words = _words(content)
    if words is None:
        return RankCalls(rank=rank)
    rows = list(_group_rows(content[_GROUPS_AT : _GROUPS_AT + words[_GROUP_BYTES]]))
    groups: dict[str, GroupCalls] = {}
    last_group = ""
    for position in range(max(0, words[_COUNT] - NUM_SLOTS), words[_COUNT]):
        if (entry := _entry(content, rows, position)) is not None:
            row, number, call = entry
            last_group = _group_name(row)
            enqueues, timeout = row.get("enqueues", False), row.get("timeout", 0.0)
            group = groups.get(last_group) or GroupCalls(tuple(row["ranks"]), enqueues=enqueues, timeout=timeout)
            calls = (*group.calls, call) if number == group.last + 1 else (call,)  # no calls before a gap
            groups[last_group] = replace(group, last=number, calls=calls)
    waited = _entry(content, rows, words[_WAITING] - 1) if words[_WAITING] else None
    return RankCalls(
        rank=rank,
        groups=groups,
        last_group=last_group,
        wait=Wait(_group_name(waited[0]), *waited[1:], _seconds_since(words[_SINCE])) if waited is not None else None,
        idle=_seconds_since(words[_BEGUN]),
        counts=Counts(*words[_STEPS:]),
    )


def _read(path: Path, size: int = -1) -> bytes:
    try:
        with path.open("rb", buffering=0) as file:
            return file.read(size) or b""
    except OSError:
        return b""


def _words(content: bytes) -> tuple[int, ...] | None:
    """Return the header; ``None`` if there is none, or one of another format."""
    words = _HEADER.unpack_from(content) if len(content) >= _HEADER.size else (0,)
    return words if words[0] == _FORMAT else None


def _group_rows(text: bytes) -> Iterator[dict[str, Any]]:
    for line in text.decode(errors="replace").splitlines():
        try:
            yield json.loads(line)
        except ValueError:
            return  # cut: the numbers of later groups are unknown


def _entry(content: bytes, rows: Sequence[dict[str, Any]], position: int) -> tuple[dict[str, Any], int, Call] | None:
    """Return the group, the number and the content of a call; ``None`` while the rank writes it."""
    at = _HEADER.size + position % NUM_SLOTS * _CALL.size
    if at + _CALL.size > len(content):
        return None
    number, num_elements, group, text = _CALL.unpack_from(content, at)
    parts = text.rstrip(b"\0").decode(errors="replace").split(_SEPARATOR)
    if group >= len(rows) or len(parts) != 4 or not (parts[2].isdecimal() or not parts[2]):
        return None
    operation, dtype, peer, unit = parts
    return rows[group], number, Call(operation, num_elements, dtype, unit, int(peer) if peer else None)


def _group_name(row: dict[str, Any]) -> str:
    """Return a name that differs from that of every other set of ranks."""
    ranks = row["ranks"]
    is_range = len(ranks) > 2 and ranks == list(range(ranks[0], ranks[-1] + 1))
    shown = f"{ranks[0]}-{ranks[-1]}" if is_range else ",".join(map(str, ranks))
    return f"{row['group']} of ranks {shown}" if ranks else str(row["group"])


def _seconds_since(nanoseconds: int) -> float:
    """Return seconds; infinite for 0, which is never."""
    return max(0.0, (time.monotonic_ns() - nanoseconds) / 1e9) if nanoseconds else float("inf")
