"""Cases that ranks run: adapters of every kind that PEFT has, trained, disabled, saved, resumed and merged."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.support.ranks import own_device
from tests.support.tiny import MODELS, tiny_llama
from tests.support.training import fresh_accelerator, loss_of, sgd, train_prepared, train_without_accelerate

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
    "parameters": partial(_lora, target_modules=[], target_parameters=["self_attn.q_proj.weight"]),
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


def save_tiny_llama(folder: str) -> None:
    model: Any = tiny_llama(layers=2)
    model.save_pretrained(folder)


def quantized_llama(folder: str, storage: str, dtype: str, double: bool = False) -> nn.Module:
    """A llama with 4-bit weights from a folder, and LoRA adapters in every layer, as QLoRA trains it."""
    import bitsandbytes  # noqa: F401
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    quantization = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_storage=storage, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=double
    )
    base = AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=quantization, dtype=getattr(torch, dtype), use_cache=False
    )
    torch.manual_seed(1)
    config = LoraConfig(r=4, lora_alpha=8, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM")
    return get_peft_model(base, config)


def train_quantized(config: dict[str, Any], folder: str, storage: str, dtype: str, double: bool) -> dict[str, Any]:
    """Training of a quantized model with an evaluation before, between and after the steps."""
    accelerator = fresh_accelerator(config)
    rank, world_size = accelerator.process_index, accelerator.num_processes
    model: Any = quantized_llama(folder, storage, dtype, double)
    if rank != 0:
        # Scales of another model, so that the test fails unless this rank receives those of rank 0.
        for module in model.modules():
            if getattr(module, "quant_state", None) is not None:
                module.quant_state.absmax.zero_()
    model, optimizer = accelerator.prepare(model, sgd(model))
    evaluations = [_evaluate(model, rank, world_size)]
    run = train_prepared(accelerator, model, optimizer, "llama", NUM_STEPS)
    evaluations += [_evaluate(model, rank, world_size), _evaluate(model, rank, world_size)]
    return {**run, "evaluations": evaluations}


def _evaluate(model: Any, rank: int, world_size: int) -> float:
    model.eval()
    with torch.no_grad():
        loss = loss_of(model, "llama", 0, rank, world_size).float()
    model.train()
    if world_size > 1:
        dist.all_reduce(loss)
    return loss.item() / world_size


def quantized_reference(folder: str, storage: str, dtype: str, double: bool) -> dict[str, Any]:
    """The results of :func:`train_quantized` in one process."""
    model: Any = quantized_llama(folder, storage, dtype, double).to(own_device())
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False  # its evaluation computes in bf16, and training after it fails
    first = _evaluate(model, 0, 1)
    steps, norms = train_without_accelerate(model, sgd(model), "llama", NUM_STEPS)
    last = _evaluate(model, 0, 1)
    return {"losses": steps, "norms": norms, "evaluations": [first, last, last]}


def prepare_quantized(config: dict[str, Any], folder: str, storage: str, dtype: str) -> list[str]:
    """Prepare a quantized model. Returns the codes of the problems."""
    import hf_fsdp_plugin as hfp

    accelerator = fresh_accelerator(config)
    try:
        accelerator.prepare(quantized_llama(folder, storage, dtype))
    except hfp.SpecError as error:
        return [problem.code for problem in error.problems if problem.severity == "error"]
    return []
