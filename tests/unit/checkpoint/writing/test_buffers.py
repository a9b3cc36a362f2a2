"""Staging buffers and the copies in them, with a device that records its calls and their current device."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch

from hf_fsdp_plugin.checkpoint.writing import async_copies, file_parts, staging_buffers
from hf_fsdp_plugin.checkpoint.writing.async_copies import ShardCopies, WeightsChangedError, copy_parts
from hf_fsdp_plugin.checkpoint.writing.file_parts import FilePart, Item, whole_file
from hf_fsdp_plugin.checkpoint.writing.staging_buffers import StagingBuffers
from hf_fsdp_plugin.devices import Device

SIZE = 1 << 20


class Event:
    """An event that records who waits for it."""

    def __init__(self, device: RecordingDevice) -> None:
        self.wait, self.synchronize = (partial(device._record, name) for name in ("wait", "synchronize"))

    def record(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class RecordingDevice(Device):
    """A stand-in for CUDA: the current device is per thread, a new thread starts on device 0, and memory is pinned.

    Attributes:
        calls: the name of each call, the current device of its thread, and whether it is the main thread.
    """

    calls: list[tuple[str, int, bool]] = field(default_factory=list)
    pinned: set[int] = field(default_factory=set)
    prefaulted: set[int] = field(default_factory=set)
    current: threading.local = field(default_factory=threading.local)

    def current_index(self) -> int:
        return getattr(self.current, "index", 0)

    def set_current(self, index: int) -> None:
        self.current.index = index

    def pin(self, memory: torch.Tensor) -> bool:
        assert memory.data_ptr() in self.prefaulted, "pages would be allocated while the driver holds its lock"
        self._record("pin")
        self.pinned.add(memory.data_ptr())
        return True

    def unpin(self, memory: torch.Tensor) -> None:
        self._record("unpin")
        self.pinned.remove(memory.data_ptr())

    def record_event(self) -> Event:
        self._record("record")
        return Event(self)

    def new_stream(self) -> Any:
        self._record("stream")
        return nullcontext()

    def _record(self, name: str) -> None:
        self.calls.append((name, self.current_index(), threading.current_thread() is threading.main_thread()))


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> RecordingDevice:
    device = RecordingDevice(type="cuda", collectives="nccl")
    prefault = staging_buffers.allocate_pages

    def recorded(memory: torch.Tensor) -> None:
        prefault(memory)
        device.prefaulted.update(piece.data_ptr() for piece in memory.split(staging_buffers.PIECE))

    monkeypatch.setattr(staging_buffers, "available_device", lambda: device)
    monkeypatch.setattr(staging_buffers, "allocate_pages", recorded)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda memory: memory.data_ptr() in device.pinned)
    return device


def test_buffers_are_pinned_and_used_again(device: RecordingDevice) -> None:
    staging = StagingBuffers()
    memory = staging.take(0, SIZE, pinned=True)
    assert memory.numel() == SIZE and staging.take(0, SIZE // 2, pinned=True) is memory
    assert (staging.missing(0, SIZE), staging.missing(1, SIZE), staging.missing(0, 2 * SIZE)) == (0, SIZE, SIZE)
    larger = staging.take(0, 2 * SIZE, pinned=True)
    assert larger.numel() == 2 * SIZE and [name for name, *_ in device.calls] == ["pin", "unpin", "pin"]
    staging.close()
    assert device.pinned == set()


def parts_of(tensors: Mapping[str, torch.Tensor]) -> list[FilePart]:
    """A file for each tensor, with its first elements once more at the end."""
    files = []
    for name, tensor in tensors.items():
        first = Item(0, (b"head", tensor))
        files.append(whole_file(name, [first, Item(first.stop, (b"tail", tensor[:100]))]))
    return files


def test_copies_are_taken_by_a_thread_on_the_device_of_the_rank(
    device: RecordingDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(async_copies, "available_device", lambda: device)
    monkeypatch.setattr(async_copies, "on_accelerator", lambda parts: True)
    device.set_current(3)
    taken = ShardCopies(StagingBuffers())
    taken.parts += parts_of({"a": torch.arange(10_000)})
    taken.begin()
    device.calls.clear()
    thread = threading.Thread(target=taken.take)
    thread.start()
    thread.join()
    taken.wait_in_stream()
    names = ["pin", "stream", "wait", "record", "synchronize"]
    assert device.calls == [*((name, 3, False) for name in names), ("wait", 3, True)]


def test_step_waits_for_the_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_parts, "WINDOW", 1 << 14)
    weight, state = torch.arange(10_000), torch.arange(20_000).remainder(7).to(torch.float16)
    expected = weight.clone(), state.clone()
    taken, may_copy = ShardCopies(StagingBuffers()), threading.Event()
    copy = async_copies.copy_window

    def late_copy(*args: Any) -> None:
        may_copy.wait(60)
        copy(*args)

    monkeypatch.setattr(async_copies, "copy_window", late_copy)
    taken.parts += parts_of({"weight": weight, "state": state})
    taken.begin()
    thread = threading.Thread(target=taken.take)
    thread.start()
    threading.Timer(0.2, may_copy.set).start()
    taken.wait_in_stream()
    weight.zero_()  # the optimizer step
    state.zero_()
    thread.join()
    memory = taken.memory
    for part, tensor in zip(taken.parts, expected, strict=True):
        assert torch.equal(memory[4 : 4 + tensor.nbytes].clone().view(tensor.dtype), tensor)
        memory = memory[part.span :]


@pytest.mark.parametrize("changed", ["all", "some", "none"])
def test_changes_before_the_step_are_found(changed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that torch counts in no version, and of a few tensors among many."""
    monkeypatch.setattr(file_parts, "WINDOW", 1 << 14)
    tensors = {f"{number}": torch.full((50 + number,), float(number)) for number in range(700)}
    tensors |= {"weight": torch.zeros(9_000), "state": torch.zeros(9_000, dtype=torch.bfloat16)}
    taken = ShardCopies(StagingBuffers())
    taken.parts += parts_of(tensors)
    taken.begin()
    assert taken._samples is not None and taken._samples.numel() <= 256 * 256
    for tensor in [] if changed == "none" else [*tensors.values()][:: 7 if changed == "some" else 1]:
        tensor.data.add_(1)
    with pytest.raises(WeightsChangedError, match="FSDP-W435") if changed != "none" else nullcontext():
        taken.take()


