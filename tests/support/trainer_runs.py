"""Cases that ranks run: Trainers with FSDP settings in their arguments."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

import hf_fsdp_plugin as hfp
from tests.support.tiny import GLOBAL_BATCH, MODELS, global_batch


class Batches(torch.utils.data.Dataset):
    """The sequences of ``num_batches`` global batches."""

    def __init__(self, num_batches: int) -> None:
        batches = [global_batch(step) for step in range(num_batches)]
        self.rows = [{key: value[i] for key, value in batch.items()} for batch in batches for i in range(GLOBAL_BATCH)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self.rows[index]


def make_trainer(
    output_dir: str,
    model: str | torch.nn.Module | None = "llama",
    callbacks: Any = (),
    optimizers: tuple[Any, Any] = (None, None),
    model_init: Any = None,
    trainer_class: Any = hfp.FsdpTrainer,
    **arguments: Any,
) -> Any:
    world_size = torch.distributed.get_world_size()
    defaults: dict[str, Any] = {
        "per_device_train_batch_size": GLOBAL_BATCH // world_size, "max_steps": 6, "learning_rate": 1e-3,
        "logging_steps": 1, "report_to": "none", "disable_tqdm": True, "use_cpu": True, "seed": 3,
        "save_strategy": "no", "lr_scheduler_type": "linear",
    }  # fmt: skip
    args = hfp.FsdpTrainingArguments(output_dir=output_dir, **{**defaults, **arguments})
    return trainer_class(
        model=MODELS[model]() if isinstance(model, str) else model,
        args=args,
        train_dataset=Batches(6),
        eval_dataset=Batches(1),
        callbacks=list(callbacks),
        optimizers=optimizers,
        model_init=model_init,
    )


def losses(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def gathered(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.accelerator.get_state_dict(trainer.model).items()}


def train_and_resume(output_dir: str, **arguments: Any) -> dict[str, Any]:
    """Train six steps without interruption, then again from the checkpoint at step 3."""
    arguments = {"save_strategy": "steps", "save_steps": 3, **arguments}
    whole = make_trainer(output_dir, **arguments)
    whole.train()
    resumed = make_trainer(output_dir, **arguments)
    checkpoint = Path(output_dir) / "checkpoint-3"
    resumed.train(resume_from_checkpoint=str(checkpoint))
    return {
        "whole": losses(whole),
        "resumed": losses(resumed),
        "files": sorted(path.name for path in checkpoint.iterdir()),
        "weights": (gathered(whole), gathered(resumed)),
        "report": json.loads((Path(output_dir) / "fsdp_report.json").read_text()),
    }
