"""A checkpoint that does not match the model or the optimizer is an error that lists all differences."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from hf_fsdp_plugin.checkpoint.reading.optimizer import load_optimizer
from hf_fsdp_plugin.checkpoint.reading.resharding import load_model
from hf_fsdp_plugin.problems import CheckpointError

WEIGHT, BIAS = torch.ones(3, 4), torch.ones(3)
pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.mark.parametrize(
    ("state", "codes"),
    [
        ({"weight": WEIGHT, "bias": BIAS}, []),
        ({"weight": WEIGHT}, ["FSDP-E421"]),
        ({"weight": WEIGHT, "bias": BIAS, "scale": BIAS}, ["FSDP-E422"]),
        ({"weight": WEIGHT.T.contiguous(), "bias": BIAS}, ["FSDP-E423"]),
        ({"weight": BIAS, "scale": BIAS}, ["FSDP-E421", "FSDP-E422", "FSDP-E423"]),
    ],
)
def test_model_differences_are_reported_at_once(
    tmp_path: Path, state: dict[str, torch.Tensor], codes: list[str]
) -> None:
    save_file({name: tensor.clone() for name, tensor in state.items()}, tmp_path / "model.safetensors")
    model = nn.Linear(4, 3)
    before = model.weight.clone()
    if not codes:
        load_model(model, tmp_path)
        assert torch.equal(model.weight, WEIGHT)
        return
    with pytest.raises(CheckpointError) as caught:
        load_model(model, tmp_path)
    assert [problem.code for problem in caught.value.problems] == codes
    assert {problem.origin.source_line for problem in caught.value.problems if problem.origin} == {str(tmp_path)}
    assert torch.equal(model.weight, before)


def saved(names: list[list[str]], rates: tuple[float, ...] = (0.5, 0.5), **state: Any) -> dict[str, Any]:
    groups = [{"params": each, "lr": rate} for each, rate in zip(names, rates, strict=False)]
    return {"state": {"weight": state} if state else {}, "param_groups": groups}


@pytest.mark.parametrize(
    ("stored", "code"),
    [
        (saved([["weight", "bias"]], momentum_buffer=WEIGHT), ""),
        (saved([["weight"], ["bias"]], momentum_buffer=WEIGHT), ""),  # groups of the same options
        (None, "FSDP-E424"),
        (saved([["weight"], ["bias"]], (0.5, 0.1)), "FSDP-E425"),
        (saved([["weight", "bias", "scale"]]), "FSDP-E425"),
        (saved([["weight", "bias"]], momentum_buffer=BIAS), "FSDP-E426"),
    ],
)
def test_optimizer_differences_are_reported(tmp_path: Path, stored: dict[str, Any] | None, code: str) -> None:
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if stored is not None:
        torch.save(stored, tmp_path / "optimizer.bin")
    if not code:
        load_optimizer(model, optimizer, tmp_path)
        assert torch.equal(optimizer.state[model.weight]["momentum_buffer"], WEIGHT)
        assert optimizer.param_groups[0]["lr"] == 0.5
        return
    with pytest.raises(CheckpointError) as caught:
        load_optimizer(model, optimizer, tmp_path)
    assert [problem.code for problem in caught.value.problems] == [code]
    assert optimizer.param_groups[0]["lr"] == 0.1 and not optimizer.state
