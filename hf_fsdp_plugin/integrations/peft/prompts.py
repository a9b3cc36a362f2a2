"""The virtual tokens of PEFT's prompt learning methods, when a sharded model is saved."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def prompt_embeddings(model: Any) -> Iterator[None]:
    """Compute the virtual tokens of prompt learning methods on all ranks, and answer with them in the block.

    Collective. PEFT computes them with the prompt encoder when it saves, and a sharded encoder runs on all ranks only.
    """
    configs = getattr(model, "peft_config", {})
    prompts = {name: config for name, config in configs.items() if getattr(config, "is_prompt_learning", False)}
    if not prompts or not hasattr(model, "get_prompt_embedding_to_save"):
        yield
        return
    with torch.no_grad():
        computed = {name: model.get_prompt_embedding_to_save(name) for name in prompts}
    modes = {name: config.inference_mode for name, config in prompts.items()}
    model.__dict__["get_prompt_embedding_to_save"] = lambda adapter_name: computed[adapter_name]
    for config in prompts.values():
        config.inference_mode = False  # otherwise PEFT reads the weight of the encoder, which is sharded
    try:
        yield
    finally:
        del model.__dict__["get_prompt_embedding_to_save"]
        for name, mode in modes.items():
            prompts[name].inference_mode = mode
