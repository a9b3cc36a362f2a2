"""Elements are read in row-major order from any pieces, strides and files."""

from __future__ import annotations

import os
from pathlib import Path

import numpy
import pytest
import torch

from hf_fsdp_plugin.checkpoint import file_io
from hf_fsdp_plugin.checkpoint.file_io import InputFiles
from hf_fsdp_plugin.checkpoint.formats.boxes import Box, flat_range, row_major, whole_box
from hf_fsdp_plugin.checkpoint.formats.stored_tensors import StoredPiece, StoredTensor
from hf_fsdp_plugin.checkpoint.reading import resharding
from hf_fsdp_plugin.checkpoint.saved_state import pieces_in
from hf_fsdp_plugin.problems import CheckpointError

SHAPE = (7, 6, 5)
VALUES = numpy.arange(7 * 6 * 5, dtype="<i4").reshape(SHAPE)


def stored(folder: Path, boxes: list[Box], order: str = "C") -> StoredTensor:
    """Write ``VALUES`` to one file per box, with a few bytes before each."""
    pieces = []
    for number, box in enumerate(boxes):
        part = VALUES[tuple(slice(at, at + size) for at, size in zip(box.offsets, box.sizes, strict=True))]
        (folder / f"{number}.bin").write_bytes(b"xyz" + part.tobytes(order=order))  # type: ignore[arg-type]
        strides = row_major(box.sizes) if order == "C" else tuple(reversed(row_major(box.sizes[::-1])))
        pieces.append(StoredPiece(box, f"{number}.bin", 3, strides))
    return StoredTensor("weight", "int32", SHAPE, tuple(pieces))


def read_run(files: InputFiles, tensor: StoredTensor, start: int, stop: int, out: memoryview) -> None:
    """Read the elements ``[start, stop)`` of the row-major tensor."""
    values = torch.frombuffer(out, dtype=getattr(torch, tensor.dtype))
    pieces = pieces_in(values, flat_range(tensor.shape, start, stop))
    resharding.execute_transfers(files, resharding.plan_transfers(tensor, pieces))


def halves(dim: int) -> list[Box]:
    sizes = [SHAPE[dim] // 2, SHAPE[dim] - SHAPE[dim] // 2]
    boxes = []
    for start, size in zip((0, sizes[0]), sizes, strict=True):
        offsets, lengths = [0, 0, 0], list(SHAPE)
        offsets[dim], lengths[dim] = start, size
        boxes.append(Box(tuple(offsets), tuple(lengths)))
    return boxes


CUTS = {
    "whole": [whole_box(SHAPE)],
    "rows": halves(0),
    "middle dim": halves(1),
    "columns": halves(2),
    "flat parameter": [*flat_range(SHAPE, 0, 83), *flat_range(SHAPE, 83, 210)],
}


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("cut", CUTS)
def test_runs_are_read_from_any_pieces(cut: str, order: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resharding, "MAX_SPAN", 64)  # so that spans are split, as those of large tensors
    tensor = stored(tmp_path, CUTS[cut], order)
    with InputFiles(tmp_path) as files:
        for start, stop in [(0, 210), (0, 1), (13, 14), (31, 180), (209, 210), (60, 90)]:
            out = bytearray(4 * (stop - start))
            read_run(files, tensor, start, stop, memoryview(out))
            assert numpy.frombuffer(out, "<i4").tolist() == list(range(start, stop))


def test_scalar_is_read(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"\x00\x07")
    tensor = StoredTensor("step", "uint8", (), (StoredPiece(Box((), ()), "f", 1, ()),))
    out = bytearray(1)
    with InputFiles(tmp_path) as files:
        read_run(files, tensor, 0, 1, memoryview(out))
    assert out == b"\x07"


def test_more_files_than_can_be_open_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_io, "MAX_OPEN", 2)
    tensor = stored(tmp_path, [Box((row, 0, 0), (1, 6, 5)) for row in range(7)])
    out = bytearray(4 * 210)
    with InputFiles(tmp_path) as files:
        read_run(files, tensor, 0, 210, memoryview(out))
        read_run(files, tensor, 0, 210, memoryview(out))
        assert len(files._open) == 2
    assert numpy.frombuffer(out, "<i4").tolist() == list(range(210))


def test_bytes_beyond_the_end_are_refused(tmp_path: Path) -> None:
    data = os.urandom(50_000)
    (tmp_path / "f").write_bytes(data)
    with InputFiles(tmp_path) as files:
        for start, stop in [(0, 50_000), (4095, 4097), (49_999, 50_000)]:
            out = bytearray(stop - start)
            files.read("f", start, memoryview(out))
            assert out == data[start:stop]
        with pytest.raises(CheckpointError, match=r"50,000.*50,001.*FSDP-E453"):
            files.read("f", 0, memoryview(bytearray(50_001)))


def test_truncated_file_is_refused(tmp_path: Path) -> None:
    tensor = stored(tmp_path, halves(0))
    with open(tmp_path / "1.bin", "r+b") as file:
        file.truncate(100)
    with InputFiles(tmp_path) as files, pytest.raises(CheckpointError, match=r"1\.bin: .*100.*483.*FSDP-E453"):
        read_run(files, tensor, 0, 210, memoryview(bytearray(840)))
