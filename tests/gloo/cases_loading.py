"""Cases that ranks run: ``from_pretrained`` where only rank 0 reads the weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist
from cases_families import clones, sgd, train_steps
from cases_trainer import losses
from model_families import FAMILIES, without_dropout
from training import fresh_accelerator

import hf_fsdp_plugin as hfp
from hf_fsdp_plugin.backends.load import BROADCAST_ATTRIBUTE
from hf_fsdp_plugin.plan.names import unwrapped


def save_plain(family: str, folder: str) -> None:
    """Save the model on rank 0."""
    if dist.get_rank() == 0:
        FAMILIES[family].build().save_pretrained(folder)
    dist.barrier()


def save_both_names(folder: str, equal: bool) -> None:
    """Save a tied model with the weight under both names, as other tools do."""
    from safetensors.torch import load_file, save_file

    save_plain("llama-tied", folder)
    if dist.get_rank() == 0:
        path = Path(folder) / "model.safetensors"
        weights = load_file(path)
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"] * (1.0 if equal else 2.0)
        save_file(weights, path, metadata={"format": "pt"})
    dist.barrier()


def load_and_train(family: str, folder: str, config: dict[str, Any], dtype: str = "float32") -> dict[str, Any]:
    """Load, train some steps, and return what this rank has after loading and after each step."""
    accelerator = fresh_accelerator(config)
    model = FAMILIES[family].model.from_pretrained(folder, dtype=dtype)
    model.config.use_cache = False
    without_dropout(model)
    on_meta = [parameter.is_meta for parameter in model.parameters()]
    model, optimizer = accelerator.prepare(model.train(), sgd(model))
    return {
        "steps": train_steps(accelerator, family, model, optimizer),
        "weights": clones(accelerator.get_state_dict(model)),
        "report": hfp.report(accelerator).to_json(),
        "on_meta": sum(on_meta),
        "num_parameters": len(on_meta),
        "num_filled": getattr(getattr(model, BROADCAST_ATTRIBUTE, None), "num_filled", 0),
        "buffers": clones(dict(unwrapped(model).named_buffers())),
    }


def load_and_train_with_trainer(family: str, folder: str, output_dir: str, **fsdp_config: Any) -> dict[str, Any]:
    """Create the arguments, load the model, then train it with the Trainer."""
    args = hfp.FsdpTrainingArguments(
        output_dir=output_dir, fsdp="full_shard auto_wrap", fsdp_config=fsdp_config, use_cpu=True, max_steps=2,
        per_device_train_batch_size=2, report_to="none", disable_tqdm=True, logging_steps=1, save_strategy="no",
    )  # fmt: skip
    model = FAMILIES[family].model.from_pretrained(folder)
    on_meta = sum(parameter.is_meta for parameter in model.parameters())
    rows = [{k: v[i] for k, v in FAMILIES[family].batch(s).items()} for s in range(4) for i in range(4)]
    trainer = hfp.FsdpTrainer(model=model, args=args, train_dataset=rows)
    trainer.train()
    return {"on_meta": on_meta, "losses": losses(trainer), "report": hfp.report(trainer).to_json()}
