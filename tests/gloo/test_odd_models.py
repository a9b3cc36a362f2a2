"""Legitimate but unusual models train with every layer as a unit, and their report has no false alarm."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hf_fsdp_plugin as hfp
from tests.support.ranks import Ranks
from tests.support.tiny import parallel_config, tiny_t5
from tests.support.training import assert_same_weights, fresh_accelerator

NUM_STEPS = 2


class Scalars(nn.Module):
    """All parameters have no dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale + self.shift


class Buffers(nn.Module):
    """There are no parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


class WithEmpty(nn.Module):
    """One parameter has no elements."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.unused = nn.Parameter(torch.empty(0, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


class ComplexFilter(nn.Module):
    """A complex parameter, which torch cannot shard, is in a module of its own."""

    class Filter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4, dtype=torch.complex64))

        def forward(self, z: torch.Tensor) -> torch.Tensor:
            return z @ self.weight

    def __init__(self) -> None:
        super().__init__()
        self.first, self.filter = nn.Linear(4, 4), self.Filter()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.filter(self.first(x).to(torch.complex64)).abs()


def linears(dtype: torch.dtype = torch.float32, sizes: tuple[int, ...] = (4, 4, 4, 4)) -> nn.Module:
    layers = [nn.Linear(before, after) for before, after in pairwise(sizes)]
    return nn.Sequential(*layers).to(dtype)


def tiny_vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, image_size=16, patch_size=8
    )
    return ViTForImageClassification(config)


def vector(dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    return {"input": torch.randn(2, 4, dtype=dtype)}


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], dict[str, Any]]]] = {
    "fp64": (lambda: linears(torch.float64), lambda: vector(torch.float64)),
    "linear": (lambda: nn.Linear(4, 4), vector),
    "odd": (lambda: linears(sizes=(4, 3, 5, 1)), vector),
    "complex": (ComplexFilter, lambda: {"x": torch.randn(2, 4)}),
    "empty": (WithEmpty, lambda: {"x": torch.randn(2, 4)}),
    "scalars": (Scalars, lambda: {"x": torch.randn(2, 4)}),
    "t5": (
        tiny_t5,
        lambda: {"input_ids": torch.ones(2, 6, dtype=torch.long), "labels": torch.ones(2, 5, dtype=torch.long)},
    ),
    "vit": (tiny_vit, lambda: {"pixel_values": torch.randn(2, 3, 16, 16), "labels": torch.zeros(2, dtype=torch.long)}),
}


class Registers(nn.Module):
    """Two layers with optional tokens, of which the first has none."""

    class Layer(nn.Module):
        def __init__(self, number: int) -> None:
            super().__init__()
            self.linear, self.registers = nn.Linear(4, 4), nn.Parameter(torch.zeros(number, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            tokens = torch.cat([self.registers.expand(x.shape[0], *self.registers.shape), x], dim=1)
            return torch.tanh(self.linear(tokens))[:, len(self.registers) :]

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(self.Layer(0), self.Layer(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


CHECKPOINT = {"fsdp_activation_checkpointing": True}

SIZE = {"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP", "fsdp_min_num_params": 1}

LINEAR = {"fsdp_transformer_layer_cls_to_wrap": "Linear"}

BF16 = {"mixed_precision": "bf16"}


CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("fp64", LINEAR, {}),
    ("linear", {"fsdp_auto_wrap_policy": "NO_WRAP"}, {}),
    ("linear", SIZE, {}),
    ("linear", LINEAR, {}),
    ("odd", SIZE, {}),
    ("complex", {**LINEAR, "fsdp_ignored_modules": "filter"}, {}),
    ("empty", LINEAR, {}),
    ("empty", SIZE, {}),
    ("scalars", {"fsdp_auto_wrap_policy": "NO_WRAP"}, {}),
    ("scalars", {**SIZE, "fsdp_offload_params": True}, BF16),
    ("t5", CHECKPOINT, {}),
    ("t5", {**CHECKPOINT, **SIZE}, {}),
    ("t5", {**CHECKPOINT, **SIZE}, BF16),
    ("vit", SIZE, BF16),
    ("vit", {}, BF16),
]


def report_of_odd(config: dict[str, Any], name: str) -> dict[str, Any]:
    """Train a model with clipping; return its report and the gradient norms."""
    make, batch = MODELS[name]
    accelerator = fresh_accelerator(config)
    torch.manual_seed(0)
    model = make()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    norms = []
    for _ in range(NUM_STEPS):
        output = model(**batch())
        loss = output.loss if hasattr(output, "loss") else output.square().mean()
        accelerator.backward(loss)
        norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        optimizer.zero_grad()
    return {**hfp.report(accelerator).to_json(), "norms": norms}


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(("name", "settings", "top"), CASES)
def test_odd_model_trains_without_false_alarm(
    two_ranks: Ranks, name: str, settings: dict[str, Any], top: dict[str, Any], version: int
) -> None:
    config = {**parallel_config("full_shard", version, 2, **settings), **top}
    found = two_ranks.run(report_of_odd, config, name)[0]
    assert [row for row in found["settings"] if row["status"] == "differs"] == []
    assert all(norm > 0 for norm in found["norms"])


def _registers_loss(model: nn.Module, step: int, part: int = 0, num_parts: int = 1) -> torch.Tensor:
    batch = torch.randn(4, 3, 4, generator=torch.Generator().manual_seed(step)).chunk(num_parts)[part]
    return (model(batch.to(next(model.parameters()).device)) - 1).square().mean()


def train_registers() -> dict[str, Any]:
    """The weights of one process after four steps."""
    torch.manual_seed(0)
    model = Registers()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(4):
        _registers_loss(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def resume_registers(config: dict[str, Any], folder: str) -> dict[str, Any]:
    """The weights after two steps, and two more in another training that resumes; and those that were saved."""
    saved: dict[str, Any] = {}
    for start in (0, 2):
        accelerator = fresh_accelerator(config)
        torch.manual_seed(start)
        model: Any = Registers()
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
        if start:
            accelerator.load_state(folder)
        for step in range(start, start + 2):
            accelerator.backward(_registers_loss(model, step, accelerator.process_index, accelerator.num_processes))
            accelerator.clip_grad_norm_(model.parameters(), 1e9)
            optimizer.step()
            optimizer.zero_grad()
        if not start:
            accelerator.save_state(folder)
        saved = accelerator.get_state_dict(model)
    return saved


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("state_dict", ["FULL_STATE_DICT", "SHARDED_STATE_DICT"])
def test_parameter_without_elements_is_resumed(two_ranks: Ranks, state_dict: str, version: int, tmp_path: Path) -> None:
    layers = {"fsdp_transformer_layer_cls_to_wrap": "Layer", "fsdp_state_dict_type": state_dict}
    config = parallel_config("full_shard", version, 2, **layers)
    weights = two_ranks.run(resume_registers, config, str(tmp_path / "state"))[0]
    assert_same_weights(weights, train_registers())
