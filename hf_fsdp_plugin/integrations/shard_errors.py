"""Remedies for torch's errors about whole tensors of a script that meet shards."""

from __future__ import annotations

import re
from typing import Final

from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from hf_fsdp_plugin.backends.shard import sharded_models
from hf_fsdp_plugin.problems import Problem
from hf_fsdp_plugin.torch_private import fsdp1

_MIXED: Final = "got mixed torch.Tensor and DTensor"
_SIZES: Final = re.compile(r"size of tensor a \((\d+)\) must match the size of tensor b \((\d+)\)")


def add_remedy(error: BaseException) -> None:
    """Add a problem with its remedy to an error that torch raises because whole tensors meet shards.

    Python prints it after the error. Averages that were copied before ``prepare``, such as ``EMAModel`` of diffusers,
    cause such errors.
    """
    if isinstance(error, RuntimeError) and not getattr(error, "__notes__", None) and _meets_shards(str(error)):
        message = "a whole tensor, such as a copy of a weight from before prepare(), was combined with a shard."
        fix = (
            "For averages of the weights (EMAModel, AveragedModel), use hfp.ExponentialMovingAverage. To read or "
            "change whole weights, use hfp.full_parameters."
        )
        error.add_note(str(Problem(code="FSDP-E627", message=message, fix=fix)))


def _meets_shards(text: str) -> bool:
    if _MIXED in text:
        return bool(sharded_models())
    match = _SIZES.search(text)
    return match is not None and not _flat_sizes().isdisjoint(map(int, match.groups()))


def _flat_sizes() -> set[int]:
    """Return the numbers of elements in this rank's parts of parameters that FSDP1 has flattened."""
    units = [unit for model in sharded_models() for unit in FSDP.fsdp_modules(model)]
    flats = [flat for unit in units if (flat := fsdp1.flat_parameter(unit)) is not None]
    return {member.stop - member.start for flat in flats for member in fsdp1.members(flat)}
