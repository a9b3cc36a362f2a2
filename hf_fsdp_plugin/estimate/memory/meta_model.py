"""A model on the meta device: its batch, its equal layers, and tensors that pass borders and layers that do not run."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hf_fsdp_plugin.problems import Problem, SpecError
from hf_fsdp_plugin.torch_private.functions import tree_leaves, tree_map_only

_MIN_LAYERS = 5
"""Number of equal layers from which on some of them are skipped: the first two and the last two always run."""


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
    """Return the features of a sound, and the tokens of its text. Two features are one position of the encoder."""
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


@dataclass(frozen=True, kw_only=True, slots=True)
class EqualLayers:
    """Layers with the same structure. Some of them run. The others copy what was counted for `representative`.

    Attributes:
        representative: name of the second layer. The first and the last layer may differ at their borders.
        copies: names of the layers that do not run.
    """

    representative: str
    copies: tuple[str, ...]


def equal_layers(model: nn.Module, distinct: Collection[str] = ()) -> list[EqualLayers]:
    """Return the groups of equal layers in the model's outermost module lists that are large enough to skip some.

    Args:
        distinct: names of parameters that are computed in another dtype than the others.
    """
    found = []
    for path, layers in _outermost_lists(model):
        groups: dict[object, list[str]] = defaultdict(list)
        for index, layer in enumerate(layers):
            prefix = f"{path}.{index}."
            special = tuple(name.removeprefix(prefix) for name in distinct if name.startswith(prefix))
            groups[_structure(layer), special].append(f"{path}.{index}")
        found += [
            EqualLayers(representative=names[1], copies=tuple(names[2:-1]))
            for names in groups.values()
            if len(names) >= _MIN_LAYERS
        ]
    return found


def _outermost_lists(model: nn.Module) -> Iterator[tuple[str, nn.ModuleList]]:
    inside: list[str] = []
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and not any(path.startswith(outer) for outer in inside):
            inside.append(f"{path}.")
            yield path, module


def _structure(layer: nn.Module) -> object:
    """Return the properties that equal layers have in common: classes, shapes, dtypes, settings (sliding windows)."""
    modules = tuple((name, type(module), _settings(module)) for name, module in layer.named_modules())
    parameters = tuple((name, p.shape, p.dtype, p.requires_grad) for name, p in layer.named_parameters())
    return modules, parameters


def _settings(module: nn.Module) -> tuple[object, ...]:
    return tuple(
        (name, value)
        for name, value in vars(module).items()
        if isinstance(value, int | float | str | bool) and "idx" not in name and "index" not in name
    )


class Border(torch.autograd.Function):
    """Passes tensors through, and calls a function when their gradients are computed, as FSDP's hooks do."""

    @staticmethod
    def forward(ctx: Any, on_backward: Callable[[], None], *tensors: torch.Tensor) -> Any:
        ctx.on_backward = on_backward
        return tensors

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        ctx.on_backward()
        return (None, *grads)


def hidden_of(args: Any, kwargs: Any) -> torch.Tensor:
    """Return the first tensor with a gradient among a layer's inputs, else the first tensor."""
    tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
    return next((x for x in tensors if x.requires_grad), tensors[0])


@dataclass(frozen=True, slots=True)
class Like:
    """Stands for a tensor in the output of a layer, without its storage."""

    shape: torch.Size
    dtype: torch.dtype


def copy_output(output: Any, hidden: torch.Tensor, others: Iterable[torch.Tensor]) -> Any:
    """Return the output of an equal layer, with `hidden` in place of the first tensor of its shape.

    Other tensors of the output, such as a position bias, are inputs of the same shape if there are any.
    """
    used: list[bool] = []
    inputs = {(tensor.shape, tensor.dtype): tensor for tensor in others}

    def tensor_of(like: Like) -> torch.Tensor:
        if not used and like.shape == hidden.shape:
            used.append(True)
            return hidden
        if (like.shape, like.dtype) in inputs:
            return inputs[like.shape, like.dtype]
        return torch.empty(like.shape, dtype=like.dtype, device="meta")

    return tree_map_only(Like, tensor_of, output)


def template_of(output: Any) -> Any:
    """Return an output without its storages."""
    return tree_map_only(torch.Tensor, lambda tensor: Like(tensor.shape, tensor.dtype), output)


def cast_floats(dtype: torch.dtype | None, tree: Any) -> Any:
    """Return a tree with its floating-point tensors in a dtype; unchanged for ``None``."""
    if dtype is None:
        return tree
    return tree_map_only(torch.Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, tree)


def with_border(inputs: Any, on_backward: Callable[[], None]) -> Any:
    """Return the inputs, with all tensors that need gradients passed through one border."""
    leaves = [x for x in tree_leaves(inputs) if isinstance(x, torch.Tensor) and x.requires_grad]
    if not leaves or not torch.is_grad_enabled():
        return inputs
    passed = dict(zip(map(id, leaves), Border.apply(on_backward, *leaves), strict=True))
    return tree_map_only(torch.Tensor, lambda tensor: passed.get(id(tensor), tensor), inputs)


def at_gradient(output: Any, call: Callable[[], None]) -> None:
    """Call a function once, when the first gradient of an output is computed."""
    called: list[bool] = []

    def on_gradient(gradient: torch.Tensor) -> None:
        if not called:
            called.append(True)
            call()

    for tensor in tree_leaves(output):
        if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
            tensor.register_hook(on_gradient)


def replace_forward(module: nn.Module, forward: Callable[..., Any], undo: ExitStack) -> None:
    """Set an instance's ``forward`` until `undo` is closed."""
    if "forward" in vars(module):
        undo.callback(setattr, module, "forward", module.forward)
    else:
        undo.callback(delattr, module, "forward")
    module.forward = forward
