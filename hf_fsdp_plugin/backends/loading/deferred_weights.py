"""Models whose weights rank 0 alone has until ``prepare``: on the other ranks they are on the meta device.

Such a model can be moved, cast, resized, tied, copied and changed in place. This changes shapes and dtypes as on rank
0, which has the values. torch raises an error where a value is read, to which :func:`explain` adds the remedy.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import MethodType
from typing import Any, Final

from torch import nn

from hf_fsdp_plugin.plan.fsdp_plan import FsdpPlan
from hf_fsdp_plugin.problems import Problem, SpecError
from hf_fsdp_plugin.state import process
from hf_fsdp_plugin.torch_private.modules import leave_on_meta

_FIX: Final = (
    "Compute with the weights after prepare(), or load the model in the dtype of its files (dtype='auto'), or set "
    "fsdp_cpu_ram_efficient_loading: false, with which every rank loads all weights into its own memory."
)


class DeferredModels(weakref.WeakSet[nn.Module]):
    """The models that this rank has loaded without weights."""


deferred_models = process.owns(DeferredModels, kept=True)
"""Return the models of this process. They outlive ``uninstall()``."""


def defer_weights(model: Any) -> None:
    """Let a script use a model that was left on the meta device as far as this needs no values."""
    leave_on_meta(model)
    # The mean of the old embeddings needs their values.
    model.resize_token_embeddings = MethodType(_resize_token_embeddings, model)
    deferred_models().add(model)


def _resize_token_embeddings(
    model: Any, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
) -> Any:
    original: Callable[..., Any] = type(model).resize_token_embeddings
    return original(model, new_num_tokens, pad_to_multiple_of, mean_resizing=mean_resizing and not _is_deferred(model))


def _is_deferred(model: nn.Module) -> bool:
    return any(parameter.is_meta for parameter in model.parameters())


def check_can_fill(plan: FsdpPlan, model: nn.Module) -> None:
    """Raise ``SpecError`` if a model is on the meta device and its plan sends no weights."""
    if _is_deferred(model) and not (plan.ram_efficient or plan.pre_sharded):
        message = f"{plan.model_class} has weights on the meta device, but these settings send rank 0's weights to no "
        message += "other rank."
        fix = "Set fsdp_cpu_ram_efficient_loading and fsdp_sync_module_states to true."
        raise SpecError([Problem(code="FSDP-E661", setting="loading.ram_efficient", message=message, fix=fix)])


def explain(error: BaseException) -> Problem | None:
    """Return a problem with the remedy for an error of torch about a model that has its weights on rank 0 only."""
    names = sorted({type(model).__name__ for model in deferred_models() if _is_deferred(model)})
    if not names or not isinstance(error, RuntimeError) or "meta" not in str(error):
        return None
    message = f"a script computes with weights of {' or '.join(names)} before prepare(). They differ from the weights "
    message += "in the files, so rank 0 alone has them: this rank has the model on the meta device."
    return Problem(code="FSDP-E662", setting="loading.ram_efficient", message=message, fix=_FIX)
