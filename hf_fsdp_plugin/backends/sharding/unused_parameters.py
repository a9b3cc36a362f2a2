"""Gradients of parameters that a step does not use, on some ranks or on all: they are those of one process.

In one process, a parameter that no micro-batch of a step uses has no gradient, and an optimizer changes neither the
parameter nor its state. FSDP1 gives it a gradient of zeros, with which momentum and weight decay change it. FSDP2
reduces the gradients that a rank has, so ranks that use different parameters of a unit would reduce different tensors.

Here the ranks reduce the same parameters of a unit, with zeros for those that a rank has not used. After the backward
they agree which parameters no rank has used, and remove the gradients of these. The flags are in host memory, so that
no rank waits for its device, and only a rank that has not used a parameter waits for the flags of the other ranks.

A unit as a whole is gathered by all ranks or by none: a rank that skips a unit that another rank uses ends in a hang.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from hf_fsdp_plugin.messages import print_once
from hf_fsdp_plugin.plan.names import canonical_name
from hf_fsdp_plugin.problems import Problem
from hf_fsdp_plugin.state import own_parts, parts_of
from hf_fsdp_plugin.text import format_names
from hf_fsdp_plugin.torch_private import fsdp1, fsdp2
from hf_fsdp_plugin.torch_private.functions import supports_cpu


@dataclass
class _Backwards:
    """The backwards of a sharded model: the watches of its units, and how many have reduced gradients."""

    units: Sequence[Any] = ()
    num_reduced: int = 0


def watch_unused_parameters(model: nn.Module) -> None:
    """Remove the gradients of parameters that no rank has used, at the end of each backward of a sharded model."""
    if isinstance(model, FullyShardedDataParallel):
        own_parts(model).put(_Backwards(fsdp1.watch_gradients(model)))
    elif isinstance(model, FSDPModule):
        own_parts(model).put(_Backwards(fsdp2.watch_gradients(model, partial(backward_ended, model))))


def discard_backward(root: nn.Module) -> None:
    """Forget which parameters a backward has used that has failed."""
    for unit in parts_of(root).get(_Backwards).units:
        unit.reset()


def num_reduced_backwards(root: nn.Module) -> int:
    """Return the number of backwards of a sharded model whose gradients were reduced."""
    return parts_of(root).get(_Backwards).num_reduced


def backward_ended(root: nn.Module) -> None:
    """Remove the gradients of parameters that no rank has used. Collective, if the backward has reduced gradients."""
    backwards = parts_of(root).get(_Backwards)
    units = backwards.units
    if not any(unit.reduces for unit in units):
        return
    backwards.num_reduced += 1
    group = dist.group.WORLD
    if group is None or not supports_cpu(group):
        return
    unused = [unit.unused() for unit in units]
    firsts = list(itertools.accumulate((unit.num_parameters for unit in units), initial=0))
    own = [first + position for first, positions in zip(firsts, unused, strict=False) for position in positions]
    is_used = torch.ones(firsts[-1], dtype=torch.uint8, device="cpu")  # whatever the default device is
    if own:
        is_used[own] = 0
    work = dist.all_reduce(is_used, dist.ReduceOp.MAX, async_op=True) if dist.get_world_size() > 1 else None
    if own and work is not None:
        work.wait()
    flags = is_used.tolist() if own else []
    for unit, first, positions in zip(units, firsts, unused, strict=False):
        unit.reset()
        if positions and (names := unit.remove([each for each in positions if not flags[first + each]])):
            _warn(names)


def _warn(names: list[str]) -> None:
    message = f"a step has not used {format_names(sorted(map(canonical_name, names)), 3)}. Their gradients are zeros "
    message += "without use_orig_params: the momentum and the weight decay of an optimizer change them."
    fix = "Set fsdp_use_orig_params: true, or use fsdp_version: 2."
    print_once(Problem(code="FSDP-W314", message=message, fix=fix))
