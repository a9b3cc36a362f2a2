"""Model families that are trained on ranks: those of the plan's tests, with batches whose loss is a mean over rows."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

sys.path.append(str(Path(__file__).resolve().parents[1]))

import transformers as hf
from model_families import FAMILIES, TEXT_CONFIG, VISION_CONFIG

Batch = dict[str, torch.Tensor]
NUM_ROWS = 4
LENGTH = 8
IMAGE_TOKEN = 7


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A model, its layer classes, a global batch for each step, and a loss that is a mean over rows."""

    build: Callable[[], nn.Module]
    layers: tuple[str, ...]
    batch: Callable[[int], Batch]
    loss: Callable[[nn.Module, Batch], torch.Tensor]


def _tokens(generator: torch.Generator) -> torch.Tensor:
    """Tokens without special tokens: padding and image tokens would give the ranks' parts different weights."""
    return torch.randint(8, 96, (NUM_ROWS, LENGTH), generator=generator)


def _batch(family: str, step: int) -> Batch:
    """Random values in the shapes of the family's example."""
    generator = torch.Generator().manual_seed(1000 + step)
    example = FAMILIES[family].inputs() if family in FAMILIES else {}
    batch: Batch = {}
    for name, value in example.items():
        if value.is_floating_point():
            batch[name] = torch.randn(NUM_ROWS, *value.shape[1:], generator=generator)
        elif value.dim() == 1:
            batch[name] = torch.randint(0, 2, (NUM_ROWS,), generator=generator)
        elif name == "labels" and "input_ids" in example:
            batch[name] = batch["input_ids"].clone()
        else:
            batch[name] = _tokens(generator)
    return batch


def _clip_batch(step: int) -> Batch:
    generator = torch.Generator().manual_seed(step)
    tokens = _tokens(generator)
    return {"input_ids": tokens, "pixel_values": torch.randn(NUM_ROWS, 3, 8, 8, generator=generator)}


def _with_image_tokens(tokens: torch.Tensor) -> torch.Tensor:
    tokens[:, 1:5] = IMAGE_TOKEN
    return tokens


def _llava_batch(step: int) -> Batch:
    generator = torch.Generator().manual_seed(step)
    tokens = _with_image_tokens(_tokens(generator))
    images = torch.randn(NUM_ROWS, 3, 8, 8, generator=generator)
    return {"input_ids": tokens, "labels": tokens.clone(), "pixel_values": images}


def _qwen_vl_batch(step: int) -> Batch:
    """One image of 4 x 4 patches per row; the patches of all images are concatenated."""
    generator = torch.Generator().manual_seed(step)
    tokens = _with_image_tokens(_tokens(generator))
    return {
        "input_ids": tokens,
        "labels": tokens.clone(),
        "mm_token_type_ids": (tokens == IMAGE_TOKEN).int(),
        "pixel_values": torch.randn(NUM_ROWS * 16, 96, generator=generator),
        "image_grid_thw": torch.tensor([[1, 4, 4]]).repeat(NUM_ROWS, 1),
    }


def _own_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    output = model(**batch)
    return output.loss if getattr(output, "loss", None) is not None else output.last_hidden_state.square().mean()


def _clip_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Mean over matching pairs. CLIP's contrastive loss compares rows with each other: it is not a mean over rows."""
    return model(**batch).logits_per_image.diagonal().mean()


def _build_clip() -> nn.Module:
    text, vision = hf.CLIPTextConfig(**TEXT_CONFIG, max_position_embeddings=16), hf.CLIPVisionConfig(**VISION_CONFIG)
    return hf.CLIPModel(hf.CLIPConfig(text_config=text.to_dict(), vision_config=vision.to_dict(), projection_dim=16))


def _build_qwen_vl() -> nn.Module:
    model = FAMILIES["qwen2-vl"].build()
    model.config.image_token_id = IMAGE_TOKEN
    return model


def _from_plan_tests(name: str) -> Trained:
    family = FAMILIES[name]
    return Trained(build=family.build, layers=family.layers, batch=lambda step: _batch(name, step), loss=_own_loss)


TRAINED: dict[str, Trained] = {name: _from_plan_tests(name) for name in FAMILIES}
TRAINED["llava"] = Trained(
    build=FAMILIES["llava"].build, layers=FAMILIES["llava"].layers, batch=_llava_batch, loss=_own_loss
)
TRAINED["qwen2-vl"] = Trained(
    build=_build_qwen_vl, layers=FAMILIES["qwen2-vl"].layers, batch=_qwen_vl_batch, loss=_own_loss
)
TRAINED["clip"] = Trained(build=_build_clip, layers=("CLIPEncoderLayer",), batch=_clip_batch, loss=_clip_loss)


def build(family: str) -> nn.Module:
    """Build the model with the same weights on every rank, and without randomness in forward."""
    torch.manual_seed(0)
    model = TRAINED[family].build()
    for module in model.modules():
        for name, value in vars(module).items():
            if ("drop" in name or name == "p") and isinstance(value, float):
                setattr(module, name, 0.0)
    if hasattr(model, "config"):
        model.config.use_cache = False
    return model.train()
