"""The files in which :mod:`record` records the collectives of one rank, and how its launcher reads them.

The file ``calls`` is mapped into the memory of the rank: a header and a ring of the newest collectives, all words of 64
bits in the byte order of the machine. The file ``names`` has one JSON value per line; the ring refers to the lines.

::

    header   FORMAT, slots in the ring, recorded calls, 1 + number of the call that is waited for (0: none), since when,
             last heartbeat of the thread that watches the rank
    call     number in its group, elements, line of the group << 48 | operation << 32 | dtype << 16 | unit, begin

Times are those of the monotonic clock in nanoseconds, which all processes of a machine share.
"""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from hf_fsdp_plugin.hangs.calls import Call, GroupCalls, RankCalls, Wait

FORMAT: Final = 1
WORD: Final = 8
HEADER_WORDS: Final = 8
CALL_WORDS: Final = 4
NUM_SLOTS: Final = 512
"""Calls in the ring: those of several steps of a model with some dozens of units."""
SLOTS_AT, COUNT_AT, WAITING_AT, SINCE_AT, BEAT_AT = 1, 2, 3, 4, 5
"""Positions in the header."""


class CallFiles(NamedTuple):
    """The two files of one rank."""

    calls: Path
    names: Path


@dataclass(frozen=True, slots=True)
class Glance:
    """The header of a record.

    Attributes:
        count: recorded calls.
        waiting: seconds for which the rank waits in a collective; 0 if it does not.
        beat: seconds since the last heartbeat of the rank's watcher; infinite before the first.
    """

    count: int
    waiting: float
    beat: float = float("inf")


def glance(path: Path) -> Glance | None:
    """Return the header of a record; ``None`` if there is none yet. Reads a few bytes."""
    try:
        with path.open("rb", buffering=0) as file:
            words = struct.unpack(f"{HEADER_WORDS}Q", file.read(HEADER_WORDS * WORD))
    except (OSError, struct.error):
        return None
    if words[0] != FORMAT:
        return None
    return Glance(
        words[COUNT_AT],
        _seconds_since(words[SINCE_AT]) if words[WAITING_AT] else 0.0,
        _seconds_since(words[BEAT_AT]) if words[BEAT_AT] else float("inf"),
    )


def read_calls(rank: int, files: CallFiles) -> RankCalls:
    """Return what a rank has recorded; without groups if it has recorded nothing. Never raises for a torn record."""
    try:
        content = files.calls.read_bytes()
        words = struct.unpack(f"{len(content) // WORD}Q", content[: len(content) // WORD * WORD])
        names = list(_names(files.names))
    except OSError:
        return RankCalls(rank=rank)
    if len(words) < HEADER_WORDS or words[0] != FORMAT:
        return RankCalls(rank=rank)
    entries = list(_entries(words, names))
    return RankCalls(
        rank=rank,
        groups=_by_group(entries),
        last_group=_group_name(entries[-1].group) if entries else "",
        wait=_wait(words, names),
        idle=_seconds_since(entries[-1].begun) if entries else float("inf"),
    )


@dataclass(frozen=True, slots=True)
class _Entry:
    group: dict[str, Any]
    number: int
    call: Call
    begun: int


def _entries(words: Sequence[int], names: Sequence[Any]) -> Iterator[_Entry]:
    """Yield the recorded calls, the oldest first."""
    count, slots = words[COUNT_AT], words[SLOTS_AT]
    for position in range(max(0, count - slots), count):
        if (entry := _entry(words, names, position)) is not None:
            yield entry


def _entry(words: Sequence[int], names: Sequence[Any], position: int) -> _Entry | None:
    start = HEADER_WORDS + position % words[SLOTS_AT] * CALL_WORDS
    if start + CALL_WORDS > len(words):
        return None
    number, num_elements, packed, begun = words[start : start + CALL_WORDS]
    lines = [packed >> 48, packed >> 32 & 0xFFFF, packed >> 16 & 0xFFFF, packed & 0xFFFF]
    if max(lines) >= len(names) or not isinstance(names[lines[0]], dict):
        return None  # the rank is writing it
    group, operation, dtype, unit = (names[line] for line in lines)
    return _Entry(group, number, Call(str(operation), num_elements, str(dtype), str(unit)), begun)


def _by_group(entries: Iterable[_Entry]) -> dict[str, GroupCalls]:
    """Return the calls of each group, without those before a gap."""
    found: dict[str, list[_Entry]] = {}
    for entry in entries:
        calls = found.setdefault(_group_name(entry.group), [])
        if calls and entry.number != calls[-1].number + 1:
            calls.clear()
        calls.append(entry)
    return {
        name: GroupCalls(
            calls[-1].group["ranks"],
            calls[-1].number,
            tuple(entry.call for entry in calls),
            bool(calls[-1].group.get("enqueues")),
            float(calls[-1].group.get("timeout", 0)),
        )
        for name, calls in found.items()
    }


def _group_name(group: Mapping[str, Any]) -> str:
    """Return a name that differs from that of every other set of ranks."""
    return f"{group['group']} of ranks {group['ranks']}" if group["ranks"] else str(group["group"])


def _wait(words: Sequence[int], names: Sequence[Any]) -> Wait | None:
    if not words[WAITING_AT]:
        return None
    entry = _entry(words, names, words[WAITING_AT] - 1)
    if entry is None:
        return None
    return Wait(_group_name(entry.group), entry.number, entry.call, _seconds_since(words[SINCE_AT]))


def _names(path: Path) -> Iterator[Any]:
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True):
        if line.endswith("\n"):  # the last line may be incomplete
            try:
                yield json.loads(line)
            except ValueError:
                yield ""


def _seconds_since(nanoseconds: int) -> float:
    return max(0.0, (time.monotonic_ns() - nanoseconds) / 1e9)
