"""Builds the model that a config describes, on the meta device."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hf_fsdp_plugin.plan.model_config import config_and_class


def meta_model(path_or_id: str | Path) -> nn.Module:
    """Return the model that a config describes. Its parameters are on ``meta``, and are tied as in a loaded model.

    Args:
        path_or_id: as in :func:`hf_fsdp_plugin.plan.model_config.config_and_class`, with the same errors.
    """
    from transformers.utils import logging

    with redirect_stdout(sys.stderr):  # libraries may print other lines than the result of a verb
        config, model_class = config_and_class(path_or_id)
        verbosity = logging.get_verbosity()
        logging.set_verbosity_error()  # hides warnings about generation settings, which do not affect a plan
        try:
            model = on_meta(model_class, config)
        except Exception as error:
            message = f"{path_or_id}: {model_class.__name__} cannot be built from its config: {error}"
            raise ValueError(message) from error
        finally:
            logging.set_verbosity(verbosity)
    if not isinstance(model, nn.Module):
        raise ValueError(f"{path_or_id}: architectures is {model_class.__name__}, which is not a model class.")
    return model


def on_meta(model_class: Any, config: Any) -> nn.Module:
    """Return the model of a config without weights."""
    with default_dtype(config), torch.device("meta"):
        model: nn.Module = model_class(config)
    return model


def max_positions(model: nn.Module) -> int:
    """Return the largest number of tokens of a sample; 0 if the config of the model has no limit."""
    config: Any = getattr(model, "config", None)
    config = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    longest = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
    return longest if isinstance(longest, int) else 0


@contextmanager
def default_dtype(config: Any) -> Iterator[None]:
    """Make the config's dtype the default dtype, for submodels too, as ``from_pretrained`` does."""
    dtype, before = getattr(config, "dtype", None), torch.get_default_dtype()
    for name in getattr(config, "sub_configs", ()):
        if (sub_config := getattr(config, name, None)) is not None:
            sub_config.dtype = dtype
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype, None)
    torch.set_default_dtype(dtype if isinstance(dtype, torch.dtype) and dtype.is_floating_point else before)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
