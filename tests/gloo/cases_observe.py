"""Run on ranks: shard a tiny model, by the plan or by hand, train one step and report it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from tiny import MODELS, global_batch, my_part
from torch import nn

from hf_fsdp_plugin import load_spec, resolve
from hf_fsdp_plugin.backends.shard import shard
from hf_fsdp_plugin.integrations.report import report
from hf_fsdp_plugin.integrations.run_report import report_run
from hf_fsdp_plugin.observe.build import build_report
from hf_fsdp_plugin.observe.first_step import record_first_step
from hf_fsdp_plugin.observe.report import BatchShape, Report
from hf_fsdp_plugin.observe.units import observe_units
from hf_fsdp_plugin.plan.model import FsdpPlan

CPU = torch.device("cpu")


def make(name: str, config: dict[str, Any]) -> tuple[nn.Module, FsdpPlan]:
    model = MODELS[name]()
    return model, resolve(load_spec(config, environ={}), model, world_size=dist.get_world_size())


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    batch = my_part(global_batch(0), dist.get_rank(), dist.get_world_size())
    model(**batch).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def planned(config: dict[str, Any], name: str = "llama", steps: int = 1) -> dict[str, Any]:
    """Shard and train a model; return the report of this rank and its text."""
    model, plan = make(name, config)
    return _trained(shard(plan, model, CPU), plan, steps)


def unlike_the_plan(config: dict[str, Any], ran: dict[str, Any]) -> dict[str, Any]:
    """Shard a model by one config, and compare it with the plan of another."""
    _, plan = make("llama", config)
    other = MODELS["llama"]()
    really = resolve(load_spec(ran, environ={}), other, world_size=dist.get_world_size())
    return _trained(shard(really, other, CPU), plan, 1)


def not_sharded(config: dict[str, Any]) -> dict[str, Any]:
    """Train with plain data parallel, as Accelerate does on CPU ranks without the plugin."""
    model, plan = make("llama", config)
    return _trained(nn.parallel.DistributedDataParallel(model), plan, 1)


def changed_after_sharding(config: dict[str, Any], how: str) -> dict[str, Any]:
    """Shard a model as planned, then change the live model."""
    model, plan = make("llama", config)
    sharded = shard(plan, model, CPU)
    if how == "half":
        sharded.to(torch.bfloat16)
    else:
        with torch.no_grad():
            CHANGES[how](sharded)
    return _summary(build_report(sharded, plan))


def _keep_gathered(model: Any) -> None:
    model.model.layers[0].set_reshard_after_forward(False)


def _change_buffer_on_last_rank(model: Any) -> None:
    if dist.get_rank() == dist.get_world_size() - 1:
        model.model.rotary_emb.inv_freq.add_(1.0)


def _change_weights_on_last_rank(model: Any) -> None:
    if dist.get_rank() == dist.get_world_size() - 1:
        next(model.parameters()).to_local().add_(1.0)


CHANGES: dict[str, Callable[[Any], None]] = {
    "reshard": _keep_gathered,
    "buffer": _change_buffer_on_last_rank,
    "weights": _change_weights_on_last_rank,
}


def before_and_after_first_forward(config: dict[str, Any]) -> list[list[dict[str, Any]]]:
    model, plan = make("llama", config)
    sharded = shard(plan, model, CPU)
    before = [unit.to_json() for unit in observe_units(sharded)]
    step(sharded, torch.optim.SGD(sharded.parameters(), lr=0.1))
    return [before, [unit.to_json() for unit in observe_units(sharded)]]


def gradient_sources(config: dict[str, Any]) -> list[tuple[int, str]]:
    """Return gradient bytes and their source: before any backward, after a backward, and after ``zero_grad``."""
    model, plan = make("llama", config)
    sharded = shard(plan, model, CPU)
    optimizer = torch.optim.AdamW(sharded.parameters())
    observed = [build_report(sharded, plan).memory]
    record_first_step(sharded, optimizer)
    batch = my_part(global_batch(0), dist.get_rank(), dist.get_world_size())
    sharded(**batch).loss.backward()
    observed.append(build_report(sharded, plan).memory)
    optimizer.step()
    optimizer.zero_grad()
    observed.append(build_report(sharded, plan).memory)
    return [(memory.grads_bytes, memory.grads_source) for memory in observed]


def wrapped_by_hand(version: int) -> list[dict[str, Any]]:
    """Shard the layers with torch alone, without a root, as observation must not depend on our backends."""
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, fully_shard

    model = MODELS["llama"]()
    layers: Any = model.model.layers
    for index, layer in enumerate(layers):
        if version == 1:
            low = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            layers[index] = FullyShardedDataParallel(layer, device_id=CPU, mixed_precision=low)
        else:
            fully_shard(layer)
    return [unit.to_json() for unit in observe_units(model)]


def public_report(subject: str, config: dict[str, Any]) -> dict[str, Any]:
    model, plan = make("llama", config)
    if subject == "unprepared":
        return _summary(report(model))
    sharded = shard(plan, model, CPU)
    return _summary(report(sharded))


def written(config: dict[str, Any], path: str) -> str | None:
    model, plan = make("llama", config)
    file = build_report(shard(plan, model, CPU), plan).write(Path(path))
    return None if file is None else str(file)


def unreadable_on_one_rank(config: dict[str, Any]) -> str:
    model, plan = make("llama", config)
    sharded = shard(plan, model, CPU)
    unreadable: Any = object() if dist.get_rank() == 1 else sharded
    try:
        build_report(unreadable, plan)
    except ValueError as error:
        return str(error)
    return "no error"


def unwritable_report(config: dict[str, Any]) -> str:
    """End a run whose report cannot be written, then take part in another collective."""
    model, plan = make("llama", config)
    sharded = shard(plan, model, CPU)
    accelerator = SimpleNamespace(_models=[sharded], _optimizers=[], _dataloaders=[], state=None)
    report_run(accelerator, output_dir="/dev/null/no/folder")
    dist.barrier()
    return "done"


def _trained(model: nn.Module, plan: FsdpPlan, steps: int) -> dict[str, Any]:
    optimizer = torch.optim.AdamW(model.parameters())
    record_first_step(model, optimizer)
    for _ in range(steps):
        step(model, optimizer)
    return _summary(
        build_report(model, plan, optimizer=optimizer, batch=BatchShape(per_device=4, accumulation=2, seq_len=12))
    )


def _summary(found: Report) -> dict[str, Any]:
    return {**found.to_json(), "text": str(found)}
