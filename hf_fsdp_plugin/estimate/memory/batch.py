"""A batch on the meta device for a model, by its class and config."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from hf_fsdp_plugin.problems import Problem, SpecError


def meta_batch(model: nn.Module, *, micro_batch: int, seq_len: int) -> dict[str, Any]:
    """Return inputs and labels of a training forward, as tensors on the meta device.

    Text models get tokens, image classifiers pixels, speech models features of the longest sound, and models that
    contrast text with images both, with ``return_loss``. The tokens are at most as many as the model has positions.

    Raises:
        SpecError: the model has other inputs (FSDP-E811).
    """
    model = _without_adapters(model)
    name = type(model).__name__
    config: Any = getattr(model, "config", None)
    main = getattr(model, "main_input_name", "input_ids")
    accepted = inspect.signature(model.forward).parameters
    if config is not None and {"return_loss", "pixel_values", "input_ids"} <= set(accepted):
        return _text_and_images(config, micro_batch, seq_len)
    has_loss = "labels" in accepted or "start_positions" in accepted
    is_speech = main == "input_features" and hasattr(config, "num_mel_bins")
    known = main in ("input_ids", "pixel_values") or is_speech
    if config is None or not known or main not in accepted or not has_loss:
        raise SpecError([_other_inputs(model)])
    if is_speech:
        return _speech(config, micro_batch, seq_len)
    if main == "pixel_values":
        return _images(config, micro_batch)
    tokens = torch.zeros(micro_batch, seq_len, dtype=torch.long, device="meta")
    batch = {"input_ids": tokens}
    one_each = torch.zeros(micro_batch, dtype=torch.long, device="meta")
    if "start_positions" in accepted:
        return {**batch, "start_positions": one_each, "end_positions": one_each}
    if name.endswith(("ForSequenceClassification", "ForMultipleChoice", "ForNextSentencePrediction")):
        kind = getattr(config, "problem_type", None)
        if kind == "single_label_classification" or (kind is None and config.num_labels > 1):
            batch["labels"] = one_each
        else:
            batch["labels"] = torch.zeros(micro_batch, config.num_labels, device="meta")
        return batch
    return {**batch, "labels": tokens}


def _without_adapters(model: nn.Module) -> nn.Module:
    """Return the model inside a ``PeftModel``, whose own forward takes any arguments if it has no task type."""
    inner = getattr(model, "get_base_model", None)
    return inner() if callable(inner) else model


def _images(config: Any, micro_batch: int) -> dict[str, torch.Tensor]:
    size = getattr(config, "image_size", 224)
    height, width = size if isinstance(size, tuple | list) else (size, size)
    pixels = torch.zeros(micro_batch, getattr(config, "num_channels", 3), height, width, device="meta")
    return {"pixel_values": pixels, "labels": torch.zeros(micro_batch, dtype=torch.long, device="meta")}


def _speech(config: Any, micro_batch: int, seq_len: int) -> dict[str, torch.Tensor]:
    """Return the features of a sound, of which two are one position of the encoder, and the tokens of its text."""
    frames = 2 * config.max_source_positions
    length = min(seq_len, getattr(config, "max_target_positions", seq_len))
    return {
        "input_features": torch.zeros(micro_batch, config.num_mel_bins, frames, device="meta"),
        "labels": torch.zeros(micro_batch, length, dtype=torch.long, device="meta"),
    }


def _text_and_images(config: Any, micro_batch: int, seq_len: int) -> dict[str, Any]:
    text, vision = getattr(config, "text_config", config), getattr(config, "vision_config", config)
    length = min(seq_len, getattr(text, "max_position_embeddings", seq_len))
    return {
        "input_ids": torch.zeros(micro_batch, length, dtype=torch.long, device="meta"),
        "pixel_values": _images(vision, micro_batch)["pixel_values"],
        "return_loss": True,
    }


def _other_inputs(model: nn.Module) -> Problem:
    main = getattr(model, "main_input_name", "unknown")
    return Problem(
        code="FSDP-E811",
        message=f"the activations of {type(model).__name__} cannot be counted: its main input is {main}, or it has no "
        "labels from which it computes a loss.",
        fix="Use a model with a head for text, images or speech, such as a causal language model.",
    )
