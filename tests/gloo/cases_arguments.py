"""Cases that ranks run: arguments that a script passes to ``Accelerator`` and ``TrainingArguments`` in Python."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from cases_trainer import make_trainer
from ranks import reset_accelerate
from tiny import MODELS
from training import adamw, train_prepared

import hf_fsdp_plugin as hfp
from hf_fsdp_plugin.problems import SpecError

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
