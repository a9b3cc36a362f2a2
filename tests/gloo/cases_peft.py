"""Cases that ranks run: adapters of every kind that PEFT has, trained, disabled, saved, resumed and merged."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from tiny import MODELS, tiny_llama
from torch import nn
from training import sgd, train

NUM_STEPS = 4
TARGETS = ("q_proj", "v_proj")


def _lora(**settings: Any) -> Any:
    from peft import LoraConfig

    given = {"target_modules": list(TARGETS), **settings}
    return LoraConfig(r=4, lora_alpha=8, lora_dropout=0.0, task_type="CAUSAL_LM", **given)


def _other(name: str, **settings: Any) -> Any:
    import peft

    return getattr(peft, name)(task_type="CAUSAL_LM", **settings)


KINDS: dict[str, Callable[[], Any]] = {
    "lora": _lora,
    "rslora": partial(_lora, use_rslora=True),
    "dora": partial(_lora, use_dora=True),
    "modules": partial(_lora, modules_to_save=["lm_head"]),
    "embedding": partial(_lora, target_modules=[*TARGETS, "embed_tokens"]),
    "tokens": partial(_lora, trainable_token_indices=[1, 5, 7]),
    "bias": partial(_lora, bias="all"),
    "ia3": partial(
        _other,
        "IA3Config",
        target_modules=["k_proj", "v_proj", "down_proj"],
        feedforward_modules=["down_proj"],
        init_ia3_weights=True,
    ),
    "prompt": partial(_other, "PromptTuningConfig", num_virtual_tokens=4),
    "prefix": partial(_other, "PrefixTuningConfig", num_virtual_tokens=4, prefix_projection=True),
    "ptuning": partial(_other, "PromptEncoderConfig", num_virtual_tokens=4, encoder_hidden_size=16),
    "loha": partial(_other, "LoHaConfig", r=4, target_modules=list(TARGETS)),
    "vera": partial(_other, "VeraConfig", r=4, target_modules=["q_proj", "o_proj"]),
    "adalora": partial(_other, "AdaLoraConfig", target_modules=list(TARGETS), total_step=100),
    "boft": partial(_other, "BOFTConfig", target_modules=list(TARGETS), boft_block_size=4),
    "two": _lora,
}


def adapted_llama(kind: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A llama with an adapter of one kind; ``two`` has two LoRA adapters, of which the second is active."""
    from peft import get_peft_model

    base: Any = tiny_llama(layers=2, attention_bias=kind == "bias").to(dtype)
    model: Any = get_peft_model(base, KINDS[kind]())
    if kind == "two":
        model.add_adapter("second", _lora())
        model.set_adapter("second")
    return model


MODELS.update({f"peft-{kind}": partial(adapted_llama, kind) for kind in KINDS})


def train_adapter(config: dict[str, Any], kind: str) -> dict[str, Any]:
    """The results of :func:`training.train`. Ranks that have not imported this module do not know its models."""
    return train(f"peft-{kind}", config, sgd, NUM_STEPS)
