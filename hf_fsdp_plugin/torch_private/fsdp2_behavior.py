"""What differs between torch's versions in how FSDP2 handles dtypes and frees gradients, as facts about a version.

Estimates and plans read the facts of the installed torch, and contain no version numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Final

import torch

from hf_fsdp_plugin.contracts import release_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Fsdp2Behavior:
    """How one version of torch handles the gradients and the dtypes of a unit.

    Attributes:
        since: the first release that behaves so.
        keeps_last_gradient: whether ``foreach_reduce`` keeps the whole gradient of the last parameter until it returns.
        accumulates_in_place: whether autograd adds each gradient to the one of earlier micro-batches as soon as it is
            computed (``FSDPParam.unsharded_grad_dtype``), instead of FSDP2 after the backward of the unit.
        dtype_per_parameter: whether a unit can compute with parameters of several dtypes
            (``MixedPrecisionPolicy.param_dtype_override_fn``).
    """

    since: str
    keeps_last_gradient: bool
    accumulates_in_place: bool
    dtype_per_parameter: bool


BEHAVIORS: Final = (
    Fsdp2Behavior(since="2.11", keeps_last_gradient=True, accumulates_in_place=False, dtype_per_parameter=False),
    Fsdp2Behavior(since="2.15", keeps_last_gradient=False, accumulates_in_place=True, dtype_per_parameter=True),
)
"""In ascending order. 2.14.1 frees gradients as 2.13 does."""


def behavior_of(version: str) -> Fsdp2Behavior:
    """Return how FSDP2 of a version of torch behaves."""
    release = release_of(version)[:2]
    return next((row for row in reversed(BEHAVIORS) if release >= release_of(row.since)), BEHAVIORS[0])


@cache
def installed_behavior() -> Fsdp2Behavior:
    """Return how FSDP2 of the installed torch behaves."""
    return behavior_of(torch.__version__)


def first_version_with_dtype_per_parameter() -> str:
    """Return the first version of torch that accepts a dtype for each parameter."""
    return next(row.since for row in BEHAVIORS if row.dtype_per_parameter)
