"""``from_pretrained`` with RAM-efficient loading: only the first rank of a machine reads the weights.

In Transformers 5 every rank reads all weights. With this replacement, the other ranks of a machine read only names and
shapes, and their parameters stay on the meta device until rank 0 broadcasts its weights. Transformers itself
materializes non-persistent buffers, and does not initialize parameters that are not loaded. Read from transformers
5.23. Transformers 5.17 also fills the parameters of the other ranks with zeros, so the report cannot observe which
ranks loaded the weights.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from transformers import modeling_utils

from hf_fsdp_plugin.integrations.transformers.private import tied_weights

logger = logging.getLogger(__name__)


def load_pretrained_model(
    original: Callable[..., Any],
    model: Any,
    state_dict: Any,
    files: Iterable[str] | None,
    load_config: Any,
    expected_keys: Any = None,
) -> Any:
    """Load the weights on the first rank of a machine, and only names and shapes on the others."""
    skip = modeling_utils.is_fsdp_enabled() and not modeling_utils.is_local_dist_rank_0()
    # Quantized weights allocate their own memory, and expected_keys is given only for adapters.
    if not skip or load_config.is_quantized or load_config.device_mesh is not None or expected_keys is not None:
        return original(model, state_dict, files, load_config, expected_keys)
    shapes = _read_shapes(state_dict, files, load_config)
    if _has_both_names_of_a_tie(model, shapes):
        # Transformers ties them only if their values are equal, and all ranks must make the same decision.
        logger.warning("The checkpoint contains tied weights under both names, so every rank reads it.")
        return original(model, state_dict, files, load_config, expected_keys)
    return original(model, shapes, None, replace(load_config, device_map={"": "meta"}), expected_keys)


def _read_shapes(state_dict: Any, files: Iterable[str] | None, load_config: Any) -> dict[str, Any]:
    """Return the checkpoint's state dict with every tensor on the meta device, so that no weights are loaded."""
    if state_dict is not None:
        return {name: tensor[...].to("meta") for name, tensor in state_dict.items()}
    shapes: dict[str, Any] = {}
    for file in files or ():
        shapes.update(modeling_utils.load_state_dict(file, map_location="meta", weights_only=load_config.weights_only))
    return shapes


def _has_both_names_of_a_tie(model: Any, names: Iterable[str]) -> bool:
    """Return whether the checkpoint has both a tied parameter and its source.

    Names in a checkpoint may lack the base model's prefix, or have a prefix that the model lacks.
    """
    listed = list(names)

    def present(name: str) -> bool:
        return any(key == name or key.endswith(f".{name}") or name.endswith(f".{key}") for key in listed)

    return any(present(target) and present(source) for target, source in tied_weights(model).items())
