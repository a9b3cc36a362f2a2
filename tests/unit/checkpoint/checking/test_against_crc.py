"""Verification of stock checkpoints by the checksums in their archives."""

import random

import pytest

from hf_fsdp_plugin.tools.verify.archives import stored_entries
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
    data = [entry for entry in stored_entries(path) if entry.stop - entry.start >= 1024]
    named = set()
    for entry in random.Random(0).sample(data, 4):
        damages.flip(path, random.Random(entry.start).randrange(entry.start, entry.stop))
        text = only_error(stock, "FSDP-E471", config_check=False)
        assert f"{part}/__0_0.distcp: bytes {entry.start:,} to {entry.stop:,} differ" in text
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
    entry = next(iter(stored_entries(stock / "scheduler.pt")))
    damages.flip(stock / "scheduler.pt", entry.start)
    assert "scheduler.pt: bytes" in only_error(stock, "FSDP-E471")
