"""The points at which predicted memory is compared with measured memory: models, settings, and a training step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

Family = Literal["llama", "gpt2", "bert", "mixtral"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """A model, its settings and a workload. ``heads`` divides ``hidden``; ``experts`` is of Mixtral only."""

    family: Family = "llama"
    version: int = 2
    strategy: str = "full_shard"
    ranks: int = 2
    checkpointing: bool = False
    precision: Literal["no", "bf16"] = "no"
    loop: Literal["for_loop", "foreach", "fused"] = "for_loop"
    optimizer: Literal["adamw", "sgd"] = "adamw"
    batch: int = 2
    seq: int = 256
    accumulation: int = 1
    sync: bool = False
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
    kinds = {field.name: type(field.default) for field in dataclasses.fields(Point)}
    values: dict[str, Any] = {}
    for item in filter(None, text.split(",")):
        key, _, value = item.partition("=")
        if key not in kinds:
            raise ValueError(f"{key!r} is not one of {', '.join(kinds)}")
        values[key] = value in ("True", "true", "1") if kinds[key] is bool else kinds[key](value)
    return Point(**values)


def make_config(point: Point) -> Any:
    """Return the config of the point's model."""
    import transformers

    sizes: dict[str, Any] = {"vocab_size": point.vocab, "use_cache": False}
    if point.family == "gpt2":
        sizes |= {"n_layer": point.layers, "n_embd": point.hidden, "n_inner": point.inter, "n_head": point.heads}
        return transformers.GPT2Config(**sizes, n_positions=max(1024, point.seq), bos_token_id=0, eos_token_id=0)
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


def make_model(point: Point) -> Any:
    """Return the point's model, on torch's default device."""
    import torch
    import transformers

    classes = {"llama": "LlamaForCausalLM", "gpt2": "GPT2LMHeadModel", "bert": "BertForMaskedLM"}
    torch.manual_seed(0)
    config = make_config(point)
    config._attn_implementation = point.attention
    return getattr(transformers, classes.get(point.family, "MixtralForCausalLM"))(config)


def make_spec(point: Point) -> Any:
    import hf_fsdp_plugin as hfp

    fsdp = {
        "fsdp_version": point.version,
        "fsdp_sharding_strategy": point.strategy.upper(),
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_activation_checkpointing": point.checkpointing,
        "fsdp_backward_prefetch": {"pre": "BACKWARD_PRE", "post": "BACKWARD_POST", "none": "NO_PREFETCH"}[
            point.prefetch
        ],
        "fsdp_forward_prefetch": point.forward_prefetch,
    }
    if point.version == 1:
        fsdp["fsdp_use_orig_params"] = point.use_orig
    if point.strategy.startswith("hybrid"):
        fsdp |= {"fsdp_sharding_group_size": 2}
    return hfp.load_spec(
        {
            "distributed_type": "FSDP",
            "num_processes": point.ranks,
            "use_cpu": True,
            "mixed_precision": point.precision,
            "fsdp_config": fsdp,
        }
    )


def make_optimizer(point: Point, model: Any) -> Any:
    import torch

    loops = {"for_loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}
    cls = torch.optim.AdamW if point.optimizer == "adamw" else torch.optim.SGD
    return cls(model.parameters(), lr=1e-4, **loops[point.loop])


def measure(rank: int, report: Callable[..., None], point: Point, steps: int) -> None:
    """Train and report the allocator's peak of each step from the second on, above what it held before the model."""
    import torch
    from allocator import AllocatorCounter

    import hf_fsdp_plugin as hfp

    counter = AllocatorCounter()
    before = counter.current
    accelerator = hfp.accelerator(make_spec(point), gradient_accumulation_steps=point.accumulation)
    if point.sync:
        accelerator.gradient_state.plugin_kwargs["sync_each_batch"] = True
    model = make_model(point)
    model, optimizer = accelerator.prepare(model.train(), make_optimizer(point, model))
    generator = torch.Generator().manual_seed(1 + rank)
    peaks = []
    for _ in range(1 + steps):
        counter.reset_peak()
        for _ in range(point.accumulation):
            with accelerator.accumulate(model):
                ids = torch.randint(0, point.vocab, (point.batch, point.seq), generator=generator)
                accelerator.backward(model(input_ids=ids, labels=ids).loss)
                if accelerator.sync_gradients and point.clip:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        peaks.append(counter.peak - before)
        accelerator.wait_for_everyone()
    report("peaks", peaks[1:])
