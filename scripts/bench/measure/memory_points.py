"""The points at which predicted memory is compared with measured memory: models, settings, and a training step."""

from __future__ import annotations

import dataclasses
import os
import random
import tempfile
import typing
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

Family = Literal["llama", "gpt2", "bert", "mixtral", "t5", "whisper", "clip"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """A model, its settings and a workload. ``heads`` divides ``hidden``; ``experts`` is of Mixtral only.

    ``lora`` is the rank of adapters on all linear layers; with ``qlora`` their weights are bitsandbytes' NF4 with
    nested scales, and the others have the dtype of the precision. Whisper's sounds and CLIP's images have fixed sizes.
    CLIP's patches are those of ViT-L/14: for patches of 16 and 32, oneDNN allocates work memory in the backward that no
    estimate contains (docs/planning.md).
    ``late`` reduces over the replicas at the last micro-batch.
    ``fp32`` is the pattern of ``fsdp_fp32_modules``, which needs torch 2.15. ``context``, ``tensor`` and ``expert`` are
    sizes of axes.
    """

    family: Family = "llama"
    version: Literal[1, 2] = 2
    strategy: str = "full_shard"
    ranks: int = 2
    checkpointing: bool = False
    selective: bool = False
    offload_activations: bool = False
    offload_params: bool = False
    offload_optimizer: bool = False
    lora: int = 0
    qlora: bool = False
    wrap: Literal["layers", "parts", "none"] = "layers"
    precision: Literal["no", "bf16"] = "no"
    fp32: str = ""
    loop: Literal["for_loop", "foreach", "fused"] = "for_loop"
    optimizer: Literal["adamw", "sgd", "adafactor", "muon", "adamw_8bit"] = "adamw"
    batch: int = 2
    seq: int = 256
    accumulation: int = 1
    sync: bool = False
    late: bool = False
    clip: bool = True
    attention: Literal["sdpa", "eager"] = "sdpa"
    prefetch: Literal["pre", "post", "none"] = "pre"
    forward_prefetch: bool = False
    use_orig: bool = True
    layers: int = 4
    hidden: int = 256
    inter: int = 768
    vocab: int = 4096
    heads: int = 8
    kv_heads: int = 4
    experts: int = 4
    context: int = 1
    tensor: int = 1
    expert: int = 1
    exchange: Literal["allgather", "alltoall"] = "allgather"

    def __str__(self) -> str:
        """Return what differs from the default, in the form that :func:`parse_point` reads."""
        return ",".join(
            f"{field.name}={getattr(self, field.name)}"
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default or field.name in ("family", "version", "strategy")
        )


def parse_point(text: str) -> Point:
    """Return the point of a text such as ``family=gpt2,version=1,checkpointing=True,hidden=512``.

    Raises:
        ValueError: a key is unknown, or a value is invalid.
    """
    hints = typing.get_type_hints(Point)
    kinds = {field.name: type(field.default) for field in dataclasses.fields(Point)}
    values: dict[str, Any] = {}
    for item in filter(None, text.split(",")):
        key, _, value = item.partition("=")
        if key not in kinds:
            raise ValueError(f"{key!r} is not one of {', '.join(kinds)}")
        values[key] = value in ("True", "true", "1") if kinds[key] is bool else kinds[key](value)
        if (known := typing.get_args(hints[key])) and values[key] not in known:
            raise ValueError(f"{key}={value} is not one of {', '.join(map(str, known))}")
    return Point(**values)


_CHOICES: dict[str, tuple[Any, ...]] = {
    "family": ("llama", "llama", "gpt2", "bert", "mixtral", "t5", "whisper", "clip"), "version": (1, 2),
    "strategy": ("full_shard", "full_shard", "shard_grad_op", "no_shard", "hybrid_shard"), "ranks": (2, 4),
    "checkpointing": (False, True), "selective": (False, False, False, True), "precision": ("no", "bf16"),
    "loop": ("for_loop", "foreach", "fused"), "optimizer": ("adamw", "adamw", "sgd", "adafactor", "muon"),
    "batch": (1, 2, 3, 6), "seq": (32, 64, 200), "accumulation": (1, 1, 2, 4), "sync": (False, True),
    "prefetch": ("pre", "post", "none"), "forward_prefetch": (False, False, True), "use_orig": (True, True, False),
    "layers": (2, 4, 7), "hidden": (64, 128, 256), "inter": (192, 512), "vocab": (500, 4096), "lora": (0, 0, 0, 8),
    "wrap": ("layers", "layers", "parts", "none"), "offload_params": (False, False, False, True),
}  # fmt: skip
"""Name of a field of a point -> values, of which each is as likely as it is often there."""
_CAUSAL = ("llama", "gpt2", "mixtral")


def random_point(numbers: random.Random) -> Point:
    """Return a random setting, without combinations that have no meaning."""
    values = {name: numbers.choice(choices) for name, choices in _CHOICES.items()}
    if values["strategy"] == "hybrid_shard":
        values["ranks"] = 4
    if values["wrap"] == "none":
        values |= {"checkpointing": False, "selective": False}
    if values["selective"]:
        values["checkpointing"] = False
    if values["family"] not in _CAUSAL:
        values["lora"] = 0
    if values["family"] in ("whisper", "clip") and values["wrap"] == "parts":
        values["wrap"] = "layers"
    return Point(**values)


_CLASSES = {
    "llama": "LlamaForCausalLM", "gpt2": "GPT2LMHeadModel", "bert": "BertForMaskedLM", "mixtral": "MixtralForCausalLM",
    "t5": "T5ForConditionalGeneration", "whisper": "WhisperForConditionalGeneration", "clip": "CLIPModel",
}  # fmt: skip
_PARTS = {
    "llama": "LlamaDecoderLayer,LlamaMLP", "gpt2": "GPT2Block,GPT2MLP", "bert": "BertLayer,BertIntermediate,BertOutput",
    "mixtral": "MixtralDecoderLayer,MixtralSparseMoeBlock", "t5": "T5Block,T5LayerFF",
}  # fmt: skip
"""Layers and the largest modules inside them, as units."""


def make_config(point: Point) -> Any:
    """Return the config of the point's model."""
    import transformers

    sizes: dict[str, Any] = {"vocab_size": point.vocab, "use_cache": False}
    if point.family == "gpt2":
        sizes |= {"n_layer": point.layers, "n_embd": point.hidden, "n_inner": point.inter, "n_head": point.heads}
        return transformers.GPT2Config(**sizes, n_positions=max(1024, point.seq), bos_token_id=0, eos_token_id=0)
    if point.family in ("t5", "whisper", "clip"):
        return _config_of_two_stacks(point)
    sizes |= {
        "num_hidden_layers": point.layers, "hidden_size": point.hidden, "intermediate_size": point.inter,
        "num_attention_heads": point.heads, "max_position_embeddings": max(512, point.seq),
    }  # fmt: skip
    if point.family == "bert":
        return transformers.BertConfig(**sizes)
    sizes["num_key_value_heads"] = point.kv_heads
    if point.family == "mixtral":
        return transformers.MixtralConfig(**sizes, num_local_experts=point.experts, num_experts_per_tok=2)
    return transformers.LlamaConfig(**sizes)


def _config_of_two_stacks(point: Point) -> Any:
    import transformers

    if point.family == "t5":
        sizes = {"d_model": point.hidden, "d_ff": point.inter, "d_kv": point.hidden // point.heads}
        return transformers.T5Config(
            **sizes, num_layers=point.layers, num_heads=point.heads, vocab_size=point.vocab, decoder_start_token_id=0
        )
    if point.family == "whisper":
        sides = {
            f"{side}_{name}": value
            for side in ("encoder", "decoder")
            for name, value in (("layers", point.layers), ("ffn_dim", point.inter), ("attention_heads", point.heads))
        }
        tokens = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 2}
        return transformers.WhisperConfig(**sides, **tokens, d_model=point.hidden, vocab_size=point.vocab)
    tower = {
        "hidden_size": point.hidden, "intermediate_size": point.inter, "num_hidden_layers": point.layers,
        "num_attention_heads": point.heads,
    }  # fmt: skip
    text = {**tower, "vocab_size": point.vocab, "max_position_embeddings": 77, "eos_token_id": 2}
    return transformers.CLIPConfig(text_config=text, vision_config={**tower, "patch_size": 14})


def make_model(point: Point) -> Any:
    """Return the point's model, on torch's default device."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = make_config(point)
    config._attn_implementation = point.attention
    model = getattr(transformers, _CLASSES[point.family])(config)
    if point.qlora:
        return _with_packed_weights(model, point)
    return _with_adapters(model, point) if point.lora else model


def _with_adapters(model: Any, point: Point) -> Any:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=point.lora, target_modules="all-linear", task_type="CAUSAL_LM"))


def _with_packed_weights(model: Any, point: Point) -> Any:
    """Return the model as bitsandbytes loads it, or on the meta device as ``hf-fsdp plan --qlora`` predicts it."""
    import torch

    from hf_fsdp_plugin.tools.plan.adapters import with_lora

    dtype = torch.bfloat16 if point.precision == "bf16" else torch.float32
    model.to(dtype)
    if model.device.type == "meta":
        return with_lora(model, rank=point.lora, quantized=True)
    from transformers import BitsAndBytesConfig

    packing = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_quant_storage=dtype,
        bnb_4bit_compute_dtype=dtype,
    )  # fmt: skip
    loaded = type(model).from_pretrained(
        None, config=model.config, state_dict=model.state_dict(), quantization_config=packing, dtype=dtype,
        attn_implementation=point.attention,
    )  # fmt: skip
    return _with_adapters(loaded, point)


def make_batch(shapes: dict[str, Any], vocab: int, generator: Any) -> dict[str, Any]:
    """Return random values for tensors on the meta device. Inputs that are one tensor, such as labels, stay one."""
    import torch

    made: dict[int, Any] = {}
    for value in shapes.values():
        if not isinstance(value, torch.Tensor):
            made[id(value)] = value
        elif id(value) not in made and value.is_floating_point():
            made[id(value)] = torch.randn(value.shape, generator=generator)
        elif id(value) not in made:
            made[id(value)] = torch.randint(0, vocab, value.shape, generator=generator)
    return {name: made[id(value)] for name, value in shapes.items()}


def make_spec(point: Point, *, use_cpu: bool = True) -> Any:
    import hf_fsdp_plugin as hfp

    return hfp.load_spec(make_settings(point, use_cpu=use_cpu))


def make_settings(point: Point, *, use_cpu: bool = True) -> dict[str, Any]:
    """Return the point's config, as ``accelerate config`` writes it."""
    fsdp = {
        "fsdp_version": point.version,
        "fsdp_sharding_strategy": point.strategy.upper(),
        "fsdp_auto_wrap_policy": "NO_WRAP" if point.wrap == "none" else "TRANSFORMER_BASED_WRAP",
        "fsdp_activation_checkpointing": "selective" if point.selective else point.checkpointing,
        "fsdp_offload_params": point.offload_params,
        "fsdp_offload_optimizer": point.offload_optimizer,
        "fsdp_backward_prefetch": {"pre": "BACKWARD_PRE", "post": "BACKWARD_POST", "none": "NO_PREFETCH"}[
            point.prefetch
        ],
        "fsdp_forward_prefetch": point.forward_prefetch,
    }
    if point.wrap == "parts":
        fsdp["fsdp_transformer_layer_cls_to_wrap"] = _PARTS[point.family]
    if point.offload_activations:
        fsdp["fsdp_activation_checkpointing_offload"] = True
    if point.fp32:
        fsdp["fsdp_fp32_modules"] = point.fp32
    if point.late:
        fsdp["fsdp_reduce_replicas_at_last_micro_batch"] = True
    if point.version == 1:
        fsdp["fsdp_use_orig_params"] = point.use_orig
    if point.strategy.startswith("hybrid"):
        fsdp |= {"fsdp_dp_shard_size": 2}
    sizes = {"cp_size": point.context, "tp_size": point.tensor, "ep_size": point.expert}
    axes: dict[str, Any] = {f"parallelism_config_{name}": size for name, size in sizes.items() if size > 1}
    if point.context > 1:
        axes["parallelism_config_cp_comm_strategy"] = point.exchange
    return {
        "distributed_type": "FSDP",
        "num_processes": point.ranks,
        "use_cpu": use_cpu,
        "mixed_precision": point.precision,
        "fsdp_config": fsdp,
        **({"parallelism_config": axes} if axes else {}),
    }


def make_workload(point: Point) -> Any:
    from hf_fsdp_plugin.tools.plan.estimate.types import Workload

    return Workload(
        micro_batch=point.batch, seq_len=point.seq, accumulation=point.accumulation, sync_each_batch=point.sync,
        optimizer=point.optimizer, update_loop=point.loop, clip_norm=point.clip, attention=point.attention,
    )  # fmt: skip


def make_optimizers(model: Any, point: Point, device_type: str) -> list[Any]:
    """Return the optimizers of a point, with the arguments that the Trainer passes. Muon needs AdamW for vectors."""
    import torch

    from hf_fsdp_plugin.tools.plan.estimate.types import update_loop

    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    name = update_loop(make_workload(point), device_type)
    loop: dict[str, Any] = {"fused": True} if name == "fused" else {"foreach": name == "foreach"}
    if point.optimizer == "sgd":
        return [torch.optim.SGD(parameters, lr=1e-4, **loop)]
    if point.optimizer == "adafactor":
        from transformers import Adafactor

        return [Adafactor(parameters, lr=1e-4, scale_parameter=False, relative_step=False)]
    if point.optimizer == "adamw_8bit":
        from bitsandbytes.optim import AdamW8bit

        return [AdamW8bit(parameters, lr=1e-4)]
    if point.optimizer == "muon":
        matrices = [parameter for parameter in parameters if parameter.dim() == 2]
        others = [parameter for parameter in parameters if parameter.dim() != 2]
        return [torch.optim.Muon(matrices, lr=1e-4), torch.optim.AdamW(others, lr=1e-4, **loop)]
    return [torch.optim.AdamW(parameters, lr=1e-4, **loop)]


def measure(rank: int, report: Callable[..., None], point: Point, steps: int) -> None:
    """Train and report the allocator's peak of each step from the second on, above what it held before the model."""
    import torch

    import hf_fsdp_plugin as hfp
    from hf_fsdp_plugin.tools.plan.estimate.memory.meta_pass import meta_batch
    from scripts.bench.allocator import AllocatorCounter

    counter = AllocatorCounter()
    before = counter.current
    is_divided = max(point.tensor, point.expert) > 1
    if is_divided:
        tempfile.tempdir = os.getcwd()  # which is removed after the measurement
        hfp.install(make_settings(point))
    accelerator = hfp.accelerator(make_spec(point), gradient_accumulation_steps=point.accumulation)
    if point.sync:
        accelerator.gradient_state.plugin_kwargs["sync_each_batch"] = True
    model = _divided_model(point) if is_divided else make_model(point)
    shapes = meta_batch(model, micro_batch=point.batch, seq_len=point.seq)
    optimizers = make_optimizers(model, point, "cpu")
    model, *optimizers = accelerator.prepare(model.train(), *optimizers)
    generator = torch.Generator().manual_seed(1 + rank // (point.context * point.tensor))
    peaks = []
    for _ in range(1 + steps):
        counter.reset_peak()
        train_step(point, accelerator, model, optimizers, shapes, generator)
        peaks.append(counter.peak - before)
        accelerator.wait_for_everyone()
    report("peaks", peaks[1:])


def _divided_model(point: Point) -> Any:
    """Return the point's model as ``from_pretrained`` divides it over the ranks. All experts get as many tokens."""
    import torch.distributed as dist
    import transformers

    folder = "model"  # in the folder of this measurement
    if dist.get_rank() == 0:
        make_model(point).save_pretrained(folder)
    dist.barrier()
    model_class = getattr(transformers, _CLASSES[point.family])
    model = model_class.from_pretrained(folder, attn_implementation=point.attention, config=make_config(point))
    for name, module in model.named_modules():
        if point.expert > 1 and name.endswith("mlp.gate"):
            module.register_forward_hook(lambda router, args, output: _balanced(output, point.experts))
    return model


def _balanced(output: Any, experts: int) -> Any:
    """Return the output of a router that selects all experts equally often."""
    import torch

    *others, index = output
    return (*others, torch.arange(index.numel()).view(index.shape).remainder(experts))


def _context_batch(batch: dict[str, Any]) -> dict[str, Any]:
    """Return a batch with what the Trainer adds to it for context parallelism."""
    import torch

    ids, labels = batch["input_ids"], batch["labels"].clone()
    shifted = torch.nn.functional.pad(labels, (0, 1), value=-100)[:, 1:].contiguous()
    positions = torch.arange(ids.shape[1]).expand(ids.shape[0], -1)
    return {"input_ids": ids, "labels": labels, "shift_labels": shifted, "position_ids": positions}


def train_step(point: Point, accelerator: Any, model: Any, optimizers: Any, shapes: Any, generator: Any) -> None:
    """One optimizer step, with a new batch for each micro-batch."""
    import torch

    for _ in range(point.accumulation):
        with accelerator.accumulate(model):
            batch = make_batch(shapes, point.vocab, generator)
            tensors = [value for value in batch.values() if isinstance(value, torch.Tensor)]  # return_loss is a bool
            moved = {id(tensor): tensor.to(accelerator.device) for tensor in tensors}  # labels may be inputs
            batch = {name: moved.get(id(value), value) for name, value in batch.items()}
            divided: Any = nullcontext()
            if point.context > 1:
                batch = _context_batch(batch)
                buffers = list(batch.values())
                divided = accelerator.maybe_context_parallel(
                    buffers=buffers, buffer_seq_dims=[1] * len(buffers), no_restore_buffers=set(buffers)
                )
                del buffers
            with divided:
                accelerator.backward(model(**batch).loss)
            if accelerator.sync_gradients and point.clip:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()


def points_of(name: str) -> tuple[Point, ...]:
    """Return the points of a table."""
    table = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    return tuple(map(parse_point, table[name]))
