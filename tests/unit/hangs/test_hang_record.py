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
from hf_fsdp_plugin.hangs import process_end, python_stacks
from hf_fsdp_plugin.hangs.calls import (
    ARRIVALS,
    NUM_SLOTS,
    Call,
    CallRecord,
    rank_from_json,
    read_calls,
    read_header,
)


class Group:
    """A process group that torch does not know."""

    def __init__(self, name: str, description: str = "undefined") -> None:
        self.group_name, self.group_desc = name, description


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "rank.calls"


@pytest.fixture
def record(path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[CallRecord]:
    monkeypatch.setattr("torch.distributed.get_process_group_ranks", lambda group: [0, 1])
    monkeypatch.setattr("torch.distributed.get_backend", lambda group: "gloo")
    monkeypatch.setattr("hf_fsdp_plugin.torch_private.functions.timeout_of", lambda group: timedelta(seconds=90))
    record = CallRecord()
    record.open(path)
    yield record
    record.close()


def test_calls_are_read_with_their_unit_and_size(record: CallRecord, path: Path) -> None:
    group: Any = Group("0")
    record.unit = "layers.1"
    record.begin(group, "all-gather", torch.empty(3, 4, dtype=torch.bfloat16))
    record.unit = ""
    record.begin(group, "all-reduce", [torch.empty(5)])
    record.begin(group, "all-gather (list)", [[torch.empty(2)]])
    record.begin(group, "barrier", None)
    record.begin(group, "broadcast", [])
    found = read_calls(3, path)
    assert found.rank == 3 and found.wait is None and found.idle < 60
    (calls,) = found.groups.values()
    assert calls.calls == (
        Call("all-gather", 12, "bfloat16", "layers.1"),
        Call("all-reduce", 5, "float32"),
        Call("all-gather (list)", 2, "float32"),
        Call("barrier"),
        Call("broadcast"),
    )
    assert (calls.last, calls.ranks, calls.enqueues, calls.timeout) == (5, (0, 1), False, 90.0)
    assert rank_from_json(json.loads(json.dumps(found.to_json()))).groups == found.groups


@pytest.mark.parametrize(("description", "name"), [("mesh_cp", "7 (cp)"), ("mesh_dim_0", "7"), ("undefined", "7")])
def test_group_of_an_axis_has_its_name(record: CallRecord, path: Path, description: str, name: str) -> None:
    record.begin(Group("7", description), "all-gather", torch.empty(3))  # type: ignore[arg-type]
    assert list(read_calls(0, path).groups) == [f"{name} of ranks 0,1"]


def test_wait_is_read_until_it_ends(record: CallRecord, path: Path) -> None:
    group: Any = Group("0")
    position = record.begin(group, "all-reduce", torch.empty(5))
    record.begin(group, "barrier", None)
    record.waits(position)
    time.sleep(0.02)
    wait = read_calls(0, path).wait
    assert wait is not None and (wait.number, wait.call.operation) == (1, "all-reduce") and wait.seconds >= 0.02
    seen = read_header(path)
    assert seen is not None and seen.waiting >= 0.02 and seen.count == 2
    record.waited()
    assert read_calls(0, path).wait is None


def test_waits_of_other_threads_are_ignored(record: CallRecord, path: Path) -> None:
    position = record.begin(Group("0"), "barrier", None)  # type: ignore[arg-type]
    thread = threading.Thread(target=record.waits, args=(position,))
    thread.start()
    thread.join()
    assert read_calls(0, path).wait is None


def test_ring_keeps_the_newest_calls_of_each_group(record: CallRecord, path: Path) -> None:
    first, second = Group("0"), Group("1")
    record.begin(second, "barrier", None)  # type: ignore[arg-type]
    for number in range(NUM_SLOTS + 40):
        record.begin(first if number % 4 else second, "all-reduce", torch.empty(number))  # type: ignore[arg-type]
    groups = read_calls(0, path).groups
    last = {name.partition(" ")[0]: group.last for name, group in groups.items()}
    assert last == {"0": (NUM_SLOTS + 40) * 3 // 4, "1": (NUM_SLOTS + 40) // 4 + 1}
    assert sum(len(group.calls) for group in groups.values()) == NUM_SLOTS
    newest = next(group for name, group in groups.items() if name.startswith("0"))
    assert newest.call(newest.last) == Call("all-reduce", NUM_SLOTS + 39, "float32")
    assert newest.call(newest.last + 1) is None and newest.call(1) is None


def test_arrivals_are_recorded_as_a_group(record: CallRecord, path: Path) -> None:
    record.on_arrival("Accelerator.save_state")
    wait = read_calls(0, path).wait
    assert wait is not None and str(wait.call) == "Accelerator.save_state" and wait.group == ARRIVALS
    record.on_arrival(None)
    assert read_calls(0, path).wait is None


def test_closed_record_ignores_arrivals(path: Path) -> None:
    CallRecord().on_arrival("Accelerator.save_state")
    assert read_header(path) is None and read_calls(0, path).groups == {}


def test_long_name_of_a_unit_is_cut(record: CallRecord, path: Path) -> None:
    record.unit = "layers." + "é" * 500
    record.begin(Group("0"), "all-gather", torch.empty(3))  # type: ignore[arg-type]
    (calls,) = read_calls(0, path).groups.values()
    assert calls.calls[0].operation == "all-gather" and calls.calls[0].unit.startswith("layers.éééé")


def test_group_without_space_for_its_name_is_left_out(record: CallRecord, path: Path) -> None:
    for number in range(2000):
        record.begin(Group(f"{number:0100}"), "barrier", None)  # type: ignore[arg-type]
    assert read_calls(0, path).idle < 60


def test_unknown_tensors_do_not_stop_a_collective(record: CallRecord, path: Path) -> None:
    record.begin(Group("0"), "all-reduce", object())  # type: ignore[arg-type]
    record.begin(Group("0"), "barrier", None)  # type: ignore[arg-type]
    assert [call.operation for group in read_calls(0, path).groups.values() for call in group.calls] == ["barrier"]


@pytest.mark.parametrize("damage", ["cut", "cut groups", "words", "empty", "format"])
def test_torn_files_are_read_as_far_as_possible(record: CallRecord, path: Path, damage: str) -> None:
    for number in range(20):
        record.begin(Group(str(number % 2)), "all-reduce", torch.empty(number))  # type: ignore[arg-type]
    record.close()
    content = path.read_bytes()
    if damage == "cut":
        content = content[:300]
    elif damage == "cut groups":
        content = content[: layout._GROUPS_AT + 100]
    elif damage == "words":
        content = content[:200] + b"\xff" * (len(content) - 200)
    else:
        content = b"" if damage == "empty" else b"\x07" + content[1:]
    path.write_bytes(content)
    found = read_calls(0, path)
    assert found.rank == 0 and all(group.calls for group in found.groups.values())


@pytest.mark.parametrize("file", [python_stacks._RECORDING, process_end._PROGRAMS[0]])
def test_files_that_stacks_leave_out_exist(file: str) -> None:
    assert (Path(python_stacks.__file__).parents[1] / file).exists()
