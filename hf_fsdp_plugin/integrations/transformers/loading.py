"""``from_pretrained`` under RAM-efficient loading: only the first rank of a machine reads the weights.

Transformers 5 has kept the half of it that comes after reading (what is not loaded is not initialised either, and
non-persistent buffers get memory), but lets every rank read all weights. Here the other ranks read the names and
shapes alone, and their parameters stay on the meta device until rank 0's are broadcast. Read against transformers
5.23; 5.17 fills the spared ranks' parameters with zeros afterwards, so that the report cannot see there what was
spared. Can go once ``PreTrainedModel._load_pretrained_model`` asks ``is_fsdp_enabled`` again.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from types import ModuleType
from typing import Any

from hf_fsdp_plugin.integrations.import_hooks import when_imported

logger = logging.getLogger(__name__)
_METHOD = "_load_pretrained_model"
_MARK = "_hf_fsdp_original"


def hook_loading() -> None:
    """Hook ``from_pretrained``, now or when it is imported. Called once a spec asks for RAM-efficient loading."""
    when_imported("transformers.modeling_utils", _hook_modeling)


def _hook_modeling(module: ModuleType) -> None:
    cls = module.PreTrainedModel
    original: Callable[..., Any] = getattr(cls, _METHOD)
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def load(model: Any, state_dict: Any, files: Any, load_config: Any, expected_keys: Any = None) -> Any:
        spared = module.is_fsdp_enabled() and not module.is_local_dist_rank_0()
        # Quantized weights have memory of their own making, and expected keys are those of an adapter alone.
        if not spared or load_config.is_quantized or load_config.device_mesh is not None or expected_keys is not None:
            return original(model, state_dict, files, load_config, expected_keys)
        shapes = _shapes(module, state_dict, files, load_config)
        if _holds_both_of_a_tie(model, shapes):
            # Whether they are tied is for their values to say, and the ranks must agree on it.
            logger.warning("tied weights are in the checkpoint under both names, so that every rank reads it.")
            return original(model, state_dict, files, load_config, expected_keys)
        return original(model, shapes, None, replace(load_config, device_map={"": "meta"}), expected_keys)

    setattr(load, _MARK, original)
    setattr(cls, _METHOD, staticmethod(load))


def _shapes(module: ModuleType, state_dict: Any, files: Iterable[str] | None, load_config: Any) -> dict[str, Any]:
    """The checkpoint's tensors without their values."""
    if state_dict is not None:
        return {name: tensor[...].to("meta") for name, tensor in state_dict.items()}
    shapes: dict[str, Any] = {}
    for file in files or ():
        shapes.update(module.load_state_dict(file, map_location="meta", weights_only=load_config.weights_only))
    return shapes


def _holds_both_of_a_tie(model: Any, names: Iterable[str]) -> bool:
    """Names in a checkpoint may lack the base model's prefix, or have one that the model lacks."""
    ties = getattr(model, "all_tied_weights_keys", None) or {}
    listed = list(names)

    def present(name: str) -> bool:
        return any(key == name or key.endswith(f".{name}") or name.endswith(f".{key}") for key in listed)

    return any(present(target) and present(source) for target, source in ties.items())
