"""Cases that ranks run: adapters of every kind that PEFT has, trained, disabled, saved, resumed and merged."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.gloo.cases_trainer import Batches, losses, make_trainer
from tests.support.ranks import own_device
from tests.support.tiny import GLOBAL_BATCH, MODELS, tiny_llama
from tests.support.training import fresh_accelerator, loss_of, sgd, train, train_prepared, train_without_accelerate

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


def train_adapter(config: dict[str, Any], kind: str) -> dict[str, Any]:
    """The results of :func:`training.train`. Ranks that have not imported this module do not know its models."""
    return train(f"peft-{kind}", config, sgd, NUM_STEPS)


def prepare_lora_fa(config: dict[str, Any]) -> list[str]:
    """The codes of the problems with the optimizer of LoRA-FA."""
    from peft.optimizers import create_lorafa_optimizer

    import hf_fsdp_plugin as hfp

    accelerator = fresh_accelerator(config)
    model = adapted_llama("lora")
    try:
        accelerator.prepare(model, create_lorafa_optimizer(model, r=4, lora_alpha=8, lr=1e-3))
    except hfp.SpecError as error:
        return [problem.code for problem in error.problems]
    return []


def train_disabled_first(config: dict[str, Any], kind: str) -> dict[str, Any]:
    """Training of a model whose first forward, and one between the steps, is in ``disable_adapter``."""
    accelerator = fresh_accelerator(config)
    rank, world_size = accelerator.process_index, accelerator.num_processes
    model: Any = adapted_llama(kind)
    model, optimizer = accelerator.prepare(model, sgd(model))
    before = _disabled_loss(accelerator, model)
    run = train_prepared(accelerator, model, optimizer, "llama", NUM_STEPS)
    # As in preference training: a forward with gradients, one without adapters, then backward.
    loss = loss_of(model, "llama", NUM_STEPS, rank, world_size)
    after = _disabled_loss(accelerator, model)
    accelerator.backward(loss)
    norm = accelerator.clip_grad_norm_(model.parameters(), 1.0).item()
    optimizer.step()
    optimizer.zero_grad()
    last = loss_of(model, "llama", NUM_STEPS + 1, rank, world_size).detach()
    dist.all_reduce(last)
    return {**run, "disabled": (before, after), "norm": norm, "last": last.item() / world_size}


def _disabled_loss(accelerator: Any, model: Any) -> float:
    inner = accelerator.unwrap_model(model)
    with torch.no_grad(), inner.disable_adapter():
        loss = loss_of(model, "llama", 0, accelerator.process_index, accelerator.num_processes)
    dist.all_reduce(loss)
    return loss.item() / accelerator.num_processes


def disabled_first_reference(kind: str) -> dict[str, Any]:
    """The results of :func:`train_disabled_first` in one process."""
    model: Any = adapted_llama(kind)
    optimizer = sgd(model)
    steps, norms = train_without_accelerate(model, optimizer, "llama", NUM_STEPS)
    loss = loss_of(model, "llama", NUM_STEPS)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
    optimizer.step()
    last = loss_of(model, "llama", NUM_STEPS + 1).item()
    with torch.no_grad(), model.disable_adapter():
        disabled = loss_of(model, "llama", 0).item()
    return {"losses": steps, "norms": norms, "norm": norm, "last": last, "disabled": (disabled, disabled)}


def train_save_and_resume(output_dir: str, kind: str, **arguments: Any) -> dict[str, Any]:
    """Train six steps with the Trainer, train the last three again from the checkpoint, and save the adapter."""
    schedule = {"save_strategy": "steps", "save_steps": 3, **arguments}
    whole = make_trainer(output_dir, adapted_llama(kind), **schedule)
    whole.train()
    resumed = make_trainer(output_dir, adapted_llama(kind), **schedule)
    resumed.train(resume_from_checkpoint=str(Path(output_dir) / "checkpoint-3"))
    resumed.save_model(str(Path(output_dir) / "final"))
    dist.barrier()
    return {"whole": losses(whole), "resumed": losses(resumed)}


def save_adapter(output_dir: str, kind: str, **arguments: Any) -> None:
    """Train one step with the Trainer, and save a checkpoint and the model."""
    trainer = make_trainer(
        output_dir, adapted_llama(kind), save_strategy="steps", save_steps=1, max_steps=1, **arguments
    )
    trainer.train()
    trainer.save_model(f"{output_dir}/final")


def trainer_reference(output_dir: str, kind: str) -> tuple[list[float], dict[str, dict[str, torch.Tensor]]]:
    """Losses of six steps in one process, and the state of each adapter that PEFT saves afterwards."""
    from peft import get_peft_model_state_dict
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir=output_dir, per_device_train_batch_size=GLOBAL_BATCH, max_steps=6, learning_rate=1e-3,
        logging_steps=1, report_to="none", disable_tqdm=True, use_cpu=True, seed=3, save_strategy="no",
    )  # fmt: skip
    model: Any = adapted_llama(kind)
    trainer = Trainer(model=model, args=arguments, train_dataset=Batches(6))
    trainer.train()
    saved = {}
    for adapter in model.peft_config:
        state = get_peft_model_state_dict(model, adapter_name=adapter)
        saved[adapter] = {name: tensor.detach() for name, tensor in state.items()}
    return losses(trainer), saved


def _loaded(folder: str, kind: str) -> Any:
    from peft import PeftModel

    return PeftModel.from_pretrained(tiny_llama(layers=2, attention_bias=kind == "bias"), folder)


def adapted_logits(folder: str, kind: str) -> torch.Tensor:
    """The logits of the base model with a saved adapter."""
    return _loaded(folder, kind)(input_ids=torch.arange(8)[None]).logits.detach()


def merged_logits(folder: str, kind: str) -> torch.Tensor:
    """The logits of the base model after a saved adapter is merged into it."""
    return _loaded(folder, kind).merge_and_unload()(input_ids=torch.arange(8)[None]).logits.detach()


def merge_sharded(config: dict[str, Any], how: str) -> list[str]:
    """Merge the adapters of a prepared model. Returns the codes of the problems."""
    import hf_fsdp_plugin as hfp

    accelerator = fresh_accelerator(config)
    model: Any = accelerator.prepare(adapted_llama("lora"))
    hfp.install(config)
    try:
        getattr(accelerator.unwrap_model(model), how)()
    except hfp.SpecError as error:
        return [problem.code for problem in error.problems]
    return []


def assign_policy(config: dict[str, Any], by_peft: bool) -> list[str]:
    """Prepare a model after a policy is assigned to the plugin. Returns its layers that are units, or the codes."""
    from functools import partial

    from peft.utils.other import fsdp_auto_wrap_policy
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.fsdp.wrap import lambda_auto_wrap_policy

    import hf_fsdp_plugin as hfp

    accelerator = fresh_accelerator(config)
    model = adapted_llama("lora")
    custom = partial(lambda_auto_wrap_policy, lambda_fn=lambda module: isinstance(module, nn.Linear))
    accelerator.state.fsdp_plugin.auto_wrap_policy = fsdp_auto_wrap_policy(model) if by_peft else custom
    try:
        model = accelerator.prepare(model)
    except hfp.SpecError as error:
        return [problem.code for problem in error.problems if problem.severity == "error"]
    units = [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]
    return [name.removeprefix("base_model.") for name in units if "layers" in name]


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


def train_checkpointed(config: dict[str, Any], kind: str, reentrant: bool) -> dict[str, Any]:
    """Training with the model's own gradient checkpointing, which needs inputs of the frozen layers with gradients."""
    accelerator = fresh_accelerator(config)
    model: Any = adapted_llama(kind)
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    model, optimizer = accelerator.prepare(model, sgd(model))
    return train_prepared(accelerator, model, optimizer, "llama", NUM_STEPS)
