"""How each known optimizer computes its update, and therefore on which parts of a parameter it can run.

To add an optimizer, add a row to ``KINDS``. An optimizer without a row is tested with small tensors
(:mod:`hf_fsdp_plugin.backends.optimizer_probe`).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

import torch

Needs = Literal["elements", "blocks", "tensors", "backward", "closure"]
"""What one update reads.

``elements``: only the same element of gradient and state. Any shard gives the same numbers as the whole tensor.
``blocks``: blocks of elements that share a scale. Shards give nearly the same numbers as the whole tensor.
``tensors``: the whole parameter or several parameters: norms, factored moments, projections, orthogonalization.
``backward``: it runs inside the backward pass, with gradients that are not yet reduced over the ranks.
``closure``: it evaluates the loss several times in one step, with a number of evaluations that depends on the rank.
"""
Fsdp2Mode = Literal["dtensor", "local", "whole"]
"""How a step runs on FSDP2's parameters: on the DTensors, on this rank's shards, or on gathered parameters."""


@dataclass(frozen=True, slots=True)
class Kind:
    """One optimizer, or all optimizers of a package.

    Attributes:
        name: qualified name of the class, or of a package.
        needs: see :data:`Needs`.
        fsdp2: how its step runs under FSDP2.
        fused: the same if a parameter group sets ``fused``.
        per_shard_state: whether its state has tensors with another shape than the parameter, which belong to one shard:
            ``quantized`` if it has 8 bits or less.
        because: for ``needs`` other than ``elements``: the reason, which completes "… needs more than a shard: it ".
    """

    name: str
    needs: Needs
    fsdp2: Fsdp2Mode = "dtensor"
    fused: Fsdp2Mode | None = None
    per_shard_state: Literal["never", "quantized", "always"] = "never"
    because: str = ""


_FACTORED = "factors the second moment of each matrix into rows and columns"
_PROJECTED = "projects the gradient of each matrix"
_TRUST_RATIO = "scales the update by the norm of each parameter"
_LAYERWISE = "updates each parameter during the backward pass"

# fmt: off
KINDS: Final = (
    Kind("torch.optim.adam.Adam", "elements"),
    Kind("torch.optim.adamw.AdamW", "elements"),
    Kind("torch.optim.sgd.SGD", "elements", fused="local"),
    Kind("torch.optim.adagrad.Adagrad", "elements", fused="local"),
    Kind("torch.optim.adadelta.Adadelta", "elements"),
    Kind("torch.optim.rmsprop.RMSprop", "elements"),
    Kind("torch.optim.nadam.NAdam", "elements"),
    Kind("torch.optim.radam.RAdam", "elements"),
    Kind("torch.optim.adamax.Adamax", "elements"),
    Kind("torch.optim.asgd.ASGD", "elements"),
    Kind("torch.optim.rprop.Rprop", "elements", "local"),
    Kind("torch.optim.Adafactor", "tensors", "whole", because=_FACTORED),
    Kind("torch.optim.Muon", "tensors", because="orthogonalizes the momentum of each matrix"),
    Kind("torch.optim.lbfgs.LBFGS", "closure", because="needs dot products of all parameters and a closure"),
    Kind("transformers.optimization.Adafactor", "tensors", "whole", because=_FACTORED),
    Kind("transformers.trainer_pt_utils.LayerWiseDummyOptimizer", "backward", because=_LAYERWISE),
    Kind("bitsandbytes.optim.lamb", "tensors", "whole", because=_TRUST_RATIO),
    Kind("bitsandbytes.optim.lars", "tensors", "whole", because=_TRUST_RATIO),
    # Their kernels read the memory of a tensor, which a DTensor does not have. AdEMAMix has two averages in one tensor.
    Kind("bitsandbytes.optim.ademamix", "blocks", "local", per_shard_state="always"),
    Kind("bitsandbytes.optim.optimizer.Optimizer8bit", "blocks", "local", per_shard_state="quantized"),
    Kind("torchao.optim.adam._AdamBase", "blocks", per_shard_state="always"),
    Kind("lion_pytorch", "elements", "local"),
    Kind("schedulefree", "elements"),
    Kind("optimi.stableadamw.StableAdamW", "tensors", "whole",
         because="limits the learning rate by the root mean square of each parameter's update"),
    Kind("grokadamw", "tensors", because="clips the norm of the gradients"),
    Kind("prodigyopt", "tensors", because="estimates one step size from all parameters"),
    Kind("galore_torch", "tensors", "whole", because=_PROJECTED),
    Kind("apollo_torch", "tensors", "whole", because=_PROJECTED),
    Kind("lomo_optim", "backward", because=_LAYERWISE),
)
# fmt: on
_SHARPNESS_AWARE: Final = Kind("SAM", "closure", because="moves the weights by the norm of all gradients and back")
"""Sharpness-aware minimization. Scripts contain a copy of the class, so it is known by its two steps.

Under FSDP1 each rank has the norm of its shards. Under FSDP2 the common implementation restores the weights with
``parameter.data = old``, which a ``DTensor`` ignores.
"""


def kind_of(optimizer: torch.optim.Optimizer) -> Kind | None:
    """Return the row of an optimizer; ``None`` for an unknown one.

    A subclass has the kind of its base class unless it defines another ``step``.
    """
    if all(callable(getattr(type(optimizer), name, None)) for name in ("first_step", "second_step")):
        return _SHARPNESS_AWARE
    for name in _names(type(optimizer)):
        for kind in KINDS:
            if name == kind.name or name.startswith(f"{kind.name}."):
                return kind
    return None


def fsdp2_mode(kind: Kind, optimizer: torch.optim.Optimizer) -> Fsdp2Mode:
    if kind.fused is not None and any(group.get("fused") for group in optimizer.param_groups):
        return kind.fused
    return kind.fsdp2


def has_per_shard_state(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer's state has tensors that belong to one shard, such as the codes and scales of blocks."""
    kind = kind_of(optimizer)
    if kind is None or kind.per_shard_state == "never":
        return False
    # bitsandbytes has one class for 8 and 32 bits. It keeps the state of small parameters in 32 bits in both.
    return kind.per_shard_state == "always" or getattr(getattr(optimizer, "args", None), "optim_bits", 8) == 8


def _names(cls: type[torch.optim.Optimizer]) -> Iterator[str]:
    """Yield the qualified names of the class and its bases, up to the one that defines ``step``."""
    # torch replaces the ``step`` of each class at its first object, so several classes may have the same one wrapped.
    step = inspect.unwrap(cls.step)
    same = [base for base in cls.__mro__ if "step" in vars(base) and inspect.unwrap(vars(base)["step"]) is step]
    for base in cls.__mro__:
        yield f"{base.__module__}.{base.__qualname__}"
        if base is same[-1]:
            return
