"""Cases for ranks: an Accelerate training loop with a config, and the same steps in one process."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from tiny import GLOBAL_BATCH, MODELS, NUM_STEPS, global_batch, my_part

import hf_fsdp_plugin as hfp

LEARNING_RATE = 1e-3
MAX_NORM = 0.5


def fresh_accelerator(config: dict[str, Any], **kwargs: Any) -> Any:
    """A new Accelerator in a process that has created others."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    return hfp.accelerator(hfp.load_spec(config, environ={}), **kwargs)


def reference(model_name: str, steps: int = NUM_STEPS) -> dict[str, Any]:
    """Losses, gradient norms and final weights of one process on the global batches."""
    model = MODELS[model_name]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    losses, norms = [], []
    for step in range(steps):
        loss = model(**global_batch(step)).loss
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {"losses": losses, "norms": norms, "weights": dict(model.state_dict())}


def train(
    model_name: str, config: dict[str, Any], steps: int = NUM_STEPS, accumulation: int = 1, order: str = "together"
) -> dict[str, Any]:
    """The results of :func:`reference` on all ranks.

    Args:
        order: whether model and optimizer are prepared ``together``, or the model ``first``.
    """
    accelerator = fresh_accelerator(config)
    rank, world_size = accelerator.process_index, accelerator.num_processes
    model = MODELS[model_name]()
    if rank != 0:
        # Only rank 0 has weights, so that the test fails unless the other ranks receive them.
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(float("nan"))
    if order == "together":
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
        model, optimizer = accelerator.prepare(model, optimizer)
    else:
        model = accelerator.prepare(model)
        optimizer = accelerator.prepare(torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE))
    losses, norms = [], []
    for step in range(steps):
        batch = my_part(global_batch(step), rank, world_size)
        micro_batches = [my_part(batch, i, accumulation) for i in range(accumulation)]
        total = torch.zeros(())
        for index, micro_batch in enumerate(micro_batches):
            with nullcontext() if index == accumulation - 1 else accelerator.no_sync(model):
                loss = model(**micro_batch).loss / accumulation
                accelerator.backward(loss)
            total += loss.detach().float()
        norm = accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
        norms.append(float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm))
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        losses.append(total.item() / world_size)
    weights = accelerator.get_state_dict(model)
    report = hfp.report(accelerator).to_json()
    return {"losses": losses, "norms": norms, "weights": weights if rank == 0 else {}, "report": report}


def prepare_different_models() -> list[str]:
    """Prepare a model with a different number of layers on each rank. Returns the codes of the problems."""
    from tiny import tiny_llama

    accelerator = fresh_accelerator(
        {
            "distributed_type": "FSDP",
            "use_cpu": True,
            "fsdp_config": {"fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"},
        }
    )
    try:
        accelerator.prepare(tiny_llama(layers=2 + accelerator.process_index))
    except hfp.SpecError as error:
        return [problem.code for problem in error.problems]
    return []


def train_ddp_bf16(model_name: str, steps: int = NUM_STEPS) -> list[float]:
    """Losses of DDP under bf16 autocast, as a reference for bf16."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = torch.nn.parallel.DistributedDataParallel(MODELS[model_name]())
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    losses = []
    for step in range(steps):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(**my_part(global_batch(step), rank, world_size)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().float()
        dist.all_reduce(total)
        losses.append(total.item() / world_size)
    return losses


assert GLOBAL_BATCH % 8 == 0, "four ranks with two micro-batches share a global batch evenly"
