"""Ignored modules in mixed precision, with kernels for many tensors, and with the gradient scaler of fp16 training."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from hf_fsdp_plugin.torch_private.grad_scaler import CollectiveGradScaler
from tests.support.matrices import slow
from tests.support.ranks import Ranks
from tests.support.tiny import MODELS, parallel_config
from tests.support.training import assert_same_training, differing, fresh_accelerator, reference, train, train_prepared

NUM_STEPS = 3

SCALE = 1024.0


class WithScalar(nn.Module):
    """A llama whose first parameter is a scalar, like CLIP's ``logit_scale``."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.inner: Any = MODELS["llama"]()

    def forward(self, **batch: Any) -> Any:
        output = self.inner(**batch)
        output.loss = output.loss * self.scale
        return output


MODELS["with-scalar"] = WithScalar

SETTINGS: dict[str, dict[str, Any]] = {"plain": {}, "foreach": {"foreach": True}, "fused": {"fused": True}}


# The kernels of foreach and fused take tensors of one kind only. On a GPU foreach is the default.
HOW = ["fused", slow("foreach"), slow("plain")]

VERSIONS = pytest.mark.parametrize("version", [1, 2])


@cache
def expected(name: str) -> dict[str, Any]:
    return reference(name, num_steps=NUM_STEPS)


def train_in_bf16(version: int, name: str, ignored: str) -> dict[str, Any]:
    config = parallel_config("full_shard", version, 2, fsdp_ignored_modules=ignored)
    return train(name, {**config, "mixed_precision": "bf16"}, num_steps=NUM_STEPS)


@pytest.mark.parametrize(
    ("name", "ignored", "version"),
    [
        ("llama", "lm_head", 1),
        slow("llama", "lm_head", 2),
        slow("llama", r"model\.norm|.*layers\.1\.mlp", 1),
        ("llama", r"model\.norm|.*layers\.1\.mlp", 2),
        ("bert", r"bert\.embeddings", 1),  # its weight is tied to the head, which is not ignored
        slow("bert", r"bert\.embeddings", 2),
    ],
)
def test_ignored_modules_train_in_bf16(two_ranks: Ranks, name: str, ignored: str, version: int) -> None:
    run = two_ranks.run(train_in_bf16, version, name, ignored)[0]
    assert run["losses"] == pytest.approx(expected(name)["losses"], rel=1e-2)
    assert differing(run["report"]) == []


def adamw(model: nn.Module, how: str) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, **SETTINGS[how])


def scaled_accelerator(version: int, ignored: str) -> Any:
    """An Accelerator with the scaler that it would have for fp16 on a GPU."""
    accelerator = fresh_accelerator(parallel_config("full_shard", version, 2, fsdp_ignored_modules=ignored))
    accelerator.native_amp, accelerator.state._mixed_precision = True, "fp16"
    accelerator.scaler = CollectiveGradScaler("cpu", init_scale=SCALE)
    return accelerator


def train_scaled(version: int, name: str, ignored: str, how: str) -> dict[str, Any]:
    accelerator = scaled_accelerator(version, ignored)
    model = MODELS[name]()
    model, optimizer = accelerator.prepare(model, adamw(model, how))
    return train_prepared(accelerator, model, optimizer, name, NUM_STEPS)


@VERSIONS
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(("name", "ignored"), [("llama", "lm_head"), ("with-scalar", "inner.model.norm")])
def test_scaled_training_equals_one_process(two_ranks: Ranks, name: str, ignored: str, how: str, version: int) -> None:
    assert_same_training(two_ranks.run(train_scaled, version, name, ignored, how)[0], expected(name))


