"""Small models of well-known families, with the layers to wrap, the expected units and random batches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers as hf
from torch import nn

Batch = dict[str, torch.Tensor]
NUM_ROWS, LENGTH = 4, 8
VOCAB, IMAGE_TOKEN = 96, 7
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT_CONFIG = {**SIZES, "vocab_size": VOCAB, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_CLIP_TEXT = {**TEXT_CONFIG, "max_position_embeddings": 16}
_VISION = {**SIZES, "image_size": 8, "patch_size": 4}
_GROUPED = {**TEXT_CONFIG, "num_key_value_heads": 2, "head_dim": 8}
_SEQ2SEQ = {
    "vocab_size": VOCAB, "d_model": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 64,
    "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 64, "decoder_start_token_id": 1,
}  # fmt: skip
_ROPE = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}
_QWEN_VISION = {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "mlp_ratio": 2, "patch_size": 4}

_TOKENS = {"input_ids": "tokens"}
_TEXT = {**_TOKENS, "labels": "tokens"}
_IMAGE_TEXT = {"input_ids": "image tokens", "labels": "image tokens"}


@dataclass(frozen=True, kw_only=True)
class Family:
    """A small model of a family.

    Attributes:
        model: the class.
        config: arguments of the model's config class.
        layers: the classes that guides recommend to wrap.
        units: the FSDP2 units for these classes, without the root.
        inputs: input of the model -> kind of the value, see :meth:`batch`.
    """

    model: type[nn.Module]
    config: Mapping[str, Any] = field(default_factory=lambda: TEXT_CONFIG)
    layers: tuple[str, ...]
    units: tuple[str, ...]
    inputs: Mapping[str, str] = field(default_factory=lambda: _TEXT)

    def build(self) -> nn.Module:
        """Return the model with the same weights on every rank and without dropout."""
        torch.manual_seed(0)
        model = self.model(self.model.config_class(**self.config))  # type: ignore[attr-defined]
        model.config.use_cache = False
        return without_dropout(model).train()

    def batch(self, step: int) -> Batch:
        """Return the global batch of a step: random values, with one row per sample."""
        generator = torch.Generator().manual_seed(1000 + step)
        # No special tokens: padding and image tokens would give the ranks' parts of the batch different weights.
        tokens = torch.randint(8, VOCAB, (NUM_ROWS, LENGTH), generator=generator)
        image_tokens = tokens.clone()
        image_tokens[:, 1:5] = IMAGE_TOKEN
        values = {
            "tokens": tokens,
            "image tokens": image_tokens,
            "image mask": (image_tokens == IMAGE_TOKEN).int(),
            "classes": torch.randint(0, 2, (NUM_ROWS,), generator=generator),
            "images": torch.randn(NUM_ROWS, 3, 8, 8, generator=generator),
            "sounds": torch.randn(NUM_ROWS, 8, 32, generator=generator),
            # One image of 4 x 4 patches per row; the patches of all images are concatenated.
            "patches": torch.randn(NUM_ROWS * 16, 96, generator=generator),
            "grids": torch.tensor([[1, 4, 4]]).repeat(NUM_ROWS, 1),
        }
        return {name: values[kind].clone() for name, kind in self.inputs.items()}

    @staticmethod
    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        """Return a loss that is a mean over the rows of the batch."""
        output = model(**batch)
        if getattr(output, "loss", None) is not None:
            return output.loss
        if hasattr(output, "logits_per_image"):  # CLIP's own loss is not a mean over rows: it compares rows
            return output.logits_per_image.diagonal().mean()
        return output.last_hidden_state.square().mean()


def without_dropout(model: nn.Module) -> nn.Module:
    for module in model.modules():
        for name, value in vars(module).items():
            if ("drop" in name or name == "p") and isinstance(value, float):
                setattr(module, name, 0.0)
    return model


def on_meta(family: str) -> nn.Module:
    """Return the model of a family without weights."""
    with torch.device("meta"):
        return FAMILIES[family].build()


def _two(prefix: str) -> tuple[str, str]:
    return f"{prefix}.0", f"{prefix}.1"


_DECODER_UNITS = ("model.embed_tokens", *_two("model.layers"), "model.norm + lm_head")
_TIED_DECODER_UNITS = ("model.embed_tokens + model.norm + lm_head", *_two("model.layers"))
_LANGUAGE_MODEL_UNITS = ("model.language_model.embed_tokens", *_two("model.language_model.layers"), "lm_head")

FAMILIES: dict[str, Family] = {
    "bert": Family(
        model=hf.BertForSequenceClassification,
        layers=("BertLayer",),
        units=("bert.embeddings.word_embeddings", *_two("bert.encoder.layer")),
        inputs={**_TOKENS, "labels": "classes"},
    ),
    # The head's bias is also tied to a module outside the head, so embedding and head belong to the root.
    "bert-mlm": Family(model=hf.BertForMaskedLM, layers=("BertLayer",), units=_two("bert.encoder.layer")),
    "gpt2": Family(
        model=hf.GPT2LMHeadModel,
        layers=("GPT2Block",),
        units=("transformer.wte + transformer.ln_f + lm_head", *_two("transformer.h")),
    ),
    "gpt-neox": Family(
        model=hf.GPTNeoXForCausalLM,
        layers=("GPTNeoXLayer",),
        units=("gpt_neox.embed_in", *_two("gpt_neox.layers"), "gpt_neox.final_layer_norm + lm_head"),
    ),
    "gpt-j": Family(
        model=hf.GPTJForCausalLM,
        config={**TEXT_CONFIG, "rotary_dim": 8},
        layers=("GPTJBlock",),
        units=("transformer.wte", *_two("transformer.h"), "transformer.ln_f + lm_head"),
    ),
    "llama": Family(model=hf.LlamaForCausalLM, layers=("LlamaDecoderLayer",), units=_DECODER_UNITS),
    "llama-tied": Family(
        model=hf.LlamaForCausalLM,
        config={**TEXT_CONFIG, "tie_word_embeddings": True},
        layers=("LlamaDecoderLayer",),
        units=_TIED_DECODER_UNITS,
    ),
    "llama-base": Family(
        model=hf.LlamaModel,
        layers=("LlamaDecoderLayer",),
        units=("embed_tokens", *_two("layers")),
        inputs=_TOKENS,
    ),
    "mistral": Family(
        model=hf.MistralForCausalLM, config=_GROUPED, layers=("MistralDecoderLayer",), units=_DECODER_UNITS
    ),
    # The weight that encoder, decoder and head share belongs to the root: `shared` itself is never called.
    "t5": Family(
        model=hf.T5ForConditionalGeneration,
        config={**TEXT_CONFIG, "num_layers": 2, "d_ff": 64, "d_kv": 8, "decoder_start_token_id": 0},
        layers=("T5Block",),
        units=(*_two("encoder.block"), *_two("decoder.block")),
    ),
    "bart": Family(
        model=hf.BartForConditionalGeneration,
        config={**_SEQ2SEQ, "forced_eos_token_id": 2},
        layers=("BartEncoderLayer", "BartDecoderLayer"),
        units=(*_two("model.encoder.layers"), *_two("model.decoder.layers")),
    ),
    "bloom": Family(
        model=hf.BloomForCausalLM,
        layers=("BloomBlock",),
        units=("transformer.word_embeddings + transformer.ln_f + lm_head", *_two("transformer.h")),
    ),
    "qwen3": Family(model=hf.Qwen3ForCausalLM, config=_GROUPED, layers=("Qwen3DecoderLayer",), units=_DECODER_UNITS),
    "gemma": Family(
        model=hf.GemmaForCausalLM, config=_GROUPED, layers=("GemmaDecoderLayer",), units=_TIED_DECODER_UNITS
    ),
    "mixtral": Family(
        model=hf.MixtralForCausalLM,
        config={**_GROUPED, "num_local_experts": 4},
        layers=("MixtralDecoderLayer",),
        units=_DECODER_UNITS,
    ),
    "whisper": Family(
        model=hf.WhisperForConditionalGeneration,
        config={**_SEQ2SEQ, "num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 16},
        layers=("WhisperEncoderLayer", "WhisperDecoderLayer"),
        units=(*_two("model.encoder.layers"), "model.decoder.embed_tokens + proj_out", *_two("model.decoder.layers")),
        inputs={"input_features": "sounds", "labels": "tokens"},
    ),
    "vit": Family(
        model=hf.ViTForImageClassification,
        config=_VISION,
        layers=("ViTLayer",),
        units=("vit.embeddings.patch_embeddings", *_two("vit.layers"), "vit.layernorm"),
        inputs={"pixel_values": "images", "labels": "classes"},
    ),
    "clip-text": Family(
        model=hf.CLIPTextModel,
        config=_CLIP_TEXT,
        layers=("CLIPEncoderLayer",),
        units=("embeddings.token_embedding", *_two("encoder.layers")),
        inputs=_TOKENS,
    ),
    "clip": Family(
        model=hf.CLIPModel,
        config={"text_config": _CLIP_TEXT, "vision_config": _VISION, "projection_dim": 16},
        layers=("CLIPEncoderLayer",),
        units=(*_two("text_model.encoder.layers"), *_two("vision_model.encoder.layers")),
        inputs={**_TOKENS, "pixel_values": "images"},
    ),
    "mamba": Family(
        model=hf.MambaForCausalLM,
        config={**TEXT_CONFIG, "state_size": 4},
        layers=("MambaBlock",),
        units=("backbone.embeddings + backbone.norm_f + lm_head", *_two("backbone.layers")),
    ),
    "llava": Family(
        model=hf.LlavaForConditionalGeneration,
        config={"text_config": TEXT_CONFIG, "vision_config": _VISION, "image_token_index": IMAGE_TOKEN},
        layers=("CLIPEncoderLayer", "LlamaDecoderLayer"),
        units=(*_two("model.vision_tower.encoder.layers"), *_LANGUAGE_MODEL_UNITS),
        inputs={**_IMAGE_TEXT, "pixel_values": "images"},
    ),
    "qwen2-vl": Family(
        model=hf.Qwen2VLForConditionalGeneration,
        config={
            "text_config": {**TEXT_CONFIG, "num_key_value_heads": 2, "rope_parameters": _ROPE},
            "vision_config": _QWEN_VISION,
            "image_token_id": IMAGE_TOKEN,
        },
        layers=("Qwen2VLVisionBlock", "Qwen2VLDecoderLayer"),
        units=(*_two("model.visual.blocks"), *_LANGUAGE_MODEL_UNITS),
        inputs={**_IMAGE_TEXT, "mm_token_type_ids": "image mask", "pixel_values": "patches", "image_grid_thw": "grids"},
    ),
}
