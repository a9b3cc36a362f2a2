"""Optimizers by name, and cases in which ranks train, save and resume with them."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import Trainer, TrainingArguments

import hf_fsdp_plugin as hfp
from tests.support.tiny import GLOBAL_BATCH, MODELS
from tests.support.trainer_runs import Batches

NUM_STEPS = 10


def _eager(name: str) -> Any:
    """Run torchao's compiled step eagerly: the compiler takes seconds per shape, and leaves threads behind."""
    return torch.compiler.set_stance("force_eager") if name.startswith("torchao") else nullcontext()


def train_with_trainer(
    output_dir: str, optim: str, fsdp: dict[str, Any] | None, *, resume: bool = False, decay_all: bool = False
) -> Any:
    """Train with a Trainer that creates the optimizer ``optim``, and save at step 5, or resume there.

    Args:
        fsdp: the ``fsdp_config``; ``None`` for transformers' own Trainer in one process.
        decay_all: whether weight decay applies to biases and norms too, as in flat parameters.

    Returns:
        The losses by step, and the codes of the problems, or the type of another error.
    """
    arguments: dict[str, Any] = {
        "output_dir": output_dir, "optim": optim, "learning_rate": 1e-3, "weight_decay": 0.01, "max_steps": NUM_STEPS,
        "per_device_train_batch_size": GLOBAL_BATCH // dist.get_world_size(), "logging_steps": 1, "report_to": "none",
        "disable_tqdm": True, "use_cpu": True, "seed": 3, "save_strategy": "steps" if fsdp else "no", "save_steps": 5,
    }  # fmt: skip
    if optim.startswith(("galore", "apollo")):
        arguments |= {"optim_target_modules": "all-linear", "optim_args": "rank=4,update_proj_gap=4"}
    model, data = MODELS["small-llama"](), Batches(6)
    trainer: Any = None
    try:
        if fsdp is None:
            trainer = Trainer(model=model, args=TrainingArguments(**arguments), train_dataset=data)
            if decay_all:
                trainer.get_decay_parameter_names = lambda model: [name for name, _ in model.named_parameters()]
        else:
            args = hfp.FsdpTrainingArguments(fsdp="auto_wrap", fsdp_config=fsdp, **arguments)
            trainer = hfp.FsdpTrainer(model=model, args=args, train_dataset=data)
        with _eager("torchao" if "torch_" in optim else ""):
            trainer.train(resume_from_checkpoint=str(Path(output_dir) / "checkpoint-5") if resume else None)
    except hfp.SpecError as error:
        return {"losses": {}, "result": sorted({problem.code for problem in error.problems})}
    except Exception as error:
        return {"losses": {}, "result": f"{type(error).__name__}: {error}"}
    losses = {entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry}
    return {"losses": losses, "result": []}
