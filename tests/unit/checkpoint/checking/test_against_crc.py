"""Verification of stock checkpoints by the checksums in their archives."""

import random

import pytest

from hf_fsdp_plugin.checkpoint.formats.boxes import whole_box
from hf_fsdp_plugin.checkpoint.formats.known_formats import read_stored_model, read_stored_optimizer
from hf_fsdp_plugin.checkpoint.formats.stored_tensors import labelled_tensors
from hf_fsdp_plugin.tools.verify.verification import verify
from tests.support import damages
from tests.support.saved import errors, notes, only_error


def test_stock_checkpoint_is_verified_by_its_checksums(stock):
    verdict = verify(stock)
    assert verdict.ok
    (note,) = notes(verdict)
    covered = int(note.partition(" of ")[0].rpartition(" ")[2].replace(",", ""))
    assert note.endswith("[FSDP-N474]") and 70_000 < covered < verdict.num_bytes


@pytest.mark.parametrize("part", ["pytorch_model_fsdp_0", "optimizer_0"])
def test_flipped_byte_of_a_stock_tensor_names_it(stock, part):
    path = stock / part / "__0_0.distcp"
    whole = path.read_bytes()
    stored = read_stored_model(stock) if part == "pytorch_model_fsdp_0" else read_stored_optimizer(stock)
    assert stored is not None
    tensors = [tensor for _, tensor in labelled_tensors(stored) if tensor.shape]
    named = set()
    for tensor in random.Random(0).sample(tensors, 4):
        (piece,), ((_, _, offset),) = tensor.pieces, tensor.parts_of(whole_box(tensor.shape))
        damages.flip(path, offset + 3)
        text = only_error(stock, "FSDP-E471", config_check=False)
        place = f"bytes {piece.offset:,} to {piece.offset + piece.archive:,} differ"
        assert f"{part}/__0_0.distcp: {place}" in text and f"{tensor.name}" in text
        named.add(text.partition("contain ")[2].partition(". ")[0])
        path.write_bytes(whole)
    assert len(named) == 4 and all("model." in name or "lm_head." in name for name in named)


@pytest.mark.parametrize("length", [-1, -300, 10_000, 4])
def test_truncated_stock_file_is_found(stock, length):
    path = stock / "pytorch_model_fsdp_0" / "__0_0.distcp"
    path.write_bytes(path.read_bytes()[:length])
    verdict = verify(stock, config_check=False)
    assert any("__0_0.distcp" in text and text.endswith("[FSDP-E453]") for text in errors(verdict))


def test_flipped_byte_in_scheduler_file_is_found(stock):
    damages.flip(stock / "scheduler.pt", 70)  # in the pickle
    assert "scheduler.pt: bytes" in only_error(stock, "FSDP-E471")
