"""The record of collectives: what one process writes, another reads, also torn or damaged."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_fsdp_plugin.hangs import calls as layout
from hf_fsdp_plugin.hangs.calls import (
    NUM_SLOTS,
    WORD,
    Call,
    CallFiles,
    pack_ranks,
    rank_from_json,
    read_calls,
    read_header,
    unpack_ranks,
)
from hf_fsdp_plugin.hangs.record import CallRecord


class Group:
    """A process group that torch does not know."""

    def __init__(self, name: str) -> None:
        self.group_name = name


@pytest.fixture
def files(tmp_path: Path) -> CallFiles:
    return CallFiles(tmp_path / "rank.calls", tmp_path / "rank.names")


@pytest.fixture
def record(files: CallFiles, monkeypatch: pytest.MonkeyPatch) -> Iterator[CallRecord]:
    monkeypatch.setattr("torch.distributed.get_process_group_ranks", lambda group: [0, 1])
    monkeypatch.setattr("torch.distributed.get_backend", lambda group: "gloo")
    monkeypatch.setattr("hf_fsdp_plugin.torch_private.process_groups.timeout_of", lambda group: timedelta(seconds=90))
    record = CallRecord()
    record.open(files)
    yield record
    record.close()


def test_calls_are_read_with_their_unit_and_size(record: CallRecord, files: CallFiles) -> None:
    group: Any = Group("0")
    record.unit = "layers.1"
    record.begin(group, "all-gather", torch.empty(3, 4, dtype=torch.bfloat16))
    record.unit = ""
    record.begin(group, "all-reduce", [torch.empty(5)])
    record.begin(group, "all-gather (list)", [[torch.empty(2)]])
    record.begin(group, "barrier", None)
    record.begin(group, "broadcast", [])
    found = read_calls(3, files)
    assert found.rank == 3 and found.wait is None and found.idle < 60
    (calls,) = found.groups.values()
    assert calls.calls == (
        Call("all-gather", 12, "bfloat16", "layers.1"),
        Call("all-reduce", 5, "float32"),
        Call("all-gather (list)", 2, "float32"),
        Call("barrier"),
        Call("broadcast"),
    )
    assert (calls.last, calls.ranks, calls.enqueues, calls.timeout) == (5, "0,1", False, 90.0)
    assert rank_from_json(json.loads(json.dumps(found.to_json()))).groups == found.groups


def test_wait_is_read_until_it_ends(record: CallRecord, files: CallFiles) -> None:
    group: Any = Group("0")
    position = record.begin(group, "all-reduce", torch.empty(5))
    record.begin(group, "barrier", None)
    record.waits(position)
    time.sleep(0.02)
    wait = read_calls(0, files).wait
    assert wait is not None and (wait.number, wait.call.operation) == (1, "all-reduce") and wait.seconds >= 0.02
    seen = read_header(files.calls)
    assert seen is not None and seen.waiting >= 0.02 and seen.count == 2
    record.waited()
    assert read_calls(0, files).wait is None


def test_waits_of_other_threads_are_ignored(record: CallRecord, files: CallFiles) -> None:
    position = record.begin(Group("0"), "barrier", None)  # type: ignore[arg-type]
    thread = threading.Thread(target=record.waits, args=(position,))
    thread.start()
    thread.join()
    assert read_calls(0, files).wait is None


def test_ring_keeps_the_newest_calls_of_each_group(record: CallRecord, files: CallFiles) -> None:
    first, second = Group("0"), Group("1")
    record.begin(second, "barrier", None)  # type: ignore[arg-type]
    for number in range(NUM_SLOTS + 40):
        record.begin(first if number % 4 else second, "all-reduce", torch.empty(number))  # type: ignore[arg-type]
    groups = read_calls(0, files).groups
    last = {name.partition(" ")[0]: group.last for name, group in groups.items()}
    assert last == {"0": (NUM_SLOTS + 40) * 3 // 4, "1": (NUM_SLOTS + 40) // 4 + 1}
    assert sum(len(group.calls) for group in groups.values()) == NUM_SLOTS
    newest = next(group for name, group in groups.items() if name.startswith("0"))
    assert newest.call(newest.last) == Call("all-reduce", NUM_SLOTS + 39, "float32")
    assert newest.call(newest.last + 1) is None and newest.call(1) is None


def test_arrivals_are_recorded_as_a_group(record: CallRecord, files: CallFiles) -> None:
    record.on_arrival("Accelerator.save_state")
    wait = read_calls(0, files).wait
    assert wait is not None and str(wait.call) == "Accelerator.save_state" and wait.group == layout.ARRIVALS
    record.on_arrival(None)
    assert read_calls(0, files).wait is None


def test_closed_record_ignores_arrivals(files: CallFiles) -> None:
    CallRecord().on_arrival("Accelerator.save_state")
    assert read_header(files.calls) is None and read_calls(0, files).groups == {}


def test_unknown_tensors_do_not_stop_a_collective(record: CallRecord, files: CallFiles) -> None:
    record.begin(Group("0"), "all-reduce", object())  # type: ignore[arg-type]
    record.begin(Group("0"), "barrier", None)  # type: ignore[arg-type]
    assert [call.operation for group in read_calls(0, files).groups.values() for call in group.calls] == ["barrier"]


@pytest.mark.parametrize("damage", ["cut", "cut names", "no names", "words", "empty", "format"])
def test_torn_files_are_read_as_far_as_possible(record: CallRecord, files: CallFiles, damage: str) -> None:
    for number in range(20):
        record.begin(Group(str(number % 2)), "all-reduce", torch.empty(number))  # type: ignore[arg-type]
    record.close()
    content, names = files.calls.read_bytes(), files.names.read_text()
    if damage == "cut":
        files.calls.write_bytes(content[:300])
    elif damage == "cut names":
        files.names.write_text(names[:-3])
    elif damage == "no names":
        files.names.unlink()
    elif damage == "words":
        files.calls.write_bytes(content[: 12 * WORD] + b"\xff" * (len(content) - 12 * WORD))
    elif damage == "empty":
        files.calls.write_bytes(b"")
    else:
        files.calls.write_bytes(b"\x07" + content[1:])
    found = read_calls(0, files)
    assert found.rank == 0 and all(group.calls for group in found.groups.values())


@pytest.mark.parametrize(
    ("ranks", "text"),
    [([0], "0"), ([0, 1], "0,1"), (list(range(8)), "0-7"), ([1, 5, 9], "1-9:4"), ([0, 1, 5], "0,1,5"), ([], "")],
)
def test_ranks_are_packed_and_unpacked(ranks: list[int], text: str) -> None:
    assert pack_ranks(ranks) == text
    assert unpack_ranks(text) == ranks
