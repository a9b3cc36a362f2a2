"""A model on the meta device: its batch, and its equal layers, of which only some need to run."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from hf_fsdp_plugin.problems import Problem, SpecError

_MIN_LAYERS = 5
"""Number of equal layers from which on some of them are skipped: the first two and the last two always run."""


def meta_batch(model: nn.Module, *, micro_batch: int, seq_len: int) -> dict[str, Any]:
    """Return inputs and labels of a training forward, as tensors on the meta device.

    Text models get tokens, image classifiers pixels, speech models features of the longest sound, and models that
    contrast text with images both, with ``return_loss``. The tokens are at most as many as the model has positions.

    Raises:
        SpecError: the model has other inputs (FSDP-E811).
    """
    # The forward of a PeftModel without a task type takes any arguments, so that of the model inside is read.
    model = inner() if callable(inner := getattr(model, "get_base_model", None)) else model
    config: Any = getattr(model, "config", None)
    main = getattr(model, "main_input_name", "input_ids")
    accepted = inspect.signature(model.forward).parameters.keys()

    def indices(*shape: int) -> torch.Tensor:
        return torch.zeros(micro_batch, *shape, dtype=torch.long, device="meta")

    def floats(*shape: int) -> torch.Tensor:
        return torch.zeros(micro_batch, *shape, device="meta")

    def pixels(vision: Any) -> torch.Tensor:
        size = getattr(vision, "image_size", 224)
        sides = size if isinstance(size, tuple | list) else (size, size)
        return floats(getattr(vision, "num_channels", 3), *sides)

    if config is not None and {"return_loss", "pixel_values", "input_ids"} <= accepted:
        text, vision = getattr(config, "text_config", config), getattr(config, "vision_config", config)
        length = min(seq_len, getattr(text, "max_position_embeddings", seq_len))
        return {"input_ids": indices(length), "pixel_values": pixels(vision), "return_loss": True}
    has_loss = "labels" in accepted or "start_positions" in accepted
    is_speech = main == "input_features" and hasattr(config, "num_mel_bins")
    known = main in ("input_ids", "pixel_values") or is_speech
    if config is None or not known or main not in accepted or not has_loss:
        name, main = type(model).__name__, getattr(model, "main_input_name", "unknown")
        message = f"the activations of {name} cannot be counted: its main input is {main}, or it has no labels "
        fix = "Use a model with a head for text, images or speech, such as a causal language model."
        raise SpecError([Problem(code="FSDP-E811", message=f"{message}from which it computes a loss.", fix=fix)])
    if is_speech:  # two features are one position of the encoder
        length = min(seq_len, getattr(config, "max_target_positions", seq_len))
        features = floats(config.num_mel_bins, 2 * config.max_source_positions)
        return {"input_features": features, "labels": indices(length)}
    if main == "pixel_values":
        return {"pixel_values": pixels(config), "labels": indices()}
    tokens, one_each = indices(seq_len), indices()
    if "start_positions" in accepted:
        return {"input_ids": tokens, "start_positions": one_each, "end_positions": one_each}
    labels = tokens
    if type(model).__name__.endswith(("ForSequenceClassification", "ForMultipleChoice", "ForNextSentencePrediction")):
        kind = getattr(config, "problem_type", None)
        has_one_label = kind == "single_label_classification" or (kind is None and config.num_labels > 1)
        labels = one_each if has_one_label else floats(config.num_labels)
    return {"input_ids": tokens, "labels": labels}


def equal_layers(model: nn.Module, distinct: Collection[str] = ()) -> dict[str, tuple[str, ...]]:
    """Return the groups of equal layers in the model's outermost module lists that are large enough to skip some.

    The result has the second layer of each group, which represents it, and the layers that do not run: all but the
    first two and the last, as the first and the last layer may differ at their borders.

    Args:
        distinct: names of parameters that are computed in another dtype than the others.
    """
    found: dict[str, tuple[str, ...]] = {}
    outermost: list[str] = []
    for path, layers in model.named_modules():
        if not isinstance(layers, nn.ModuleList) or any(path.startswith(outer) for outer in outermost):
            continue
        outermost.append(f"{path}.")
        groups: dict[object, list[str]] = defaultdict(list)
        for index, layer in enumerate(layers):
            name = f"{path}.{index}"
            special = tuple(each.removeprefix(name) for each in distinct if each.startswith(f"{name}."))
            groups[_structure(layer), special].append(name)
        found |= {names[1]: tuple(names[2:-1]) for names in groups.values() if len(names) >= _MIN_LAYERS}
    return found


def _structure(layer: nn.Module) -> object:
    """Return the properties that equal layers have in common: classes, shapes, dtypes, settings (sliding windows)."""

    def settings(module: nn.Module) -> tuple[object, ...]:
        return tuple(
            (name, value)
            for name, value in vars(module).items()
            if isinstance(value, int | float | str | bool) and "idx" not in name and "index" not in name
        )

    modules = tuple((name, type(module), settings(module)) for name, module in layer.named_modules())
    parameters = tuple((name, p.shape, p.dtype, p.requires_grad) for name, p in layer.named_parameters())
    return modules, parameters
