"""Files of torch.save: a full state dict in one file, and damaged files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hf_fsdp_plugin.checkpoint.formats.known_formats import read_stored_model, read_stored_optimizer
from hf_fsdp_plugin.checkpoint.formats.stored_tensors import SIZES
from hf_fsdp_plugin.problems import CheckpointError
from tests.support.assembled import assembled as read


@pytest.mark.parametrize("dtype", sorted(SIZES))
def test_tensor_of_every_dtype_is_read(tmp_path: Path, dtype: str) -> None:
    raw = torch.arange(1, 13 * SIZES[dtype] - SIZES[dtype] + 1, dtype=torch.uint8) % 2
    torch.save({"a": raw.view(getattr(torch, dtype)).reshape(3, 4)}, tmp_path / "pytorch_model_fsdp.bin")
    index = read_stored_model(tmp_path)
    assert (index.format, index.tensors["a"].dtype, index.tensors["a"].shape) == ("bin", dtype, (3, 4))
    assert read(tmp_path, index.tensors["a"]).tobytes() == bytes(raw.tolist())


def test_views_ties_parameters_and_objects_are_read(tmp_path: Path) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    module = nn.Linear(2, 3)
    state = {
        "_orig_mod.part": base[1:3, 2:5], "transposed": base.t(), "tied": base, "parameter": nn.Parameter(base[2]),
        "scalar": torch.tensor(3), "empty": torch.zeros(0, 2), "extra": {"seen": 5}, **module.state_dict(),
    }  # fmt: skip
    torch.save(state, tmp_path / "pytorch_model_fsdp_1.bin")
    index = read_stored_model(tmp_path, 1)
    assert index.objects == {"extra": {"seen": 5}}
    assert index.tensors.keys() == {"part", *state} - {"_orig_mod.part", "extra"}
    for name, expected in state.items():
        if isinstance(expected, torch.Tensor) and name != "empty":
            assert (read(tmp_path, index.tensors[name.removeprefix("_orig_mod.")]) == expected.detach().numpy()).all()
    assert index.tensors["empty"].shape == (0, 2)


def test_optimizer_with_names_and_with_numbers_is_read(tmp_path: Path) -> None:
    state = {"step": torch.tensor(2.0), "exp_avg": torch.ones(2, 2)}
    for file, name in (("optimizer.bin", "w"), ("optimizer_1.bin", 0)):
        torch.save({"state": {name: state}, "param_groups": [{"params": [name], "lr": 0.1}]}, tmp_path / file)
        index = read_stored_optimizer(tmp_path, number=int(file != "optimizer.bin"))
        assert index is not None
        assert index.groups == [{"params": [str(name)], "lr": 0.1}]
        assert (read(tmp_path, index.state[str(name)]["exp_avg"]) == 1).all()


def test_optimizer_without_state_has_groups(tmp_path: Path) -> None:
    torch.save({"state": {}, "param_groups": [{"params": ["w"]}]}, tmp_path / "optimizer.bin")
    index = read_stored_optimizer(tmp_path)
    assert index is not None
    assert (index.state, index.groups) == ({}, [{"params": ["w"]}])


@pytest.mark.parametrize(
    ("value", "code"),
    [
        ([1], "FSDP-E460"),
        ({"state": 3}, "FSDP-E461"),
        ({"state": {"a": 1}}, "FSDP-E461"),
        ({"param_groups": {"a": 1}}, "FSDP-E461"),
    ],
    ids=str,
)
def test_object_that_is_not_an_optimizer_is_refused(tmp_path: Path, value: Any, code: str) -> None:
    torch.save(value, tmp_path / "optimizer.bin")
    with pytest.raises(CheckpointError, match=rf"optimizer\.bin: .*{code}"):
        read_stored_optimizer(tmp_path)


def test_tensor_larger_than_its_storage_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "pytorch_model_fsdp.bin"
    torch.save({"a": torch.zeros(7, 3)}, path)
    # The rows of the shape, as the pickle writes them: BININT1 7.
    path.write_bytes(path.read_bytes().replace(b"K\x07K\x03", b"K\x09K\x03"))
    with pytest.raises(CheckpointError, match=r"record 'data/0' has 84 bytes.* 108.*FSDP-E453"):
        read_stored_model(tmp_path)
