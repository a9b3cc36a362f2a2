"""Cases that ranks run: shard a tiny model, by the plan or by hand, train one step and report it."""

from __future__ import annotations

import gc
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hf_fsdp_plugin import load_spec, report, resolve
from hf_fsdp_plugin.backends.sharding.shard import shard
from hf_fsdp_plugin.integrations.run_report import RunReporter, report_run
from hf_fsdp_plugin.observe import weights
from hf_fsdp_plugin.observe.first_step import record_first_step
from hf_fsdp_plugin.observe.report import BatchShape, Report
from hf_fsdp_plugin.observe.report_builder import build_report
from hf_fsdp_plugin.observe.units import observe_units
from hf_fsdp_plugin.plan.fsdp_plan import FsdpPlan
from tests.support.ranks import own_device
from tests.support.tiny import MODELS, global_batch, my_part
from tests.support.training import fresh_accelerator


def make(config: dict[str, Any], name: str = "llama") -> tuple[nn.Module, FsdpPlan]:
    model = MODELS[name]()
    return model, resolve(
        load_spec(config, environ={}), model, world_size=dist.get_world_size(), device_type=own_device().type
    )


def make_sharded(config: dict[str, Any], name: str = "llama") -> tuple[Any, FsdpPlan]:
    model, plan = make(config, name)
    return shard(plan, model, own_device()), plan


def backward(model: nn.Module) -> None:
    model(**my_part(global_batch(0), dist.get_rank(), dist.get_world_size())).loss.backward()


def report_of_trained(model: nn.Module, plan: FsdpPlan) -> dict[str, Any]:
    """Train one step; return the report of this rank and its text."""
    optimizer = torch.optim.AdamW(model.parameters())
    record_first_step(model, optimizer)
    backward(model)
    optimizer.step()
    optimizer.zero_grad()
    batch = BatchShape(per_device=4, accumulation=2, seq_len=12)
    return to_json(build_report(model, plan, optimizers=[optimizer], batch=batch))


def to_json(found: Report) -> dict[str, Any]:
    return {**found.to_json(), "text": str(found)}


def planned(config: dict[str, Any], name: str = "llama") -> dict[str, Any]:
    return report_of_trained(*make_sharded(config, name))


def unlike_the_plan(config: dict[str, Any], ran: dict[str, Any]) -> dict[str, Any]:
    """Shard a model by the config ``ran``, and compare it with the plan of another config."""
    model, _ = make_sharded(ran)
    _, plan = make(config)
    return report_of_trained(model, plan)


def not_sharded(config: dict[str, Any]) -> dict[str, Any]:
    """Train with DistributedDataParallel, as Accelerate does on CPU ranks without the plugin."""
    model, plan = make(config)
    return report_of_trained(nn.parallel.DistributedDataParallel(model), plan)


def changed_after_sharding(config: dict[str, Any], how: str) -> dict[str, Any]:
    """Shard a model as planned, then change the live model, in two cases on the last rank only."""
    model, plan = make_sharded(config)
    is_last = dist.get_rank() == dist.get_world_size() - 1
    if how == "half":
        model.to(torch.bfloat16)
    elif how == "reshard":
        model.model.layers[0].set_reshard_after_forward(False)
    elif how == "buffer" and is_last:
        model.model.rotary_emb.inv_freq.add_(1.0)
    elif how == "weights" and is_last:
        next(model.parameters()).detach().to_local().add_(1.0)
    return to_json(build_report(model, plan))


def before_and_after_first_forward(config: dict[str, Any]) -> list[list[dict[str, Any]]]:
    model, _ = make_sharded(config)
    before = [unit.to_json() for unit in observe_units(model)]
    backward(model)
    return [before, [unit.to_json() for unit in observe_units(model)]]


def gradient_sources(config: dict[str, Any]) -> list[tuple[int, str]]:
    """Return gradient bytes and their source: before any backward, after a backward, and after ``zero_grad``."""
    model, plan = make_sharded(config)
    optimizer = torch.optim.AdamW(model.parameters())
    observed = [build_report(model, plan).memory]
    record_first_step(model, optimizer)
    backward(model)
    observed.append(build_report(model, plan).memory)
    optimizer.step()
    optimizer.zero_grad()
    observed.append(build_report(model, plan).memory)
    return [(memory["grads_bytes"], memory["grads_source"]) for memory in observed]


def wrapped_by_hand(version: int) -> list[dict[str, Any]]:
    """Shard the layers with torch alone, without a root: observation must not depend on the plugin's backends."""
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, fully_shard

    model = MODELS["llama"]()
    layers: Any = model.model.layers
    for index, layer in enumerate(layers):
        if version == 1:
            low = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            layers[index] = FullyShardedDataParallel(layer, device_id=own_device(), mixed_precision=low)
        else:
            fully_shard(layer)
    return [unit.to_json() for unit in observe_units(model)]


def written(config: dict[str, Any], path: str) -> str | None:
    """Write the public report of a model; return the path that it returns."""
    model, _ = make_sharded(config)
    file = report(model).write(Path(path))
    return None if file is None else str(file)


def report_at_exit(config: dict[str, Any], folder: str, deleted: int | None) -> str:
    """Report the runs of several live accelerators as at the end of a script. Returns what is printed to stderr.

    Args:
        deleted: number of an accelerator that rank 1 deletes before.
    """
    reporter = RunReporter()
    accelerators = []
    for number in range(5):
        accelerator = fresh_accelerator(config)
        accelerator.project_configuration.project_dir = f"{folder}/{number}"
        accelerator.prepare(nn.Linear(number + 2, 2))
        accelerators.append(accelerator)
        reporter.add_prepared(accelerator)
    del accelerator
    if deleted is not None and dist.get_rank() == 1:
        del accelerators[deleted]
        gc.collect()
    with redirect_stderr(StringIO()) as printed:
        reporter._at_exit()
    reporter.close()
    return printed.getvalue()


def unreadable_on_one_rank(config: dict[str, Any]) -> str:
    model, plan = make_sharded(config)
    unreadable: Any = object() if dist.get_rank() == 1 else model
    try:
        build_report(unreadable, plan)
    except ValueError as error:
        return str(error)
    return "no error"


def failing_report(config: dict[str, Any], folder: str) -> str:
    """End a run for whose report one rank has not enough memory, then take part in another collective."""
    checksum, model = weights._checksum, make_sharded(config)[0]
    accelerator = SimpleNamespace(_models=[model], _optimizers=[], _dataloaders=[], state=None)

    def out_of_memory(tensors: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    if dist.get_rank() == 1:
        weights._checksum = out_of_memory
    try:
        with redirect_stderr(StringIO()) as printed:
            report_run(accelerator, output_dir=folder)
    finally:
        weights._checksum = checksum
    dist.barrier()
    return printed.getvalue()


def unwritable_report(config: dict[str, Any]) -> str:
    """End a run whose report cannot be written, then take part in another collective."""
    model, _ = make_sharded(config)
    accelerator = SimpleNamespace(_models=[model], _optimizers=[], _dataloaders=[], state=None)
    report_run(accelerator, output_dir="/dev/null/no/folder")
    dist.barrier()
    return "done"
