"""Refuses ``copy.deepcopy`` of sharded modules: a copy would have one rank's shards, and no units."""

from __future__ import annotations

from functools import partial
from typing import Any, NoReturn

from torch import nn
from torch.distributed.tensor import DTensor

from hf_fsdp_plugin.plan.names import unwrapped
from hf_fsdp_plugin.problems import Problem, SpecError
from hf_fsdp_plugin.torch_private import fsdp1
from hf_fsdp_plugin.torch_private.modules import parameters as own_parameters


def refuse_copies(model: nn.Module) -> None:
    """Make ``copy.deepcopy`` of a sharded model, and of its modules with sharded parameters, raise ``SpecError``.

    ``torch.optim.swa_utils.AveragedModel`` copies the model, too.
    """
    for module in model.modules():
        if any(_is_sharded(parameter) for inner in module.modules() for parameter in own_parameters(inner).values()):
            # Copying looks for this method on the object. fully_shard has set another one on its classes.
            module.__deepcopy__ = partial(_refuse, type(unwrapped(module)).__name__)  # type: ignore[assignment]


def _is_sharded(parameter: Any) -> bool:
    return parameter is not None and (isinstance(parameter, DTensor) or fsdp1.is_flattened(parameter))


def _refuse(name: str, memo: Any) -> NoReturn:
    message = f"copy.deepcopy was called with a {name} that FSDP has sharded, or with an object that contains it."
    fix = (
        "For an average of the weights (AveragedModel), use hfp.ExponentialMovingAverage. For a snapshot, call "
        "accelerator.get_state_dict(model) on all ranks. For a second model, copy it before prepare()."
    )
    raise SpecError([Problem(code="FSDP-E310", message=message, fix=fix)])
