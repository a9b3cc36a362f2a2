"""Cases that ranks run: TRL's Trainers with a reference model. A process without ranks runs them for reference too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import hf_fsdp_plugin as hfp
from tests.support.ranks import on_accelerator
from tests.support.tiny import tiny_llama

NUM_STEPS = 3
GLOBAL_BATCH = 4


def write_model(folder: str, model: Any = None) -> None:
    """Write a model, by default a llama, and a tokenizer of the words ``w0`` to ``w92``."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<eos>", "<unk>", *(f"w{i}" for i in range(93))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    ).save_pretrained(folder)
    model = model or tiny_llama(pad_token_id=0, eos_token_id=1, bos_token_id=None)
    model.save_pretrained(folder)


def reference_model() -> torch.nn.Module:
    """A llama with other weights than the trained one."""
    model = tiny_llama(pad_token_id=0, eos_token_id=1, bos_token_id=None)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
    return model


def text(seed: int, length: int) -> str:
    numbers = torch.randint(0, 93, (length,), generator=torch.Generator().manual_seed(seed))
    return " ".join(f"w{number}" for number in numbers.tolist())


def config_arguments(folder: str, world_size: int, **arguments: Any) -> dict[str, Any]:
    if on_accelerator():  # TRL asks for device_map="auto" in worlds of other devices than GPUs
        arguments = {"model_init_kwargs": {"device_map": None}, **arguments}
    return {
        "output_dir": f"{folder}/out", "per_device_train_batch_size": GLOBAL_BATCH // world_size,
        "max_steps": NUM_STEPS, "learning_rate": 1e-2, "logging_steps": 1, "report_to": "none", "disable_tqdm": True,
        "use_cpu": True, "bf16": False, "save_strategy": "no", "gradient_checkpointing": False, "seed": 3, **arguments,
    }  # fmt: skip


def lora() -> Any:
    from peft import LoraConfig

    return LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], lora_dropout=0.0, task_type="CAUSAL_LM")


def install(folder: str, config: dict[str, Any] | None) -> int:
    """Install the plugin if a config is given. Return the number of ranks that share each global batch."""
    if config is not None:
        hfp.install(config, report=f"{folder}/report.json")
    return dist.get_world_size() if dist.is_initialized() else 1


def result(trainer: Any, folder: str, config: dict[str, Any] | None) -> dict[str, Any]:
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    report = json.loads(Path(f"{folder}/report.json").read_text()) if config is not None else None
    return {"losses": losses, "report": report}


def train_dpo(folder: str, config: dict[str, Any] | None, how: str = "reference", **arguments: Any) -> dict[str, Any]:
    """Train with DPO.

    Args:
        config: ``None`` for a training without the plugin.
        how: where the reference probabilities are from: a ``reference`` model, ``path`` for the model's own first
            weights (``sync``: mixed with the trained weights after each step), or ``peft`` for disabled adapters.
    """
    world_size = install(folder, config)
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import DPOConfig, DPOTrainer

    rows = [
        {"prompt": text(i, 3), "chosen": text(100 + i, 4), "rejected": text(200 + i, 5)}
        for i in range(GLOBAL_BATCH * NUM_STEPS)
    ]
    if how == "sync":
        arguments = {"sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 0.5, **arguments}
    trainer = DPOTrainer(
        model=folder,
        ref_model=reference_model() if how == "reference" else None,
        args=DPOConfig(**config_arguments(folder, world_size, max_length=16, beta=0.5, **arguments)),
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(folder),
        peft_config=lora() if how == "peft" else None,
    )
    return result(trainer, folder, config)


def num_even(completions: list[str], **_: Any) -> list[float]:
    return [float(sum(int(word[1:]) % 2 == 0 for word in one.split() if word[1:].isdigit())) for one in completions]


def train_grpo(folder: str, config: dict[str, Any] | None, how: str = "path", **arguments: Any) -> dict[str, Any]:
    """Train with GRPO. The reference has the model's first weights (``path``), or disabled adapters (``peft``)."""
    world_size = install(folder, config)
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    trainer = GRPOTrainer(
        model=folder,
        reward_funcs=num_even,
        args=GRPOConfig(
            **config_arguments(
                folder, world_size, num_generations=2, max_completion_length=6, beta=0.5, num_iterations=2, **arguments
            )
        ),
        train_dataset=Dataset.from_list([{"prompt": text(i, 3)} for i in range(GLOBAL_BATCH * NUM_STEPS)]),
        processing_class=AutoTokenizer.from_pretrained(folder),
        peft_config=lora() if how == "peft" else None,
    )
    return result(trainer, folder, config)
