"""Windows of a file that is written from an accelerator: the next one is copied while one is written."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hf_fsdp_plugin.checkpoint.file_io import PAGE
from hf_fsdp_plugin.checkpoint.writing import file_parts
from hf_fsdp_plugin.checkpoint.writing.file_parts import FilePart, Item, PartWriter, shared_file, whole_file
from hf_fsdp_plugin.devices import Device

NUM_WINDOWS = 3


class Stream:
    """A stand-in for the stream of an accelerator: copies run when something waits for them, not when they start."""

    def __init__(self) -> None:
        self.pending: list[Callable[[], None]] = []
        self.num_started = 0

    def start(self, copy: Callable[[], None]) -> None:
        self.num_started += 1
        self.pending.append(copy)

    def finish(self, number: int | None = None) -> None:
        while self.pending and (number is None or self.num_started - len(self.pending) < number):
            self.pending.pop(0)()


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Stream:
    stream, copy_window = Stream(), file_parts.copy_window

    def record(device: Device) -> SimpleNamespace:
        number = stream.num_started
        return SimpleNamespace(synchronize=lambda: stream.finish(number))

    monkeypatch.setattr(file_parts, "copy_window", lambda *args: stream.start(lambda: copy_window(*args)))
    monkeypatch.setattr(Device, "record_event", record)
    monkeypatch.setattr(file_parts, "on_accelerator", lambda parts: True)
    monkeypatch.setattr(file_parts, "WINDOW", PAGE)
    return stream


def part_of(num_bytes: int, *, gap: int = 8) -> tuple[FilePart, bytes]:
    """A file of several tensors with gaps between them, and its content."""
    items, content = [], bytearray()
    for number, size in enumerate((num_bytes // 2, 40, num_bytes - num_bytes // 2)):
        values = torch.arange(size).remainder(251).to(torch.uint8) + number
        padding = bytes(gap if content else 0)
        items.append(Item(len(content), (padding, b"head", values)))
        content += padding + b"head" + bytes(values.tolist())
    return whole_file("file", items), bytes(content)


def test_next_window_is_copied_while_one_is_written(
    stream: Stream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part, content = part_of(NUM_WINDOWS * PAGE - 100)
    started: list[int] = []
    write = file_parts._write_window

    def recorded(*args: Any, **kwargs: Any) -> None:
        started.append(stream.num_started)
        write(*args, **kwargs)

    monkeypatch.setattr(file_parts, "_write_window", recorded)
    PartWriter().write(tmp_path, [part])
    assert (tmp_path / "file").read_bytes() == content
    assert started == [2, 3, 3], "one copy more than writes, until there are no more windows"


def test_failed_write_waits_for_copies_to_its_memory(
    stream: Stream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.ENOSPC, "disk full")

    monkeypatch.setattr(file_parts, "_write_window", failing)
    with pytest.raises(OSError, match="disk full"):
        PartWriter().write(tmp_path, [part_of(NUM_WINDOWS * PAGE)[0]])
    assert stream.num_started == 2 and stream.pending == []


@pytest.mark.parametrize("size", [100, PAGE, 5 * PAGE + 17])
@pytest.mark.parametrize("gap", [0, 8, PAGE + 3])
def test_any_layout_is_written_and_gaps_are_zero(tmp_path: Path, size: int, gap: int, stream: Stream) -> None:
    if gap == 0:
        items = [Item(number * size, (torch.full((size,), number + 1, dtype=torch.uint8),)) for number in range(3)]
        part, content = shared_file("file", 3 * size, items[::2]), bytearray(3 * size)
        for number in (0, 2):
            content[number * size : (number + 1) * size] = bytes([number + 1]) * size
    else:
        part, content = part_of(size, gap=gap)
    writer = PartWriter()
    for _ in range(2):  # the memory of the first file has other content
        writer.write(tmp_path, [part])
        assert (tmp_path / "file").read_bytes() == content


def test_items_of_a_window_are_found_without_a_walk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    num_items, num_reads = 4000, 0
    monkeypatch.setattr(file_parts, "WINDOW", PAGE)
    offsets = Item.stop.fget

    def counted(item: Item) -> int:
        nonlocal num_reads
        num_reads += 1
        return offsets(item)

    monkeypatch.setattr(Item, "stop", property(counted))
    part = whole_file("file", [Item(64 * number, (bytes(64),)) for number in range(num_items)])
    PartWriter().write(tmp_path, [part])
    assert num_reads < 8 * num_items, f"{num_reads} for {num_items} items in {part.span // PAGE} windows"
