"""Small models of well-known families with the layers to wrap and the expected units; helpers for plans of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import transformers as hf
from torch import nn

from hf_fsdp_plugin.plan.resolve import try_resolve
from hf_fsdp_plugin.problems import Problem
from hf_fsdp_plugin.spec.model import FsdpSection, FsdpSpec, ParamsSection, WrapSection

VOCAB = 96
TEXT_CONFIG = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GROUPED = {**TEXT_CONFIG, "num_key_value_heads": 2, "head_dim": 8}
VISION_CONFIG = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 8,
    "patch_size": 4,
}
_SEQ2SEQ = {
    "vocab_size": VOCAB,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}


def _text() -> dict[str, Any]:
    ids = torch.arange(1, 9).repeat(2, 1)
    return {"input_ids": ids, "labels": ids.clone()}


def _pictures() -> dict[str, Any]:
    return {"pixel_values": torch.ones(2, 3, 8, 8)}


@dataclass(frozen=True, kw_only=True)
class Family:
    """``layers``: the classes that guides tell users to wrap. ``units``: the FSDP2 units for them, without the root."""

    build: Callable[[], nn.Module]
    layers: tuple[str, ...]
    units: tuple[str, ...]
    inputs: Callable[[], dict[str, Any]] = _text


def _two(prefix: str) -> tuple[str, str]:
    return f"{prefix}.0", f"{prefix}.1"


FAMILIES: dict[str, Family] = {
    "bert": Family(
        build=lambda: hf.BertForSequenceClassification(hf.BertConfig(**TEXT_CONFIG)),
        layers=("BertLayer",),
        units=("bert.embeddings.word_embeddings", *_two("bert.encoder.layer")),
        inputs=lambda: {"input_ids": torch.arange(1, 9).repeat(2, 1), "labels": torch.tensor([0, 1])},
    ),
    # The head's bias is also tied to a module outside the head, so embedding and head belong to the root.
    "bert-mlm": Family(
        build=lambda: hf.BertForMaskedLM(hf.BertConfig(**TEXT_CONFIG)),
        layers=("BertLayer",),
        units=_two("bert.encoder.layer"),
    ),
    "gpt2": Family(
        build=lambda: hf.GPT2LMHeadModel(
            hf.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=VOCAB, bos_token_id=1, eos_token_id=2)
        ),
        layers=("GPT2Block",),
        units=("transformer.wte + transformer.ln_f + lm_head", *_two("transformer.h")),
    ),
    "gpt-neox": Family(
        build=lambda: hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**TEXT_CONFIG)),
        layers=("GPTNeoXLayer",),
        units=("gpt_neox.embed_in", *_two("gpt_neox.layers"), "gpt_neox.final_layer_norm + lm_head"),
    ),
    "gpt-j": Family(
        build=lambda: hf.GPTJForCausalLM(
            hf.GPTJConfig(
                n_embd=32, n_layer=2, n_head=4, vocab_size=VOCAB, rotary_dim=8, bos_token_id=1, eos_token_id=2
            )
        ),
        layers=("GPTJBlock",),
        units=("transformer.wte", *_two("transformer.h"), "transformer.ln_f + lm_head"),
    ),
    "llama": Family(
        build=lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**TEXT_CONFIG)),
        layers=("LlamaDecoderLayer",),
        units=("model.embed_tokens", *_two("model.layers"), "model.norm + lm_head"),
    ),
    "llama-tied": Family(
        build=lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**TEXT_CONFIG, tie_word_embeddings=True)),
        layers=("LlamaDecoderLayer",),
        units=("model.embed_tokens + model.norm + lm_head", *_two("model.layers")),
    ),
    "llama-base": Family(
        build=lambda: hf.LlamaModel(hf.LlamaConfig(**TEXT_CONFIG)),
        layers=("LlamaDecoderLayer",),
        units=("embed_tokens", *_two("layers")),
        inputs=lambda: {"input_ids": torch.arange(1, 9).repeat(2, 1)},
    ),
    "mistral": Family(
        build=lambda: hf.MistralForCausalLM(hf.MistralConfig(**_GROUPED)),
        layers=("MistralDecoderLayer",),
        units=("model.embed_tokens", *_two("model.layers"), "model.norm + lm_head"),
    ),
    # The weight that encoder, decoder and head share belongs to the root: `shared` itself is never called.
    "t5": Family(
        build=lambda: hf.T5ForConditionalGeneration(
            hf.T5Config(
                vocab_size=VOCAB, d_model=32, d_ff=64, num_layers=2, num_heads=4, d_kv=8, decoder_start_token_id=0
            )
        ),
        layers=("T5Block",),
        units=(*_two("encoder.block"), *_two("decoder.block")),
    ),
    "bart": Family(
        build=lambda: hf.BartForConditionalGeneration(hf.BartConfig(**_SEQ2SEQ, forced_eos_token_id=2)),
        layers=("BartEncoderLayer", "BartDecoderLayer"),
        units=(*_two("model.encoder.layers"), *_two("model.decoder.layers")),
    ),
    "bloom": Family(
        build=lambda: hf.BloomForCausalLM(
            hf.BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2)
        ),
        layers=("BloomBlock",),
        units=("transformer.word_embeddings + transformer.ln_f + lm_head", *_two("transformer.h")),
    ),
    "qwen3": Family(
        build=lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**_GROUPED)),
        layers=("Qwen3DecoderLayer",),
        units=("model.embed_tokens", *_two("model.layers"), "model.norm + lm_head"),
    ),
    "gemma": Family(
        build=lambda: hf.GemmaForCausalLM(hf.GemmaConfig(**_GROUPED)),
        layers=("GemmaDecoderLayer",),
        units=("model.embed_tokens + model.norm + lm_head", *_two("model.layers")),
    ),
    "mixtral": Family(
        build=lambda: hf.MixtralForCausalLM(hf.MixtralConfig(**_GROUPED, num_local_experts=4)),
        layers=("MixtralDecoderLayer",),
        units=("model.embed_tokens", *_two("model.layers"), "model.norm + lm_head"),
    ),
    "whisper": Family(
        build=lambda: hf.WhisperForConditionalGeneration(
            hf.WhisperConfig(**_SEQ2SEQ, num_mel_bins=8, max_source_positions=16, max_target_positions=16)
        ),
        layers=("WhisperEncoderLayer", "WhisperDecoderLayer"),
        units=(
            *_two("model.encoder.layers"),
            "model.decoder.embed_tokens + proj_out",
            *_two("model.decoder.layers"),
        ),
        inputs=lambda: {"input_features": torch.ones(2, 8, 32), "labels": torch.arange(1, 9).repeat(2, 1)},
    ),
    "vit": Family(
        build=lambda: hf.ViTForImageClassification(hf.ViTConfig(**VISION_CONFIG)),
        layers=("ViTLayer",),
        units=("vit.embeddings.patch_embeddings", *_two("vit.layers"), "vit.layernorm"),
        inputs=lambda: {**_pictures(), "labels": torch.tensor([0, 1])},
    ),
    "clip-text": Family(
        build=lambda: hf.CLIPTextModel(hf.CLIPTextConfig(**TEXT_CONFIG, max_position_embeddings=16)),
        layers=("CLIPEncoderLayer",),
        units=("embeddings.token_embedding", *_two("encoder.layers")),
        inputs=lambda: {"input_ids": torch.arange(1, 9).repeat(2, 1)},
    ),
    "mamba": Family(
        build=lambda: hf.MambaForCausalLM(
            hf.MambaConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, state_size=4)
        ),
        layers=("MambaBlock",),
        units=("backbone.embeddings + backbone.norm_f + lm_head", *_two("backbone.layers")),
    ),
    "llava": Family(
        build=lambda: hf.LlavaForConditionalGeneration(
            hf.LlavaConfig(
                vision_config=hf.CLIPVisionConfig(**VISION_CONFIG),
                text_config=hf.LlamaConfig(**TEXT_CONFIG),
                image_token_index=7,
            )
        ),
        layers=("CLIPEncoderLayer", "LlamaDecoderLayer"),
        units=(
            *_two("model.vision_tower.encoder.layers"),
            "model.language_model.embed_tokens",
            *_two("model.language_model.layers"),
            "lm_head",
        ),
    ),
    "qwen2-vl": Family(
        build=lambda: hf.Qwen2VLForConditionalGeneration(
            hf.Qwen2VLConfig(
                text_config={
                    **TEXT_CONFIG,
                    "num_key_value_heads": 2,
                    "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4},
                },
                vision_config={
                    "depth": 2,
                    "embed_dim": 32,
                    "hidden_size": 32,
                    "num_heads": 4,
                    "mlp_ratio": 2,
                    "patch_size": 4,
                },
            )
        ),
        layers=("Qwen2VLVisionBlock", "Qwen2VLDecoderLayer"),
        units=(
            *_two("model.visual.blocks"),
            "model.language_model.embed_tokens",
            *_two("model.language_model.layers"),
            "lm_head",
        ),
    ),
}


def on_meta(family: str) -> nn.Module:
    with torch.device("meta"):
        return FAMILIES[family].build()


def wrapping(*classes: str, version: int = 2, use_orig: bool = True, **wrap: Any) -> FsdpSpec:
    """A spec with the transformer policy, unless ``policy`` is given."""
    section = WrapSection(**{"policy": "transformer", "classes": classes, **wrap})
    return FsdpSpec(
        fsdp=FsdpSection(version=version),  # type: ignore[arg-type]
        wrap=section,
        params=ParamsSection(use_orig=use_orig),
    )


def problem_in(problems: Iterable[Problem], code: str) -> Problem:
    """The only problem with this code."""
    found = [problem for problem in problems if problem.code == code]
    assert len(found) == 1, [str(problem) for problem in problems]
    return found[0]


def refused(code: str, spec: FsdpSpec, model: nn.Module, *, world_size: int = 2, **options: Any) -> Problem:
    """Resolve a spec that is refused, and return the problem with this code."""
    plan, problems = try_resolve(spec, model, world_size=world_size, **options)
    assert plan is None
    return problem_in(problems, code)