def test_memory_is_pinned_in_pieces(device: RecordingDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver's lock is held for one piece at a time."""
    monkeypatch.setattr(staging_buffers, "PIECE", 1 << 18)
    memory = staging_buffers.allocate_aligned(SIZE + 4096, pinned=True)
    assert {pointer - memory.data_ptr() for pointer in device.pinned} == set(range(0, SIZE + 1, 1 << 18))
    staging_buffers.unpin(memory)
    assert device.pinned == set()


def test_memory_is_pinned_completely_or_not_at_all(device: RecordingDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging_buffers, "PIECE", 1 << 18)
    monkeypatch.setattr(staging_buffers, "_allocate_pinned", lambda size: None)
    pin = RecordingDevice.pin
    monkeypatch.setattr(RecordingDevice, "pin", lambda self, memory: len(self.pinned) < 2 and pin(self, memory))
    memory = staging_buffers.allocate_aligned(SIZE, pinned=True)
    assert memory.numel() == SIZE and device.pinned == set()
    assert [name for name, *_ in device.calls] == ["pin", "pin", "unpin", "unpin"]


def test_memory_of_torch_is_not_unpinned(device: RecordingDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's pool gives it to others later, and unpins it itself."""
    pool = torch.zeros(SIZE, dtype=torch.uint8)
    monkeypatch.setattr(RecordingDevice, "pin", lambda self, memory: False)
    monkeypatch.setattr(staging_buffers, "_allocate_pinned", lambda size: pool)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda memory: True)
    staging_buffers.unpin(staging_buffers.allocate_aligned(SIZE, pinned=True))
    assert device.calls == []


def test_copies_do_not_cross_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging_buffers, "PIECE", 1 << 16)
    content = torch.arange(60_000, dtype=torch.int32)
    first = Item(0, (bytes(100), b"head", content))
    part = whole_file("a", [first, Item(first.stop, (bytes(300_000 - first.stop), content[:10_000]))])
    memory = staging_buffers.allocate_aligned(part.span)
    copies: list[tuple[int, int]] = []
    copy = torch.Tensor.copy_

    def recorded(into: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        copies.append((into.data_ptr() - memory.data_ptr(), into.numel()))
        return copy(into, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "copy_", recorded)
    copy_parts([part], memory)
    assert sum(size for _, size in copies) == 340_000
    assert all(start >> 16 == start + size - 1 >> 16 for start, size in copies)
    assert torch.equal(memory[104 : 104 + content.nbytes].clone().view(torch.int32), content)
    assert torch.equal(memory[300_000:340_000].clone().view(torch.int32), content[:10_000])


def test_memory_of_cpu_ranks_is_not_pinned(device: RecordingDevice) -> None:
    staging = StagingBuffers()
    staging.take(0, 2 * SIZE, pinned=False)
    staging.close()
    assert device.calls == []
