"""Made images: models that read text with images get both, and compute gradients of their vision tower."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf

from hf_fsdp_plugin.integrations.preflight.clone import find_clone
from hf_fsdp_plugin.integrations.preflight.made_data import MadeData, collate
from hf_fsdp_plugin.integrations.preflight.sizes import Reduction, small_config

TEXT = {
    "hidden_size": 1536, "intermediate_size": 4096, "num_hidden_layers": 8, "num_attention_heads": 12,
    "num_key_value_heads": 2, "vocab_size": 32000,
}  # fmt: skip
ROPE = {"rope_parameters": {"rope_type": "default", "mrope_section": [16, 24, 24], "rope_theta": 1e6}}
TOWER = {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 6, "num_attention_heads": 16}


def make(name: str) -> tuple[Any, Any]:
    """Return the class and the config of a model of realistic widths."""
    config_class, model_class = getattr(hf, f"{name}Config"), getattr(hf, f"{name}ForConditionalGeneration")
    settings: dict[str, dict[str, Any]] = {
        "Llava": {"text_config": {"model_type": "llama", **TEXT}},
        "Qwen2VL": {
            "text_config": {**TEXT, **ROPE},
            "vision_config": {"depth": 4, "embed_dim": 1280, "hidden_size": 1536, "num_heads": 16},
        },
        "Qwen2_5_VL": {
            "text_config": {**TEXT, **ROPE},
            "vision_config": {"depth": 4, "hidden_size": 1280, "out_hidden_size": 1536, "num_heads": 16},
        },
        "Idefics3": {"vision_config": {**TOWER, "image_size": 364, "patch_size": 14}, "scale_factor": 2},
        "Gemma3": {
            "text_config": {"hidden_size": 2560, "num_attention_heads": 8, "head_dim": 256, "num_hidden_layers": 6},
            "vision_config": {**TOWER, "image_size": 896, "patch_size": 14},
        },
        "LlavaNext": {"text_config": {"model_type": "llama", **TEXT}},
    }
    return model_class, config_class(**settings[name])


def clone_of(name: str) -> Any:
    model_class, config = make(name)
    clone = find_clone(model_class, config)
    assert [problem.message for problem in clone.problems if problem.severity == "warning"] == []
    torch.manual_seed(0)
    return model_class(clone.config)


@pytest.mark.parametrize("name", ["Llava", "Qwen2VL", "Qwen2_5_VL", "Idefics3"])
def test_vision_tower_is_trained_with_made_images(name: str) -> None:
    model = clone_of(name)
    data = MadeData(model, 3, images=True)
    assert data.no_images == ""
    batch = collate([data[0], data[2]])
    assert batch["pixel_values"].is_floating_point() and "return_loss" not in batch
    assert (batch["labels"] == -100).sum() == (batch["input_ids"] == _image_token(model)).sum() > 0
    model(**batch).loss.backward()
    towers = [p for part, p in model.named_parameters() if "vis" in part and p.grad is not None]
    assert any(parameter.grad.abs().sum() > 0 for parameter in towers)


def test_large_images_are_reduced_for_made_data_only() -> None:
    _, config = make("Gemma3")
    assert small_config(config, Reduction(num_layers=2)).vision_config.image_size == 448
    assert small_config(config, Reduction(num_layers=2, vocabulary=None)).vision_config.image_size == 896


def test_model_that_cuts_images_gets_text_with_the_reason() -> None:
    data = MadeData(clone_of("LlavaNext"), 2, images=True)
    assert "parts" in data.no_images and "pixel_values" not in data[0]


def test_images_are_not_made_unless_asked_for() -> None:
    data = MadeData(clone_of("Llava"), 2)
    assert "pixel_values" not in data[0] and data.no_images == ""


def _image_token(model: Any) -> int:
    return int(getattr(model.config, "image_token_id", None) or model.config.image_token_index)
