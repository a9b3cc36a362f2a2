"""Files of torch.save: a state dict in one file, and hostile ones."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from hf_fsdp_plugin.checkpoint.formats.element_types import SIZES, numpy_dtype
from hf_fsdp_plugin.checkpoint.formats.stored import StoredTensor
from hf_fsdp_plugin.checkpoint.formats.table import read_stored_model, read_stored_optimizer
from hf_fsdp_plugin.problems import CheckpointError


def read(root: Path, tensor: StoredTensor) -> np.ndarray:
    (piece,) = tensor.pieces
    dtype = numpy_dtype(tensor.dtype)
    data = np.fromfile(root / piece.file, np.uint8)
    return np.ndarray(tensor.shape, dtype, data, piece.offset, [s * dtype.itemsize for s in piece.strides])


@pytest.mark.parametrize("dtype", sorted(SIZES))
def test_a_tensor_of_every_type_is_found(tmp_path: Path, dtype: str) -> None:
    raw = torch.arange(1, 13 * SIZES[dtype] - SIZES[dtype] + 1, dtype=torch.uint8) % 2
    torch.save({"a": raw.view(getattr(torch, dtype)).reshape(3, 4)}, tmp_path / "pytorch_model_fsdp.bin")
    index = read_stored_model(tmp_path)
    assert (index.format, index.tensors["a"].dtype, index.tensors["a"].shape) == ("bin", dtype, (3, 4))
    assert read(tmp_path, index.tensors["a"]).tobytes() == bytes(raw.tolist())


def test_views_ties_parameters_and_objects_of_a_state_dict_are_found(tmp_path: Path) -> None:
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


def test_an_optimizer_by_names_and_one_by_numbers(tmp_path: Path) -> None:
    state = {"step": torch.tensor(2.0), "exp_avg": torch.ones(2, 2)}
    for file, name in (("optimizer.bin", "w"), ("optimizer_1.bin", 0)):
        torch.save({"state": {name: state}, "param_groups": [{"params": [name], "lr": 0.1}]}, tmp_path / file)
        index = read_stored_optimizer(tmp_path, number=int(file != "optimizer.bin"))
        assert index is not None
        assert index.groups == [{"params": [str(name)], "lr": 0.1}]
        assert (read(tmp_path, index.state[str(name)]["exp_avg"]) == 1).all()


def test_plain_sgd_has_groups_and_no_state(tmp_path: Path) -> None:
    torch.save({"state": {}, "param_groups": [{"params": ["w"]}]}, tmp_path / "optimizer.bin")
    index = read_stored_optimizer(tmp_path)
    assert index is not None
    assert (index.state, index.groups) == ({}, [{"params": ["w"]}])


@pytest.mark.parametrize("value", [[1], {"state": 3}, {"state": {"a": 1}}, {"param_groups": {"a": 1}}], ids=str)
def test_what_is_no_optimizer_is_refused(tmp_path: Path, value: Any) -> None:
    torch.save(value, tmp_path / "optimizer.bin")
    with pytest.raises(CheckpointError, match=r"optimizer\.bin: (not an optimizer's|it holds a list|not what torch)"):
        read_stored_optimizer(tmp_path)


class Hostile:
    def __reduce__(self) -> Any:
        return os.system, ("touch hostile_was_run",)


def test_a_hostile_pickle_in_a_checkpoint_is_refused_and_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"a": Hostile()}, tmp_path / "pytorch_model_fsdp.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model_fsdp\.bin: .*names posix\.system"):
        read_stored_model(tmp_path)
    assert not (tmp_path / "hostile_was_run").exists()


def test_a_tensor_that_reaches_beyond_its_storage_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "pytorch_model_fsdp.bin"
    torch.save({"a": torch.zeros(7, 3)}, path)
    # The rows of the shape, as the pickle writes them: BININT1 7.
    path.write_bytes(path.read_bytes().replace(b"K\x07K\x03", b"K\x09K\x03"))
    with pytest.raises(CheckpointError, match=r"record 'data/0' has 84 bytes where its tensor needs 108"):
        read_stored_model(tmp_path)
