"""Checkpoints of stock Accelerate: every tensor is assembled from its pieces, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hf_fsdp_plugin.checkpoint.formats.known_formats import read_stored_model, read_stored_optimizer
from hf_fsdp_plugin.problems import CheckpointError
from tests.gloo.cases_checkpoint_formats import save_with_stock_accelerate
from tests.support.assembled import assembled
from tests.support.ranks import Ranks

SHARDED, FULL, LOCAL = "SHARDED_STATE_DICT", "FULL_STATE_DICT", "LOCAL_STATE_DICT"


def assert_model_is(checkpoint: Path, truth: dict[str, np.ndarray], form: str, number: int = 0) -> None:
    index = read_stored_model(checkpoint, number)
    assert index.format == form
    assert index.tensors.keys() == truth.keys()
    for name, expected in truth.items():
        assert assembled(index.root, index.tensors[name]).tobytes() == expected.tobytes(), name


def assert_optimizer_is(checkpoint: Path, truth: dict[str, Any], form: str, number: int = 0) -> None:
    index = read_stored_optimizer(checkpoint, number)
    assert index is not None
    assert index.format == form
    assert index.groups == truth["groups"]
    assert index.state.keys() == truth["state"].keys()
    for name, entry in truth["state"].items():
        assert index.state[name].keys() == entry.keys()
        for key, expected in entry.items():
            assert assembled(index.root, index.state[name][key]).tobytes() == expected.tobytes(), (name, key)


@pytest.mark.parametrize(
    ("version", "kind", "how", "form"),
    [
        (1, SHARDED, {"on_mesh": True}, "dcp"),
        (1, SHARDED, {"on_mesh": False}, "dcp"),
        (1, SHARDED, {"on_mesh": False, "use_orig_params": False}, "dcp"),
        (2, SHARDED, {}, "dcp"),
        (1, SHARDED, {"on_mesh": True, "use_dcp": False}, "per_rank"),
        (1, SHARDED, {"on_mesh": False, "use_dcp": False}, "per_rank"),
        (2, SHARDED, {"use_dcp": False}, "per_rank"),
        (1, FULL, {}, "bin"),
        (2, FULL, {}, "bin"),
        (1, SHARDED, {"dtype": "bfloat16", "number": 1}, "dcp"),
        (2, SHARDED, {"dtype": "bfloat16", "number": 1, "use_dcp": False}, "per_rank"),
    ],
    ids=str,
)
def test_stock_checkpoint_is_read_completely(
    two_ranks: Ranks, tmp_path: Path, version: int, kind: str, how: dict[str, Any], form: str
) -> None:
    truth = two_ranks.run(save_with_stock_accelerate, str(tmp_path), version, kind, **how)[0]
    number = how.get("number", 0)
    assert_model_is(tmp_path, truth["model"], form, number)
    assert_optimizer_is(tmp_path, truth, form, number)


def test_file_of_a_missing_rank_is_reported(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks.run(save_with_stock_accelerate, str(tmp_path), 2, SHARDED, use_dcp=False)
    (tmp_path / "pytorch_model_fsdp_0_rank1.bin").unlink()
    with pytest.raises(CheckpointError, match=r"_rank\*\.bin: .*Only .*rank0\.bin .*FSDP-E458"):
        read_stored_model(tmp_path)
    (tmp_path / "optimizer_0_rank0.bin").unlink()
    with pytest.raises(CheckpointError, match=r"optimizer_0_rank0\.bin: .*FSDP-E457"):
        read_stored_optimizer(tmp_path)


def test_flat_parameters_of_fsdp1_are_refused(two_ranks: Ranks, tmp_path: Path) -> None:
    truth = two_ranks.run(save_with_stock_accelerate, str(tmp_path), 1, LOCAL, on_mesh=False)[0]
    with pytest.raises(CheckpointError, match=r"SHARDED_STATE_DICT.*FSDP-E460"):
        read_stored_model(tmp_path)
    assert_optimizer_is(tmp_path, truth, "dcp")
