"""Models of many architectures, made from configs (as for pretraining), trained with the Trainer and saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers as t

from scripts.ecosystem.behaviors.common import (
    SMALL,
    Regression,
    images,
    made,
    numbers,
    tokens,
    trained,
)

PIXELS = {"image_size": 32, "patch_size": 8}


def clip() -> Any:
    text = {**SMALL, "projection_dim": 16}
    vision = {
        name: SMALL[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    }
    config = t.CLIPConfig(text_config=text, vision_config={**vision, **PIXELS, "projection_dim": 16}, projection_dim=16)
    rows = [
        {"pixel_values": picture["pixel_values"], "input_ids": row}
        for picture, row in zip(images(), tokens(), strict=True)
    ]

    def collate(found: Any) -> dict[str, Any]:
        return {**t.default_data_collator(found), "return_loss": True}

    return trained(made(t.CLIPModel, config), rows, more={"data_collator": collate})


def _vision() -> dict[str, Any]:
    sizes = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    return {**{name: SMALL[name] for name in sizes}, **PIXELS}


def vision_encoder_decoder() -> Any:
    encoder = t.ViTConfig(**_vision())
    decoder = t.BertConfig(**SMALL, is_decoder=True, add_cross_attention=True)
    for config in (encoder, decoder):
        config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
    config = t.VisionEncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    config.decoder_start_token_id, config.pad_token_id = 1, 0
    rows = [{**picture, "labels": row} for picture, row in zip(images(), tokens(), strict=True)]
    return trained(made(t.VisionEncoderDecoderModel, config), rows)


_REMOTE = """from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel


class TinyConfig(PreTrainedConfig):
    model_type = "tiny_remote"

    def __init__(self, width=8, **kwargs):
        self.width = width
        super().__init__(**kwargs)


class TinyModel(PreTrainedModel):
    config_class = TinyConfig

    def __init__(self, config):
        super().__init__(config)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(config.width, config.width), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(config.width, 1)
        self.post_init()

    def forward(self, x, labels=None):
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x)
        return {"logits": logits} if labels is None else {"loss": (logits - labels).square().mean(), "logits": logits}
"""


def remote_code() -> Any:
    folder = Path("remote") / str(torch.distributed.get_rank() if torch.distributed.is_initialized() else 0)
    folder.mkdir(parents=True)
    (folder / "tiny_remote.py").write_text(_REMOTE)
    (folder / "config.json").write_text(
        '{"model_type": "tiny_remote", "width": 8, "auto_map": '
        '{"AutoConfig": "tiny_remote.TinyConfig", "AutoModel": "tiny_remote.TinyModel"}}'
    )
    config = t.AutoConfig.from_pretrained(folder, trust_remote_code=True)
    return trained(t.AutoModel.from_config(config, trust_remote_code=True), numbers())


def plain_module() -> Any:
    return trained(Regression(), numbers())
