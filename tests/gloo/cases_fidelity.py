"""Cases that ranks run: train one step with settings as users write them, and report the model."""

from __future__ import annotations

from typing import Any

import torch

import hf_fsdp_plugin as hfp
from tests.gloo.cases_trainer import make_trainer
from tests.support.ranks import on_accelerator
from tests.support.tiny import MODELS, global_batch, my_part


def report_of_file(path: str, model_name: str = "llama") -> dict[str, Any]:
    """Return the report of an Accelerate loop with a config file, and its loss.

    The number of processes in the file is overridden.
    """
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    overrides = (f"launch.num_processes={world_size}", f"launch.use_cpu={not on_accelerator()}".lower())
    accelerator = hfp.accelerator(hfp.load_spec(path, overrides=overrides, environ={}))
    model = MODELS[model_name]()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    loss = model(**my_part(global_batch(0), rank, accelerator.num_processes)).loss
    accelerator.backward(loss)
    optimizer.step()
    report = hfp.report(accelerator).to_json()
    return {**report, "loss_dtype": str(loss.dtype), "loss": loss.item()}


def report_of_arguments(output_dir: str, **arguments: Any) -> dict[str, Any]:
    """Return the report of a Trainer with these TrainingArguments."""
    trainer = make_trainer(output_dir, max_steps=1, **arguments)
    trainer.train()
    return hfp.report(trainer).to_json()
