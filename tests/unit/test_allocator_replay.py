"""``scripts/bench/allocator/replay.py``: recordings are replayed from their reconstructed start."""

import pickle
import random
import sys

import pytest

from scripts.bench.allocator import replay as script
from scripts.bench.allocator.caching_allocator import CachingAllocator

MIB = 1 << 20


class Recorder(CachingAllocator):
    """Records what torch records in a snapshot."""

    def __init__(self):
        super().__init__()
        self.trace, self.segments = [], {}

    def segment_address(self, size):
        address = super().segment_address(size)
        self.segments[address] = size
        self.trace.append({"action": "segment_alloc", "addr": address, "size": size, "stream": 0})
        return address

    def allocate(self, size):
        block = self.malloc(size)
        self.trace.append({"action": "alloc", "addr": block.address, "size": size, "stream": 0})
        return block, size

    def release(self, entry):
        block, size = entry
        for action in ("free_requested", "free_completed"):
            self.trace.append({"action": action, "addr": block.address, "size": size, "stream": 0})
        self.free(block)


@pytest.fixture
def snapshot():
    """A recording that begins when a third of the calls are done."""
    generator, allocator, live = random.Random(3), Recorder(), []
    for number in range(900):
        if number == 300:
            allocator.trace.clear()
        if live and generator.random() < 0.45:
            allocator.release(live.pop(generator.randrange(len(live))))
        else:
            live.append(allocator.allocate(int(2 ** generator.uniform(8, 26))))
    in_use = {block.address: (block.size, size) for block, size in live}
    segments = []
    for address, size in allocator.segments.items():
        blocks, position = [], address
        while position < address + size:
            later = [start for start in in_use if start > position]
            taken, requested = in_use.get(position, (min([address + size, *later]) - position, 0))
            state = "active_allocated" if position in in_use else "inactive"
            blocks.append({"size": taken, "requested_size": requested, "state": state})
            position += taken
        held = sum(block["size"] for block in blocks if block["state"] != "inactive")
        segments.append(
            {"device": 0, "address": address, "total_size": size, "stream": 0, "allocated_size": held, "blocks": blocks}
        )
    return {"segments": segments, "device_traces": [allocator.trace]}


def test_every_allocation_gets_the_recorded_address(snapshot, tmp_path, capsys, monkeypatch):
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps(snapshot))
    (row,) = script.replay(path)
    assert row["allocations"] > 250 and (row["other_address"], row["other_segment"]) == (0, 0)
    assert row["computed_reserved_bytes"] == row["reserved_bytes"]
    monkeypatch.setattr(sys, "argv", ["replay.py", str(path)])
    assert script.main() == 0 and "snapshot.pickle" in capsys.readouterr().out


def test_other_segments_are_found(snapshot, tmp_path):
    trace = snapshot["device_traces"][0]
    for event in trace:
        if event["action"] == "segment_alloc" and event["size"] > 20 * MIB:
            event["size"] += 2 * MIB
            break
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps(snapshot))
    (row,) = script.replay(path)
    assert row["other_segment"] > 0


def test_program_in_a_snapshot_is_not_run(tmp_path):
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps({"segments": [], "device_traces": [print]}))
    with pytest.raises(pickle.UnpicklingError, match="print"):
        script.read_snapshot(path)
