"""Stored boxes are read into any boxes of memory, whatever the layouts of file and memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hf_fsdp_plugin.checkpoint.file_io import InputFiles
from hf_fsdp_plugin.checkpoint.formats.boxes import Box, flat_range, relative_slices, row_major, whole_box
from hf_fsdp_plugin.checkpoint.formats.stored_tensors import StoredPiece, StoredTensor
from hf_fsdp_plugin.checkpoint.reading import resharding as filling
from hf_fsdp_plugin.checkpoint.reading.resharding import execute_transfers, plan_transfers
from hf_fsdp_plugin.checkpoint.saved_state import Piece
from hf_fsdp_plugin.problems import CheckpointError

SHAPE = (6, 5, 4)
WHOLE = torch.arange(120, dtype=torch.float32).reshape(SHAPE)
HALVES = (Box((0, 0, 0), (3, 5, 4)), Box((3, 0, 0), (3, 5, 4)))
COLUMNS = (Box((0, 0, 0), (6, 5, 1)), Box((0, 0, 1), (6, 5, 3)))
RUNS = tuple(flat_range(SHAPE, 0, 47) + flat_range(SHAPE, 47, 120))
BOXES = {"halves": HALVES, "columns": COLUMNS, "runs": RUNS, "whole": (whole_box(SHAPE),)}


def store(folder: Path, boxes: tuple[Box, ...], *, transposed: bool = False) -> StoredTensor:
    """Write ``WHOLE`` as one file per box, with a prefix of 12 bytes; optionally transposed."""
    pieces = []
    for number, box in enumerate(boxes):
        part = WHOLE[relative_slices(box, whole_box(SHAPE))]
        strides = row_major(box.sizes)
        if transposed:
            part = part.transpose(0, 2).contiguous()
            strides = tuple(reversed(row_major(tuple(reversed(box.sizes)))))
        (folder / f"{number}.bin").write_bytes(b"\0" * 12 + part.contiguous().numpy().tobytes())
        pieces.append(StoredPiece(box, f"{number}.bin", 12, strides))
    return StoredTensor("weight", "float32", SHAPE, tuple(pieces))


def read(folder: Path, stored: StoredTensor, boxes: tuple[Box, ...], dtype: torch.dtype) -> torch.Tensor:
    """Fill memory for each of ``boxes``, and return the tensor that they form."""
    pieces = [Piece(box, torch.full(box.sizes, -1, dtype=dtype)) for box in boxes]
    with InputFiles(folder) as files:
        execute_transfers(files, (item for piece in pieces for item in plan_transfers(stored, [piece])))
    result = torch.full(SHAPE, -1, dtype=dtype)
    for piece in pieces:
        result[relative_slices(piece.box, whole_box(SHAPE))] = piece.tensor
    return result


@pytest.mark.parametrize("span", [8, 40, 1 << 20], ids=lambda span: f"buffer_of_{span}")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("into", BOXES)
@pytest.mark.parametrize("cut", BOXES)
def test_any_boxes_are_read_into_any_others(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    cut: str,
    into: str,
    transposed: bool,
    dtype: torch.dtype,
    span: int,
) -> None:
    monkeypatch.setattr(filling, "MAX_SPAN", span)
    stored = store(tmp_path, BOXES[cut], transposed=transposed)
    assert torch.equal(read(tmp_path, stored, BOXES[into], dtype), WHOLE.to(dtype))


def test_fill_respects_the_strides_of_the_memory(tmp_path: Path) -> None:
    stored = store(tmp_path, HALVES)
    across = torch.zeros(4, 5, 6).permute(2, 1, 0)
    with InputFiles(tmp_path) as files:
        execute_transfers(files, plan_transfers(stored, [Piece(whole_box(SHAPE), across)]))
    assert torch.equal(across, WHOLE)


def test_scalar_is_read_as_a_box_without_dims(tmp_path: Path) -> None:
    (tmp_path / "step.bin").write_bytes(torch.tensor(7.0).numpy().tobytes())
    stored = StoredTensor("step", "float32", (), (StoredPiece(whole_box(()), "step.bin", 0, ()),))
    step = torch.zeros(())
    with InputFiles(tmp_path) as files:
        execute_transfers(files, plan_transfers(stored, [Piece(whole_box(()), step)]))
    assert step.item() == 7.0


def test_fill_reads_only_the_bytes_of_the_pieces(tmp_path: Path) -> None:
    stored = store(tmp_path, HALVES)
    (tmp_path / "1.bin").unlink()
    half = torch.zeros(3, 5, 4)
    with InputFiles(tmp_path) as files:
        execute_transfers(files, plan_transfers(stored, [Piece(HALVES[0], half)]))
    assert torch.equal(half, WHOLE[:3])


def test_truncated_file_is_named(tmp_path: Path) -> None:
    stored = store(tmp_path, HALVES)
    (tmp_path / "1.bin").write_bytes((tmp_path / "1.bin").read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"1\.bin: .*251.*252.*FSDP-E453"):
        read(tmp_path, stored, HALVES, torch.float32)
