"""Staging buffers, with a device that records what is done to memory and on which thread's current device."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from hf_fsdp_plugin.checkpoint.writing import file_parts
from hf_fsdp_plugin.checkpoint.writing.file_parts import Item, StagingBuffers, copy_parts, whole_file
from hf_fsdp_plugin.devices import Device

SIZE = 1 << 20


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

    def _record(self, name: str) -> None:
        self.calls.append((name, self.current_index(), threading.current_thread() is threading.main_thread()))


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> RecordingDevice:
    device = RecordingDevice(type="cuda", collectives="nccl")
    prefault = file_parts.allocate_pages

    def recorded(memory: torch.Tensor) -> None:
        prefault(memory)
        device.prefaulted.update(piece.data_ptr() for piece in memory.split(file_parts.PIECE))

    monkeypatch.setattr(file_parts, "available_device", lambda: device)
    monkeypatch.setattr(file_parts, "allocate_pages", recorded)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda memory: memory.data_ptr() in device.pinned)
    return device


def test_buffers_are_pinned_on_the_device_of_the_rank(device: RecordingDevice) -> None:
    device.set_current(3)
    staging = StagingBuffers()
    staging.prepare([SIZE, SIZE], pinned=True)
    memory = staging.take(0, SIZE, pinned=True)
    assert memory.numel() == SIZE
    staging.take(1, SIZE, pinned=True)
    # A larger save replaces the buffer: on the thread that prepares it, or on that of the save.
    staging.prepare([2 * SIZE], pinned=True)
    staging.take(0, 2 * SIZE, pinned=True)
    staging.take(1, 2 * SIZE, pinned=True)
    del memory
    staging.close()
    assert device.pinned == set()
    assert {index for _, index, _ in device.calls} == {3}
    assert {(name, is_main) for name, _, is_main in device.calls} == {
        ("pin", False), ("pin", True), ("unpin", False), ("unpin", True),
    }  # fmt: skip


def test_memory_is_pinned_in_pieces(device: RecordingDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver's lock is held for one piece at a time."""
    monkeypatch.setattr(file_parts, "PIECE", 1 << 18)
    memory = file_parts.allocate_aligned(SIZE + 4096, pinned=True)
    assert {pointer - memory.data_ptr() for pointer in device.pinned} == set(range(0, SIZE + 1, 1 << 18))
    file_parts.unpin(memory)
    assert device.pinned == set()


def test_memory_is_pinned_completely_or_not_at_all(device: RecordingDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_parts, "PIECE", 1 << 18)
    monkeypatch.setattr(file_parts, "_allocate_pinned", lambda size: None)
    pin = RecordingDevice.pin
    monkeypatch.setattr(RecordingDevice, "pin", lambda self, memory: len(self.pinned) < 2 and pin(self, memory))
    memory = file_parts.allocate_aligned(SIZE, pinned=True)
    assert memory.numel() == SIZE and device.pinned == set()
    assert [name for name, *_ in device.calls] == ["pin", "pin", "unpin", "unpin"]


def test_memory_of_torch_is_not_unpinned(device: RecordingDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's pool gives it to others later, and unpins it itself."""
    pool = torch.zeros(SIZE, dtype=torch.uint8)
    monkeypatch.setattr(RecordingDevice, "pin", lambda self, memory: False)
    monkeypatch.setattr(file_parts, "_allocate_pinned", lambda size: pool)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda memory: True)
    file_parts.unpin(file_parts.allocate_aligned(SIZE, pinned=True))
    assert device.calls == []


def test_copies_do_not_cross_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_parts, "PIECE", 1 << 16)
    content = torch.arange(60_000, dtype=torch.int32)
    first = Item(0, (bytes(100), b"head", content))
    part = whole_file("a", [first, Item(first.stop, (bytes(300_000 - first.stop), content[:10_000]))])
    memory = file_parts.allocate_aligned(part.span)
    copies: list[tuple[int, int]] = []
    copy = torch.Tensor.copy_

    def recorded(into: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        copies.append((into.data_ptr() - memory.data_ptr(), into.numel()))
        return copy(into, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "copy_", recorded)
    copy_parts([part], memory)()
    assert sum(size for _, size in copies) == 340_000
    assert all(start >> 16 == start + size - 1 >> 16 for start, size in copies)
    assert torch.equal(memory[104 : 104 + content.nbytes].clone().view(torch.int32), content)
    assert torch.equal(memory[300_000:340_000].clone().view(torch.int32), content[:10_000])


def test_memory_of_cpu_ranks_is_not_pinned(device: RecordingDevice) -> None:
    staging = StagingBuffers()
    staging.prepare([SIZE], pinned=False)
    staging.take(0, 2 * SIZE, pinned=False)
    staging.close()
    assert device.calls == []
