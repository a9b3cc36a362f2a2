"""Cases that ranks run: an Accelerate training loop with a config. The same steps in one process are the reference."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import hf_fsdp_plugin as hfp
from hf_fsdp_plugin.backends.device_meshes import _Meshes
from hf_fsdp_plugin.torch_private.functions import set_timeout, timeout_of
from tests.support.ranks import own_device, reset_accelerate
from tests.support.tiny import MODELS, NUM_STEPS, global_batch, my_part, parallel_config, simple_batch, tiny_llama

MAX_NORM = 0.5
RELATIVE = 1e-5
OptimizerOf = Callable[[nn.Module], torch.optim.Optimizer]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05, momentum=0.9)


def fresh_accelerator(config: dict[str, Any], **training_arguments: Any) -> Any:
    """A new Accelerator in a process that has created others."""
    reset_accelerate()
    return hfp.accelerator(hfp.load_spec(config, training_arguments=training_arguments, environ={}))


def loss_of(model: nn.Module, name: str, step: int, part: int = 0, num_parts: int = 1) -> torch.Tensor:
    """The loss of one of ``num_parts`` equal parts of a global batch."""
    device = next(model.parameters()).device
    if name == "simple":
        return model(simple_batch(step).chunk(num_parts)[part].to(device)).square().mean()
    batch = my_part(global_batch(step), part, num_parts)
    return model(**{key: value.to(device) for key, value in batch.items()}).loss


def reference(name: str, optimizer_of: OptimizerOf = adamw, num_steps: int = NUM_STEPS) -> dict[str, Any]:
    """Losses, gradient norms and final weights of one process in fp32 on the global batches."""
    model = MODELS[name]().float()
    losses, norms = train_without_accelerate(model, optimizer_of(model), name, num_steps)
    return {"losses": losses, "norms": norms, "weights": dict(model.state_dict())}


def train_without_accelerate(
    model: nn.Module, optimizer: torch.optim.Optimizer, name: str, num_steps: int, part: int = 0, num_parts: int = 1
) -> tuple[list[float], list[float]]:
    """Losses and gradient norms of a model that computes one of ``num_parts`` equal parts of each global batch."""
    losses, norms = [], []
    for step in range(num_steps):
        loss = loss_of(model, name, step, part, num_parts)
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms


def train_ddp_bf16(name: str) -> list[float]:
    """Losses of DDP under bf16 autocast, as a reference for bf16."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = MODELS[name]()
    model.forward = torch.autocast("cpu", torch.bfloat16)(model.forward)
    model = nn.parallel.DistributedDataParallel(model)
    losses = torch.tensor(train_without_accelerate(model, adamw(model), name, NUM_STEPS, rank, world_size)[0])
    dist.all_reduce(losses)
    return (losses / world_size).tolist()


def train(
    name: str,
    config: dict[str, Any],
    optimizer_of: OptimizerOf = adamw,
    num_steps: int = NUM_STEPS,
    *,
    accumulation: int = 1,
    order: str = "together",
    no_sync: str = "accelerator",
) -> dict[str, Any]:
    """The results of :func:`train_prepared` for a new model.

    Args:
        order: whether model and optimizer are prepared ``together``, or the model ``first``.
        no_sync: whose method ``no_sync`` is called, of the ``accelerator`` or of the ``model``.
    """
    accelerator = fresh_accelerator(config)
    model = MODELS[name]()
    if accelerator.process_index != 0:
        # Only rank 0 has weights, so that the test fails unless the other ranks receive them.
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(float("nan"))
    if order == "together":
        model, optimizer = accelerator.prepare(model, optimizer_of(model))
    else:
        model = accelerator.prepare(model)
        optimizer = accelerator.prepare(optimizer_of(model))
    without_sync = model.no_sync if no_sync == "model" else partial(accelerator.no_sync, model)
    return train_prepared(accelerator, model, optimizer, name, num_steps, accumulation, without_sync)


