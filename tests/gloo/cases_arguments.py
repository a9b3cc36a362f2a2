"""Cases that ranks run: arguments that a script passes to ``Accelerator`` and ``TrainingArguments`` in Python."""

from __future__ import annotations

import math
import os
from typing import Any

import torch
import torch.distributed as dist

import hf_fsdp_plugin as hfp
from hf_fsdp_plugin.problems import SpecError
from tests.gloo.cases_trainer import make_trainer
from tests.support.ranks import reset_accelerate
from tests.support.tiny import MODELS
from tests.support.training import adamw, loss_of, train_prepared

NUM_STEPS = 4


def mesh_of(**sizes: int) -> Any:
    from accelerate import ParallelismConfig

    return ParallelismConfig(**sizes)


def train_on_mesh(config: dict[str, Any], sizes: dict[str, int], entry: str) -> dict[str, Any]:
    """Train with ``install()`` and the sizes of a mesh from a script, and return what Accelerate has of the mesh, too.

    Args:
        entry: ``object``, ``object and plugin``, or ``variables``.
    """
    from accelerate import Accelerator
    from accelerate.utils import FullyShardedDataParallelPlugin

    reset_accelerate()
    variables = {f"PARALLELISM_CONFIG_{name.upper()}": str(size) for name, size in sizes.items()}
    if entry == "variables":
        os.environ.update({"ACCELERATE_USE_PARALLELISM_CONFIG": "true", **variables})
    hfp.install(config)
    given: dict[str, Any] = {} if entry == "variables" else {"parallelism_config": mesh_of(**sizes)}
    if entry == "object and plugin":
        given["fsdp_plugin"] = FullyShardedDataParallelPlugin(fsdp_version=config["fsdp_config"]["fsdp_version"])
    accelerator = Accelerator(**given)
    again = Accelerator()
    model = MODELS["llama"]()
    model, optimizer = accelerator.prepare(model, adamw(model))
    run = train_prepared(accelerator, model, optimizer, "llama", NUM_STEPS)
    loader = accelerator.prepare(torch.utils.data.DataLoader(torch.arange(8), batch_size=1))
    mesh = accelerator.torch_device_mesh
    for name in ("ACCELERATE_USE_PARALLELISM_CONFIG", *variables):
        os.environ.pop(name, None)
    return {
        **run,
        "mesh": None if mesh is None else (mesh["dp_replicate"].size(), mesh["dp_shard"].size()),
        "of second": (again.state.fsdp_plugin.spec.mesh.replicate, again.state.fsdp_plugin.spec.mesh.shard),
        "batches": [batch.item() for batch in loader],
    }


def train_on_mesh_of_arguments(output_dir: str, sizes: dict[str, int], version: int) -> dict[str, Any]:
    trainer = make_trainer(
        output_dir, max_steps=2, fsdp=True, fsdp_config={"version": version}, parallelism_config=mesh_of(**sizes)
    )
    trainer.train()
    return hfp.report(trainer).to_json()


def code_of_refusal(config: dict[str, Any], sizes: dict[str, int]) -> str:
    """Return the code with which an Accelerator with this mesh is refused, in the constructor or by ``prepare``."""
    from accelerate import Accelerator

    reset_accelerate()
    hfp.install(config)
    try:
        Accelerator(parallelism_config=mesh_of(**sizes)).prepare(MODELS["llama"]())
    except SpecError as error:
        return next(problem.code for problem in error.problems if problem.severity == "error")
    return ""


def report_of_arguments(output_dir: str, **arguments: Any) -> dict[str, Any]:
    """Return the report of a Trainer, and the backend with which its units are compiled."""
    trainer = make_trainer(output_dir, max_steps=1, fsdp=True, **arguments)
    trainer.train()
    dist.barrier()
    return {**hfp.report(trainer).to_json(), "dynamo": trainer.accelerator.state.dynamo_plugin.backend.value}


def arguments_of_library(config: dict[str, Any], folder: str) -> dict[str, Any]:
    """Return what Accelerate makes of arguments that are left to it, for a sharded model."""
    from accelerate.utils import DataLoaderConfiguration, GradientAccumulationPlugin, ProjectConfiguration

    accumulation = GradientAccumulationPlugin(num_steps=3)
    stepped, weights = _accumulate(_accelerator(config, gradient_accumulation_plugin=accumulation))
    separate, _ = _accumulate(_accelerator(config, gradient_accumulation_steps=3, step_scheduler_with_optimizer=False))
    loaders = {
        name: _batches(_accelerator(config, dataloader_config=DataLoaderConfiguration(**{name: value})))
        for name, value in {"split_batches": True, "dispatch_batches": True, "even_batches": False}.items()
    }
    non_blocking = _accelerator(config, dataloader_config=DataLoaderConfiguration(non_blocking=True))
    project = ProjectConfiguration(folder, automatic_checkpoint_naming=True, total_limit=2)
    accelerator = _accelerator(config, project_config=project)
    accelerator.prepare(MODELS["llama"]())
    for _ in range(3):
        accelerator.save_state()
    accelerator.wait_for_everyone()
    return {
        "weights": weights,
        "steps": {"with optimizer": stepped, "separate": separate},
        "batches": loaders,
        "non_blocking": non_blocking.prepare(_loader())._non_blocking,
        "checkpoints": sorted(os.listdir(f"{folder}/checkpoints")),
    }


def _accelerator(config: dict[str, Any], **arguments: Any) -> Any:
    from accelerate import Accelerator

    reset_accelerate()
    hfp.install(config)
    return Accelerator(**arguments)


def _accumulate(accelerator: Any) -> tuple[dict[str, int], dict[str, torch.Tensor]]:
    """Train with six batches. Returns the numbers of steps of optimizer and scheduler, and the weights."""
    model = MODELS["llama"]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    num_steps = 0
    for number in range(6):
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, "llama", number, accelerator.process_index, accelerator.num_processes))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            num_steps += accelerator.sync_gradients
    num_scheduled = round(math.log(scheduler.get_last_lr()[0] / 0.1, 0.9))
    return {"optimizer": num_steps, "scheduler": num_scheduled}, accelerator.get_state_dict(model)


def accumulated_reference() -> dict[str, torch.Tensor]:
    """The weights of :func:`_accumulate` in one process, whose scheduler steps twice after each optimizer step."""
    model = MODELS["llama"]().float()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(6):
        (loss_of(model, "llama", number) / 3).backward()
        if number % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
            optimizer.param_groups[0]["lr"] *= 0.9**2
    return dict(model.state_dict())


def _loader() -> Any:
    return torch.utils.data.DataLoader(torch.arange(10), batch_size=4)


def _batches(accelerator: Any) -> list[list[int]]:
    """Prepare a model and a loader of ten samples. Returns the batches of this rank."""
    _, loader = accelerator.prepare(MODELS["llama"](), _loader())
    return [batch.tolist() for batch in loader]
