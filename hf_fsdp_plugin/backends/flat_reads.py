"""What scripts read of FSDP1's flat shards: numbers of parameters are corrected, reads in a loss are reported."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from hf_fsdp_plugin.messages import print_once
from hf_fsdp_plugin.plan.names import canonical_name
from hf_fsdp_plugin.problems import Problem
from hf_fsdp_plugin.torch_private import fsdp1


def correct_flat_reads(model: nn.Module) -> None:
    """Let the methods that count parameters count whole ones, and warn once if a loss reads a shard. FSDP1 only."""
    if not isinstance(model, FSDP):
        return
    for module in model.modules():
        if hasattr(type(module), "num_parameters"):  # Transformers
            module.num_parameters = partial(_num_parameters, model, module)  # type: ignore[assignment]
        if hasattr(type(module), "get_nb_trainable_parameters"):  # PEFT
            module.get_nb_trainable_parameters = partial(_trainable_and_all, model, module)  # type: ignore[assignment]
    names = {id(module): canonical_name(name) for name, module in model.named_modules()}
    warn = _Warning()
    for unit in FSDP.fsdp_modules(model):
        group, flat = fsdp1.shard_group(unit), fsdp1.flat_parameter(unit)
        if flat is not None and group is not None and group.size() > 1:
            for member in fsdp1.members(flat):
                if member.parameter is not None and member.requires_grad:
                    name = f"{names[id(member.module)]}.{member.attribute}".lstrip(".")
                    # FSDP's own gradients do not pass through this parameter, which is a view of the shard.
                    member.parameter.register_hook(partial(warn.on_gradient, name))


def _num_parameters(
    root: nn.Module, module: nn.Module, only_trainable: bool = False, exclude_embeddings: bool = False
) -> int:
    """Return what ``num_parameters`` of Transformers returns for the unsharded model."""
    return sum(
        num_elements
        for owner, num_elements, is_trained in _sizes(root, module)
        if (is_trained or not only_trainable) and not (exclude_embeddings and isinstance(owner, nn.Embedding))
    )


def _trainable_and_all(root: nn.Module, module: nn.Module) -> tuple[int, int]:
    """Return what ``get_nb_trainable_parameters`` of PEFT returns for the unsharded model."""
    return _num_parameters(root, module, only_trainable=True), _num_parameters(root, module)


def _sizes(root: nn.Module, module: nn.Module) -> Iterator[tuple[nn.Module, int, bool]]:
    """Yield the owner, the number of elements and ``requires_grad`` of each whole parameter, tied ones once.

    The module may be inside a unit, or contain units.
    """
    inside = {id(inner) for inner in module.modules()}
    flattened: set[int] = set()
    for unit in FSDP.fsdp_modules(root):
        flat = fsdp1.flat_parameter(unit)
        if flat is not None:
            flattened.update(map(id, fsdp1.parameter_objects(flat)))
            for member in fsdp1.members(flat):
                if id(member.module) in inside:
                    yield member.module, member.shape.numel(), member.requires_grad
    seen: set[int] = set()
    for owner in module.modules():
        for parameter in owner.parameters(recurse=False):
            if id(parameter) not in flattened | seen and not fsdp1.is_flattened(parameter):
                seen.add(id(parameter))
                yield owner, parameter.numel(), parameter.requires_grad


class _Warning:
    """Warns once for a model."""

    def __init__(self) -> None:
        self._is_printed = False

    def on_gradient(self, name: str, gradient: torch.Tensor) -> Any:
        """A gradient hook of a parameter."""
        if not self._is_printed:
            self._is_printed = True
            message = (
                f"a loss reads {name} outside of its module's forward. Under FSDP1 this is the rank's own part: a sum "
                "over it, such as a penalty, is a part of the sum, and a norm has a wrong gradient."
            )
            fix = "Use FSDP2, where it is a DTensor of the whole, or the optimizer's weight_decay for an L2 penalty."
            print_once(Problem(code="FSDP-W311", message=message, fix=fix))
