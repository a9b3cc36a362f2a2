"""Cases that ranks run: train steps and count the collectives of the last one, beside those that are estimated."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from typing import Any

from hf_fsdp_plugin.backends.sharding.shard import plan_of
from hf_fsdp_plugin.plan.fsdp_plan import FsdpPlan
from hf_fsdp_plugin.tools.plan.estimate.time import estimate_communication
from hf_fsdp_plugin.tools.plan.estimate.types import Collective, Workload
from tests.gloo.collective_counter import CollectiveCounter
from tests.support.tiny import MODELS
from tests.support.training import MAX_NORM, fresh_accelerator, loss_of, sgd

Calls = Counter[tuple[str, tuple[int, ...], int, str]]


def counted_and_estimated(
    name: str,
    config: dict[str, Any],
    *,
    accumulation: int = 1,
    sync_each_batch: bool = False,
    clip_norm: bool = True,
    training_arguments: dict[str, Any] | None = None,
) -> tuple[Calls, Calls]:
    """The collectives of the second step of a real training, and the estimated ones."""
    accelerator = fresh_accelerator(config, **(training_arguments or {}))
    planned = MODELS[name]()
    model = MODELS[name]()
    if training_arguments:
        model.gradient_checkpointing_enable()  # type: ignore[operator]
    model, optimizer = accelerator.prepare(model, sgd(model))
    counter = CollectiveCounter()
    rank, world_size = accelerator.process_index, accelerator.num_processes
    for step in range(2):
        with counter if step == 1 else nullcontext():
            for index in range(accumulation):
                syncs = sync_each_batch or index == accumulation - 1
                with nullcontext() if syncs else accelerator.no_sync(model):
                    with counter.during("forward"):
                        loss = loss_of(model, name, step, rank * accumulation + index, world_size * accumulation)
                    with counter.during("backward"):
                        accelerator.backward(loss)
            if clip_norm:
                with counter.during("clipping"):
                    accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
            with counter.during("update"):
                optimizer.step()
                optimizer.zero_grad()
    workload = Workload(
        micro_batch=1, seq_len=12, accumulation=accumulation, sync_each_batch=sync_each_batch, clip_norm=clip_norm
    )
    plan = plan_of(model)
    assert plan is not None
    expected: Calls = Counter()
    for call in estimate_communication(plan, planned, workload):
        expected[call.kind, _ranks(plan, call, rank), call.bytes, call.phase] += call.calls
    return counter.calls, expected


def _ranks(plan: FsdpPlan, call: Collective, rank: int) -> tuple[int, ...]:
    """The ranks that take part in a call, as the mesh arranges them."""
    if call.axis == "world":
        ranks = range(plan.world_size)
    elif call.axis == "shard":
        first = rank - rank % plan.mesh.shard
        ranks = range(first, first + plan.mesh.shard)
    else:
        ranks = range(rank % plan.mesh.shard, plan.world_size, plan.mesh.shard)
    assert len(ranks) == call.group_size
    return tuple(ranks)
