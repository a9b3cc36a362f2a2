"""Replay allocations that torch has recorded on a GPU through the model of its caching allocator.

The state at the start of the recording is reconstructed from the snapshot: it contains the segments at the end. Then
each allocation must get the address that torch gave it, from a new segment where torch made one. Record a snapshot in a
training script:

    torch.cuda.memory._record_memory_history(stacks="python", context=None)
    ...                                                     # some steps
    torch.cuda.memory._dump_snapshot("snapshot.pickle")

    python -m scripts.bench.allocator.replay snapshot.pickle
"""

from __future__ import annotations

import argparse
import pickle
import sys
from pathlib import Path
from typing import Any

from scripts.bench.allocator.caching_allocator import AllocatorSettings, Block, CachingAllocator

_SMALL_SEGMENT = 2 << 20
_SMALL = 1 << 20


class _Values(pickle.Unpickler):
    """Reads lists, dicts, numbers and text. A snapshot contains nothing else, and a pickle may contain any program."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"a snapshot does not contain {module}.{name}")


def read_snapshot(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        found: dict[str, Any] = _Values(file).load()
    return found


class Replay(CachingAllocator):
    """An allocator that begins in a recorded state, and whose segments get the recorded addresses."""

    def __init__(self, snapshot: dict[str, Any], device: int) -> None:
        self.trace = snapshot["device_traces"][device]
        super().__init__(_settings(snapshot.get("allocator_settings", {})))
        self._next: dict[str, Any] | None = None
        self.live: dict[int, Block] = {}
        segments, blocks = _start(self.trace, [each for each in snapshot["segments"] if each["device"] == device])
        for address, (size, stream) in segments.items():
            inside = sorted(each for each in blocks.items() if address <= each[0] < address + size)
            self._add_segment(address, size, stream, inside)
        self.peak_reserved, self.peak_allocated = self.reserved, self.allocated

    def _add_segment(self, address: int, size: int, stream: int, blocks: list[tuple[int, int]]) -> None:
        """Add a segment with allocated blocks. What is between them is free, or a rest that was not split off."""
        pool = self._small if size == _SMALL_SEGMENT else self._large
        self.reserved += size
        last, position, end = None, address, address + size
        for start, requested in [*blocks, (end, 0)]:
            gap = start - position
            if gap and last is not None and last.is_allocated and not pool.is_small and gap <= _SMALL:
                last.size += gap
                self.allocated += gap
            elif gap:
                free = Block(stream, gap, position, pool)
                free.insert(last, None)
                pool.free.add(free)
                last = free
            if start < end:
                block = Block(stream, self.round_size(requested), start, pool, is_allocated=True)
                block.insert(last, None)
                self.live[start] = last = block
                self.allocated += block.size
                position = start + block.size

    def segment_address(self, size: int) -> int:
        if self._next is None or self._next["size"] != size:
            raise LookupError("torch made no such segment")
        return int(self._next["addr"])

    def run(self) -> dict[str, int]:
        """Replay the trace. Return the numbers of allocations, and of those that differ from the recorded ones."""
        found = {"allocations": 0, "other_address": 0, "other_segment": 0}
        for event in self.trace:
            action = event["action"]
            if action == "segment_alloc":
                self._next = event
            elif action == "segment_free":
                released = [b for b in self._free_blocks() if b.address == event["addr"] and b.size == event["size"]]
                found["other_segment"] += len(released) != 1
                for block in released:
                    self._release_segment(block)
            elif action == "alloc":
                before = self.reserved
                try:
                    block = self.malloc(event["size"], event["stream"])
                except LookupError:
                    found["other_segment"] += 1
                    continue
                found["allocations"] += 1
                found["other_address"] += block.address != event["addr"]
                found["other_segment"] += (self.reserved > before) != (self._next is not None)
                self._next = None
                self.live[event["addr"]] = block
            elif action == "free_completed":
                if (freed := self.live.pop(event["addr"], None)) is not None:  # else its allocation differed
                    self.free(freed)
            else:
                assert action in ("free_requested", "snapshot", "oom"), f"an event {action!r} is not replayed"
        return found

    def _free_blocks(self) -> list[Block]:
        return [*self._small.free.blocks.values(), *self._large.free.blocks.values()]


def _settings(settings: dict[str, Any]) -> AllocatorSettings:
    if settings.get("expandable_segments"):
        raise SystemExit("A recording with expandable segments cannot be replayed: its start is not known.")
    limit = settings.get("max_split_size", -1)
    divisions = tuple(settings.get("roundup_power2_divisions", {}).values())
    return AllocatorSettings(
        max_split_size=limit if limit > 0 else None, roundup_power2_divisions=divisions if any(divisions) else ()
    )


def _start(trace: list[dict[str, Any]], segments: list[dict[str, Any]]) -> tuple[dict[int, Any], dict[int, int]]:
    """Return segments (address -> size and stream) and blocks (address -> requested size) before the first event."""
    held = {each["address"]: (each["total_size"], each["stream"]) for each in segments}
    blocks: dict[int, int] = {}
    for segment in segments:
        address = segment["address"]
        for block in segment["blocks"]:
            if block["state"] != "inactive":
                blocks[address] = block["requested_size"]
            address += block["size"]
    for event in reversed(trace):
        if event["action"] == "alloc":
            del blocks[event["addr"]]
        elif event["action"] == "free_completed":
            blocks[event["addr"]] = event["size"]
        elif event["action"] == "segment_alloc":
            del held[event["addr"]]
        elif event["action"] == "segment_free":
            held[event["addr"]] = (event["size"], event["stream"])
    return held, blocks


def replay(path: Path) -> list[dict[str, Any]]:
    """Return a row for each device of a snapshot, with bytes at the end as recorded and as computed."""
    snapshot = read_snapshot(path)
    rows = []
    for device, trace in enumerate(snapshot["device_traces"]):
        if trace:
            allocator = Replay(snapshot, device)
            row = {"snapshot": path.name, "device": device, "streams": len({e["stream"] for e in trace})}
            row |= {"events": len(trace), **allocator.run()}
            segments = [each for each in snapshot["segments"] if each["device"] == device]
            row["reserved_bytes"] = sum(each["total_size"] for each in segments)
            row["computed_reserved_bytes"] = allocator.reserved
            row["allocated_bytes"] = sum(each["allocated_size"] for each in segments)
            row["computed_allocated_bytes"] = allocator.allocated
            row["peak_reserved_bytes"], row["peak_allocated_bytes"] = allocator.peak_reserved, allocator.peak_allocated
            rows.append(row)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("snapshots", nargs="+", type=Path, help="files of torch.cuda.memory._dump_snapshot")
    differs = 0
    for path in parser.parse_args().snapshots:
        for row in replay(path):
            print(row)
            differs += row["other_address"] + row["other_segment"]
    return int(differs > 0)


if __name__ == "__main__":
    sys.exit(main())
