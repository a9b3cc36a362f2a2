"""Cases that ranks run: models that ``from_pretrained(distributed_config=…)`` shards while it loads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.support.tiny import GLOBAL_BATCH
from tests.support.trainer_runs import Batches, gathered, losses, make_trainer

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
    # Without a config, settings with axes would divide the model again. With those of cpu_ram_efficient_loading, the
    # other ranks load no values.
    loaded = AutoModelForCausalLM.from_pretrained(exported, distributed_config=None)
    return {
        "losses": losses(trainer),
        "norms": norms(trainer),
        "weights": gathered(trainer),
        "exported": {name: value for name, value in loaded.state_dict().items() if not value.is_meta},
        "report": json.loads((Path(output_dir) / "fsdp_report.json").read_text()),
    }