def train_prepared(
    accelerator: Any,
    model: nn.Module,
    optimizer: Any,
    name: str,
    num_steps: int,
    accumulation: int = 1,
    without_sync: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> dict[str, Any]:
    """The results of :func:`reference`, the report, and the dtypes in which the optimizer updates parameters."""
    rank, world_size = accelerator.process_index, accelerator.num_processes
    losses, norms = [], []
    for step in range(num_steps):
        total = torch.zeros((), device=accelerator.device)
        for index in range(accumulation):
            with nullcontext() if index == accumulation - 1 else without_sync():
                part = loss_of(model, name, step, rank * accumulation + index, world_size * accumulation)
                accelerator.backward(part / accumulation)
            total += part.detach().float() / accumulation
        norms.append(accelerator.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        losses.append(total.item() / world_size)
    return {
        "losses": losses,
        "norms": norms,
        "weights": {key: value.cpu() for key, value in accelerator.get_state_dict(model).items()},
        "report": hfp.report(accelerator).to_json(),
        "masters": {str(p.dtype) for group in optimizer.param_groups for p in group["params"]},
    }


def prepare_different_models() -> list[str]:
    """Prepare a model with a different number of layers on each rank. Returns the codes of the problems."""
    accelerator = fresh_accelerator(parallel_config("full_shard", 2, dist.get_world_size()))
    try:
        accelerator.prepare(tiny_llama(layers=2 + accelerator.process_index))
    except hfp.SpecError as error:
        return [problem.code for problem in error.problems]
    return []


def count_process_groups(config: dict[str, Any], num_models: int) -> list[int]:
    """Prepare models one after the other. Returns the number of process groups after each."""
    counts = []
    for _ in range(num_models):
        fresh_accelerator(config).prepare(tiny_llama())
        counts.append(len(dist.distributed_c10d._world.pg_map))
    return counts


def timeouts_of_new_mesh() -> list[float]:
    """Time-outs in seconds of the default process group, of a new group, and of the groups of a new mesh."""
    world = dist.get_world_size()
    before = timeout_of()
    set_timeout(timedelta(seconds=77))
    try:
        mesh = _Meshes().get("cpu", {"dp_replicate": world, "dp_shard": 1})
        groups = [None, dist.new_group(range(world)), *mesh.get_all_groups()]
        return [timeout_of(group).total_seconds() for group in groups]
    finally:
        set_timeout(before)


def assert_same_training(run: dict[str, Any], expected: dict[str, Any], relative: float = RELATIVE) -> None:
    """Compare losses, gradient norms and final weights."""
    assert run["losses"] == pytest.approx(expected["losses"], rel=relative)
    assert run["norms"] == pytest.approx(expected["norms"], rel=relative)
    assert_same_weights(run["weights"], expected["weights"], relative)


def assert_same_weights(weights: dict[str, Any], expected: dict[str, Any], relative: float = RELATIVE) -> None:
    """Compare whole tensors, because elements near zero have no relative accuracy in fp32."""
    assert weights.keys() == expected.keys()
    for name, weight in expected.items():
        assert weights[name].dtype == weight.dtype
        if name.endswith("key.bias"):
            # The softmax cancels this bias: its gradient is zero, and Adam scales rounding errors up to full steps.
            continue
        assert (weights[name] - weight).norm() <= relative * weight.norm().clamp(min=1e-3), name


def differing(report: dict[str, Any]) -> list[str]:
    """The settings that differ from the requested ones."""
    return [row["setting"] for row in report["settings"] if row["status"] == "differs"]


def resume_with_default_device(folder: str, config: dict[str, Any]) -> tuple[list[float], list[float]]:
    """Train, save and resume while tensors are made on the device by default. Returns the losses before and after."""
    path = Path(folder)
    if dist.get_rank() == 0:
        MODELS["llama"]().save_pretrained(path / "model")
    dist.barrier()
    torch.set_default_device(own_device())
    try:
        accelerator = fresh_accelerator(config)
        model = type(MODELS["llama"]()).from_pretrained(path / "model")
        model, optimizer = accelerator.prepare(model, adamw(model))
        train_prepared(accelerator, model, optimizer, "llama", 2)
        accelerator.save_state(str(path / "checkpoint"))
        first = train_prepared(accelerator, model, optimizer, "llama", 2)
        accelerator.load_state(str(path / "checkpoint"))
        again = train_prepared(accelerator, model, optimizer, "llama", 2)
        return first["losses"], again["losses"]
    finally:
        torch.set_default_device(None)