def _local(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _step_with_infinite_gradient(accelerator: Any, how: str, clip: bool = False) -> dict[str, Any]:
    model = MODELS["llama"]()
    model, optimizer = accelerator.prepare(model, adamw(model, how))
    found: dict[str, Any] = {"changed": [], "scales": []}
    for is_infinite in (True, False):
        ids = torch.ones(2, 4, dtype=torch.long, device=accelerator.device)
        accelerator.backward(model(input_ids=ids, labels=ids).loss)
        if is_infinite and dist.get_rank() == dist.get_world_size() - 1:
            gradients = (_local(p.grad) for p in model.parameters() if p.grad is not None)
            next(gradient for gradient in gradients if gradient.numel()).view(-1)[0] = float("inf")
        before = [_local(parameter.detach()).clone() for parameter in model.parameters()]
        if clip:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        after = [_local(parameter.detach()) for parameter in model.parameters()]
        found["changed"].append(any(not torch.equal(a, b) for a, b in zip(before, after, strict=True)))
        found["scales"].append(accelerator.scaler.get_scale())
    return found


def step_with_infinite_gradient(version: int, ignored: str, how: str) -> dict[str, Any]:
    """Make one gradient of the last rank infinite, without clipping, and step. The next step is an ordinary one."""
    return _step_with_infinite_gradient(scaled_accelerator(version, ignored), how)


@VERSIONS
@pytest.mark.parametrize("how", ["fused", slow("plain")])
def test_infinite_gradient_of_one_rank_skips_all_ranks(two_ranks: Ranks, how: str, version: int) -> None:
    found = two_ranks.run(step_with_infinite_gradient, version, "lm_head", how)
    assert found == [{"changed": [False, True], "scales": [SCALE / 2, SCALE / 2]}] * 2


def step_offloaded_with_infinite_gradient(version: int, how: str, clip: bool) -> dict[str, Any]:
    """The same on devices, with shards in host memory."""
    config = parallel_config("full_shard", version, 2, use_cpu=False, fsdp_offload_params=True)
    accelerator = fresh_accelerator({**config, "mixed_precision": "fp16"})
    accelerator.scaler.load_state_dict({**accelerator.scaler.state_dict(), "scale": SCALE})
    return _step_with_infinite_gradient(accelerator, how, clip)


@VERSIONS
@pytest.mark.parametrize(("how", "clip"), [("fused", False), ("fused", True), slow("plain", False)])
def test_infinite_gradient_in_host_memory_skips_the_step(
    two_accelerator_ranks: Ranks, version: int, how: str, clip: bool
) -> None:
    """Fused kernels of the CPU would read their flag from a copy that has not arrived yet."""
    found = two_accelerator_ranks.run(step_offloaded_with_infinite_gradient, version, how, clip)
    assert found == [{"changed": [False, True], "scales": [SCALE / 2, SCALE / 2]}] * 2


def _state_after_step(accelerator: Any, model: nn.Module, optimizer: Any, factor: float = 1.0) -> dict[str, Any]:
    ids = torch.ones(2, 4, dtype=torch.long)
    accelerator.backward(factor * model(input_ids=ids, labels=ids).loss)
    optimizer.step()
    optimizer.zero_grad()
    state: dict[str, Any] = accelerator.scaler.state_dict()
    return state


def load_after_steps(folder: str, version: int) -> list[dict[str, Any]]:
    """Save, step with an infinite gradient, load: the state of the scaler after each, and after a step of a new one."""
    states = []
    for is_new in (False, True):
        accelerator = scaled_accelerator(version, "lm_head")
        model = MODELS["llama"]()
        model, optimizer = accelerator.prepare(model, adamw(model, "plain"))
        if not is_new:
            states.append(_state_after_step(accelerator, model, optimizer))
            accelerator.save_state(folder)
            states.append(_state_after_step(accelerator, model, optimizer, float("inf")))
        accelerator.load_state(folder)
        states += [accelerator.scaler.state_dict(), _state_after_step(accelerator, model, optimizer)]
    return states


@VERSIONS
def test_used_scaler_loads_the_state_of_a_checkpoint(two_ranks: Ranks, tmp_path: Path, version: int) -> None:
    saved, skipped, loaded, continued, new, again = two_ranks.run(load_after_steps, str(tmp_path), version)[0]
    assert skipped["scale"] == saved["scale"] / 2
    assert loaded == new == saved
    assert continued == again and continued["_growth_tracker"] == saved["_growth_tracker"] + 1


def scaler_of_accelerator(version: int) -> tuple[str, dict[str, Any]]:
    """The class and the state of the scaler that replaces one of Accelerate, which CPU ranks do not have."""
    from accelerate.utils import GradScalerKwargs

    from hf_fsdp_plugin.integrations.accelerate.accelerator import replace_scaler

    accelerator = fresh_accelerator(parallel_config("full_shard", version, 2))
    accelerator.scaler = torch.amp.GradScaler("cpu")
    accelerator.scaler_handler = GradScalerKwargs(init_scale=256.0)
    replace_scaler(accelerator)
    return type(accelerator.scaler).__name__, accelerator.scaler.state_dict()


def test_accelerator_gets_the_scaler_with_its_settings(two_ranks: Ranks) -> None:
    name, state = two_ranks.run(scaler_of_accelerator, 2)[0]
    assert name == "CollectiveGradScaler"
    assert state["scale"] == 256.0
