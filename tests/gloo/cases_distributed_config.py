"""Cases that ranks run: models that ``from_pretrained(distributed_config=…)`` shards while it loads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import hf_fsdp_plugin as hfp
from tests.gloo.cases_trainer import Batches, gathered, losses, make_trainer
from tests.support.ranks import on_accelerator, reset_accelerate
from tests.support.tiny import GLOBAL_BATCH
from tests.support.training import train_prepared

PLAIN = {"max_grad_norm": 0.5, "learning_rate": 1e-3, "max_steps": 6, "seed": 3}


def load(folder: str, *, dtype: torch.dtype = torch.float32, **fields: Any) -> Any:
    """A model of the folder, sharded by ``from_pretrained``."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, distributed_config=fields, dtype=dtype)


def with_adapters(model: Any) -> Any:
    """The model, frozen, with LoRA adapters that have the same weights in every call."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(5)
    return get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], lora_dropout=0.0))


def norms(trainer: Any) -> list[float]:
    return [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]


def own_optimizers(model: Any) -> tuple[Any, Any]:
    """An optimizer and a scheduler that the Trainer would not create."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer, factor=0.5, total_iters=3)


def one_process(
    folder: str, output_dir: str, *, adapters: bool = False, own: bool = False, **arguments: Any
) -> dict[str, Any]:
    """Losses, gradient norms and weights of a stock Trainer in one process, on the same global batches."""
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

    args = TrainingArguments(
        output_dir=output_dir, per_device_train_batch_size=GLOBAL_BATCH, logging_steps=1, report_to="none",
        disable_tqdm=True, use_cpu=True, save_strategy="no", **{**PLAIN, **arguments},
    )  # fmt: skip
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if adapters:
        model = with_adapters(model)
    optimizers = own_optimizers(model) if own else (None, None)
    trainer = Trainer(model=model, args=args, train_dataset=Batches(6), optimizers=optimizers)
    trainer.train()
    return {"losses": losses(trainer), "norms": norms(trainer), "weights": dict(model.state_dict())}


def train(
    folder: str, output_dir: str, fields: dict[str, Any], *, own: bool = False, **arguments: Any
) -> dict[str, Any]:
    """Train six steps through the Trainer, save every third step and export the model."""
    arguments = {"save_strategy": "steps", "save_steps": 3, **PLAIN, **arguments}
    model = load(folder, **fields)
    trainer = make_trainer(output_dir, model, optimizers=own_optimizers(model) if own else (None, None), **arguments)
    trainer.train()
    return exported_results(trainer, output_dir)


def exported_results(trainer: Any, output_dir: str) -> dict[str, Any]:
    """Export the model, and return what was trained, with the weights that Transformers loads from the export."""
    from transformers import AutoModelForCausalLM

    exported = str(Path(output_dir) / "exported")
    trainer.save_model(exported)
    dist.barrier()
    return {
        "losses": losses(trainer),
        "norms": norms(trainer),
        "weights": gathered(trainer),
        # Without a config, settings with axes would divide the model again.
        "exported": dict(AutoModelForCausalLM.from_pretrained(exported, distributed_config=None).state_dict()),
        "report": json.loads((Path(output_dir) / "fsdp_report.json").read_text()),
    }


def resume(folder: str, output_dir: str, fields: dict[str, Any] | None, **arguments: Any) -> dict[str, Any]:
    """Continue from the checkpoint at step 3, with a model that is sharded at load, or by the plan without fields."""
    arguments = {**PLAIN, **arguments}
    model = load(folder, **fields) if fields else "llama"
    if not fields:
        arguments |= {"fsdp": "full_shard auto_wrap", "fsdp_config": {"version": 2}}
    trainer = make_trainer(output_dir, model=model, **arguments)
    trainer.train(resume_from_checkpoint=str(Path(output_dir) / "checkpoint-3"))
    return {"losses": losses(trainer), "weights": gathered(trainer)}


def accelerate(folder: str, output_dir: str, fields: dict[str, Any], num_steps: int = 4) -> dict[str, Any]:
    """Train with a plain Accelerator after ``install()``, save, load again and train the same steps once more."""
    from accelerate import Accelerator
    from transformers import AutoModelForCausalLM

    reset_accelerate()
    hfp.install({})
    accelerator = Accelerator(cpu=not on_accelerator())
    model = load(folder, **fields)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    accelerator.save_state(output_dir)
    first = train_prepared(accelerator, model, optimizer, "llama", num_steps)
    exported = str(Path(output_dir) / "exported")
    accelerator.save_model(model, exported)
    dist.barrier()
    accelerator.load_state(output_dir)
    again = train_prepared(accelerator, model, optimizer, "llama", num_steps)
    loaded = dict(AutoModelForCausalLM.from_pretrained(exported).state_dict())
    return {**first, "again": again["losses"], "exported": loaded}


def train_only(folder: str, output_dir: str, fields: dict[str, Any], dtype: str, **arguments: Any) -> dict[str, Any]:
    """Train with a model of some dtype. Also returns the dtypes that the optimizer updates."""
    model = load(folder, dtype=getattr(torch, dtype), **fields)
    trainer = make_trainer(output_dir, model=model, **{**PLAIN, **arguments})
    trainer.train()
    return {
        "losses": losses(trainer),
        "masters": {str(p.dtype) for group in trainer.optimizer.param_groups for p in group["params"]},
        "report": json.loads((Path(output_dir) / "fsdp_report.json").read_text()),
    }


def train_adapters(folder: str, output_dir: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Train LoRA adapters that were added to the sharded model, and resume from the third step."""
    arguments: dict[str, Any] = {**PLAIN, "save_strategy": "steps", "save_steps": 3}
    trainer = make_trainer(output_dir, model=with_adapters(load(folder, **fields)), **arguments)
    trainer.train()
    again = make_trainer(output_dir, model=with_adapters(load(folder, **fields)), **arguments)
    again.train(resume_from_checkpoint=str(Path(output_dir) / "checkpoint-3"))
    return {
        "losses": losses(trainer),
        "norms": norms(trainer),
        "resumed": losses(again),
        "adapters": {name: p.detach().clone() for name, p in trainer.model.named_parameters() if "lora_" in name},
    }


def used_before_prepare(folder: str, fields: dict[str, Any], num_steps: int = 3) -> dict[str, Any]:
    """Compute a loss and create the optimizer before ``prepare``, as scripts do."""
    from accelerate import Accelerator

    from tests.support.tiny import global_batch

    reset_accelerate()
    hfp.install({})
    accelerator = Accelerator(cpu=not on_accelerator())
    model = load(folder, **fields)
    with torch.no_grad():
        model(**global_batch(0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    return train_prepared(accelerator, model, optimizer, "llama", num_steps)


def refused_loads(folder: str) -> dict[str, str]:
    """The messages of ``from_pretrained`` after ``install()``, for configs that do not fit."""
    from transformers import AutoModelForCausalLM

    hfp.install({})
    messages = {}
    for name, kwargs in {
        "device_map": {"distributed_config": {"fsdp_size": 2}, "device_map": "auto"},
        "misspelled": {"distributed_config": {"fsdp_szie": 2}},
        "world size": {"distributed_config": {"fsdp_size": 4}},
    }.items():
        try:
            AutoModelForCausalLM.from_pretrained(folder, **kwargs)
        except Exception as error:
            messages[name] = str(error)
    return messages
