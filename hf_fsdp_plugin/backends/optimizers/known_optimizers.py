"""How each known optimizer computes its update, and how its steps run on a sharded model, if they can.

To add an optimizer, add a row to ``KNOWN_OPTIMIZERS``. An optimizer without a row runs as it is, with a warning. The
layouts of its state in checkpoints are in ``checkpoint/formats/optimizer_state.py``.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Final, Literal

from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from hf_fsdp_plugin.backends.optimizers.divided_steps import DividedSteps, divided_parameters, ranks_of
from hf_fsdp_plugin.backends.optimizers.matrix_rules import MatrixRule, matrix_rule
from hf_fsdp_plugin.backends.optimizers.offloaded_steps import offload_state
from hf_fsdp_plugin.backends.optimizers.parameters import StepMode, parameters_in, set_step_mode
from hf_fsdp_plugin.backends.ranks.agreement import same_on_all_ranks
from hf_fsdp_plugin.devices import get_device
from hf_fsdp_plugin.plan.fsdp_plan import FsdpPlan
from hf_fsdp_plugin.problems import Problem
from hf_fsdp_plugin.spec.fsdp_spec import FsdpSpec
from hf_fsdp_plugin.strategies import STRATEGIES
from hf_fsdp_plugin.torch_private.functions import can_divide_muon

Needs = Literal["elements", "blocks", "tensors", "pairs", "backward", "closure"]
"""The values that one update of an optimizer reads.

``elements``: only the same element of gradient and state. Any shard gives the same numbers as the whole tensor.
``blocks``: blocks of elements that share a scale. Shards give nearly the same numbers as the whole tensor.
``tensors``: the whole parameter or several parameters: norms, factored moments, projections, orthogonalization.
``pairs``: several parameters, whole, for the update of one.
``backward``: it runs inside the backward pass, with gradients that are not yet reduced over the ranks.
``closure``: it evaluates the loss several times in one step, with a number of evaluations that depends on the rank.
"""


@dataclass(frozen=True, slots=True)
class KnownOptimizer:
    """One optimizer, or all optimizers of a package.

    Attributes:
        name: qualified name of the class, or of a package.
        needs: see :data:`Needs`.
        fsdp2: how its step runs under FSDP2; ``unchanged``: on the DTensors.
        fused: how its step runs under FSDP2 if a parameter group sets ``fused``; ``None``: as without ``fused``.
        per_shard_state: whether its state has tensors with another shape than the parameter, which belong to one shard:
            ``quantized`` if it has 8 bits or less.
        because: for ``needs`` other than ``elements``: the reason, which completes "… needs more than a shard: it ".
    """

    name: str
    needs: Needs
    fsdp2: StepMode = "unchanged"
    fused: StepMode | None = None
    per_shard_state: Literal["never", "quantized", "always"] = "never"
    because: str = ""


_USE_ELEMENTWISE = "use an optimizer that updates each element alone (AdamW, SGD, Lion)"
_FACTORED = "factors the second moment of each matrix into rows and columns"
_PROJECTED = "projects the gradient of each matrix"
_TRUST_RATIO = "scales the update by the norm of each parameter"
_LAYERWISE = "updates each parameter during the backward pass"

# fmt: off
KNOWN_OPTIMIZERS: Final = (
    KnownOptimizer("torch.optim.adam.Adam", "elements"),
    KnownOptimizer("torch.optim.adamw.AdamW", "elements"),
    KnownOptimizer("torch.optim.sgd.SGD", "elements", fused="local"),
    KnownOptimizer("torch.optim.adagrad.Adagrad", "elements", fused="local"),
    KnownOptimizer("torch.optim.adadelta.Adadelta", "elements"),
    KnownOptimizer("torch.optim.rmsprop.RMSprop", "elements"),
    KnownOptimizer("torch.optim.nadam.NAdam", "elements"),
    KnownOptimizer("torch.optim.radam.RAdam", "elements"),
    KnownOptimizer("torch.optim.adamax.Adamax", "elements"),
    KnownOptimizer("torch.optim.asgd.ASGD", "elements"),
    KnownOptimizer("torch.optim.rprop.Rprop", "elements", "local"),
    KnownOptimizer("torch.optim.Adafactor", "tensors", "whole", because=_FACTORED),
    KnownOptimizer("torch.optim.Muon", "tensors", "divided", because="orthogonalizes the momentum of each matrix"),
    KnownOptimizer("torch.optim.lbfgs.LBFGS", "closure", because="needs dot products of all parameters and a closure"),
    KnownOptimizer("transformers.optimization.Adafactor", "tensors", "whole", because=_FACTORED),
    KnownOptimizer("transformers.trainer_pt_utils.LayerWiseDummyOptimizer", "backward", because=_LAYERWISE),
    KnownOptimizer("bitsandbytes.optim.lamb", "tensors", "whole", because=_TRUST_RATIO),
    KnownOptimizer("bitsandbytes.optim.lars", "tensors", "whole", because=_TRUST_RATIO),
    # Their kernels read the memory of a tensor, which a DTensor does not have. AdEMAMix has two averages in one tensor.
    KnownOptimizer("bitsandbytes.optim.ademamix", "blocks", "local", per_shard_state="always"),
    KnownOptimizer("bitsandbytes.optim.optimizer.Optimizer8bit", "blocks", "local", per_shard_state="quantized"),
    KnownOptimizer("torchao.optim.adam._AdamBase", "blocks", per_shard_state="always"),
    KnownOptimizer("lion_pytorch", "elements", "local"),
    KnownOptimizer("schedulefree", "elements"),
    KnownOptimizer("optimi.stableadamw.StableAdamW", "tensors", "whole",
         because="limits the learning rate by the root mean square of each parameter's update"),
    KnownOptimizer("grokadamw", "tensors", because="clips the norm of the gradients"),
    KnownOptimizer("prodigyopt", "tensors", because="estimates one step size from all parameters"),
    KnownOptimizer("galore_torch", "tensors", "whole", because=_PROJECTED),
    KnownOptimizer("apollo_torch", "tensors", "whole", because=_PROJECTED),
    KnownOptimizer("peft.optimizers.lorafa.LoraFAOptimizer", "pairs",
         because="computes the update of lora_B from the whole lora_A of the same layer"),
    KnownOptimizer("lomo_optim", "backward", because=_LAYERWISE),
)
# fmt: on
_SHARPNESS_AWARE: Final = KnownOptimizer(
    "SAM", "closure", because="moves the weights by the norm of all gradients and back"
)
"""Sharpness-aware minimization. Scripts contain a copy of the class, so it is known by its two steps.

Under FSDP1 each rank has the norm of its shards. Under FSDP2 the common implementation restores the weights with
``parameter.data = old``, which a ``DTensor`` ignores.
"""
_STEPS_ALONE: Final = ("torch.optim.", "transformers.optimization.Adafactor", "lion_pytorch")
"""Beginnings of the names of optimizers whose updates read one parameter each, and whose state only steps read."""
_OWN_RULE: Final = KnownOptimizer("MatrixRule", "tensors", "divided", because="updates whole matrices")
"""An optimizer with the methods of :class:`~hf_fsdp_plugin.backends.optimizers.matrix_rules.MatrixRule`."""


def known_optimizer(optimizer: Optimizer) -> KnownOptimizer | None:
    """Return the row of an optimizer; ``None`` for an unknown one.

    A subclass has the row of its base class unless it defines another ``step``.
    """
    if all(callable(getattr(type(optimizer), name, None)) for name in ("first_step", "second_step")):
        return _SHARPNESS_AWARE
    if isinstance(optimizer, MatrixRule):
        return _OWN_RULE
    for name in _names(type(optimizer)):
        for known in KNOWN_OPTIMIZERS:
            if name == known.name or name.startswith(f"{known.name}."):
                return known
    return None


def has_per_shard_state(optimizer: Optimizer) -> bool:
    """Whether the optimizer's state has tensors that belong to one shard, such as the codes and scales of blocks."""
    known = known_optimizer(optimizer)
    if known is None or known.per_shard_state == "never":
        return False
    # bitsandbytes has one class for 8 and 32 bits. It keeps the state of small parameters in 32 bits in both.
    return known.per_shard_state == "always" or getattr(getattr(optimizer, "args", None), "optim_bits", 8) == 8


def _names(cls: type[Optimizer]) -> Iterator[str]:
    """Yield the qualified names of the class and its bases, up to the one that defines ``step``."""
    # torch replaces the ``step`` of each class at its first object, so several classes may have the same one wrapped.
    step = inspect.unwrap(cls.step)
    same = [base for base in cls.__mro__ if "step" in vars(base) and inspect.unwrap(vars(base)["step"]) is step]
    for base in cls.__mro__:
        yield f"{base.__module__}.{base.__qualname__}"
        if base is same[-1]:
            return


def apply_step_mode(optimizer: Optimizer, plan: FsdpPlan) -> Problem | None:
    """Decide how the steps of an optimizer of a sharded model run, and set it. Collective.

    Returns:
        The reason why it cannot run, or a warning.
    """
    mode, problem = decide_step_mode(optimizer, plan)
    if plan.spec.offload.optimizer and not plan.offload_params and (problem is None or problem.severity != "error"):
        problem = check_offload(optimizer, mode, plan.spec) or problem
    code = "" if problem is None else problem.code
    same_on_all_ranks(f"how {type(optimizer).__name__} runs", f"{mode} {code}")
    if problem is None or problem.severity != "error":
        offloaded = None
        if plan.offload_optimizer:
            offloaded = partial(offload_state, optimizer, device=get_device(plan.device_type), pinned=plan.pin_memory)
        set_step_mode(optimizer, mode, lambda: DividedSteps(matrix_rule(optimizer)), offloaded)
    return problem


def decide_step_mode(optimizer: Optimizer, plan: FsdpPlan) -> tuple[StepMode, Problem | None]:
    """Return how the optimizer's steps run, and the reason why they cannot, or a warning."""
    known, name = known_optimizer(optimizer), _name(optimizer)
    if known is not None and known.needs in ("pairs", "backward", "closure"):
        message = f"{name} cannot run with FSDP: it {known.because}."
        fix = f"{_USE_ELEMENTWISE.capitalize()}, or train without FSDP."
        return "unchanged", Problem(code="FSDP-E321", message=message, fix=fix)
    if plan.backend == "fsdp2":
        return _decide_fsdp2(optimizer, name, known)
    if plan.use_orig and (plan.mesh.shard == 1 or not STRATEGIES[plan.strategy].is_sharded):
        return "unchanged", None
    return "unchanged", _check_flat_shards(optimizer, name, known, plan)


def check_offload(optimizer: Optimizer, mode: StepMode, spec: FsdpSpec) -> Problem | None:
    """Return the reason why the optimizer's parameters cannot be updated window by window."""
    known = known_optimizer(optimizer)
    if mode == "divided":
        reason = "the ranks divide the matrices of all parameters, and a window would have too few for them"
    elif known is not None and has_per_shard_state(optimizer):
        reason = "it consists of codes and scales of blocks, or of several averages in one tensor"
    elif known is None or not known.name.startswith(_STEPS_ALONE):
        reason = "it is not known to update each parameter alone, with state that only steps read"
    else:
        return None
    message = f"the state of {_name(optimizer)} cannot be kept in CPU memory by fsdp_offload_optimizer: {reason}."
    fix = "Remove the key, or use AdamW, SGD or another optimizer of torch.optim except Muon, or Adafactor."
    return spec.problem("FSDP-E331", "offload.optimizer", message, fix)


def _name(optimizer: Optimizer) -> str:
    """Return the name of the class, with the package because several packages have an ``AdamW``."""
    cls = type(optimizer)
    package = cls.__module__.partition(".")[0]
    return cls.__name__ if package in ("torch", "__main__") else f"{cls.__name__} of {package}"


def _check_flat_shards(optimizer: Optimizer, name: str, known: KnownOptimizer | None, plan: FsdpPlan) -> Problem | None:
    """Return the reason why the optimizer cannot run on flat shards of FSDP1, or the warning that it is not known."""
    if known is None:
        return _unknown(name, "flattened pieces of the parameters") if parameters_in(optimizer) else None
    if known.needs == "tensors":
        message = f"{name} cannot run on FSDP1's flat shards: it {known.because}. "
        message += "Training would continue with wrong updates."
        return Problem(code="FSDP-E320", message=message, fix=f"Set fsdp_version: 2, or {_USE_ELEMENTWISE}.")
    if has_per_shard_state(optimizer) and not plan.use_orig:
        message = f"{name} has state of another shape than its parameters, which cannot be saved for a flat parameter."
        fix = "Set fsdp_use_orig_params: true, or fsdp_version: 2."
        return Problem(code="FSDP-E322", setting="params.use_orig", message=message, fix=fix)
    return None


def _decide_fsdp2(optimizer: Optimizer, name: str, known: KnownOptimizer | None) -> tuple[StepMode, Problem | None]:
    parameters = parameters_in(optimizer)
    if not any(isinstance(parameter, DTensor) for parameter in parameters):
        return "unchanged", None
    if known is None:
        return "unchanged", _unknown(name, "DTensors")
    # One kernel for several parameters cannot run on DTensors of different meshes, or on DTensors and tensors.
    is_mixed = len({p.device_mesh if isinstance(p, DTensor) else None for p in parameters}) > 1
    is_fused = any(group.get("fused") for group in optimizer.param_groups)
    mode = known.fused if known.fused is not None and is_fused else known.fsdp2
    if known.needs == "tensors" and mode != "unchanged":
        return _decide_matrices(optimizer, name, known, mode)
    return "local" if mode == "unchanged" and is_mixed and known.needs == "elements" else mode, None


def _decide_matrices(
    optimizer: Optimizer, name: str, known: KnownOptimizer, mode: StepMode
) -> tuple[StepMode, Problem | None]:
    """Return how an optimizer that reads whole parameters runs, and a note if each rank computes whole updates."""
    if mode == "divided" and known is not _OWN_RULE and not can_divide_muon():
        mode = "unchanged"
    rule = matrix_rule(optimizer) if mode == "divided" else None
    divided = {id(each[0]) for each in divided_parameters(rule, optimizer)} if rule is not None else set()
    others = [p for p in parameters_in(optimizer) if isinstance(p, DTensor) and id(p) not in divided]
    # Of an optimizer with an own rule, the parameters without a cost are updated element by element.
    others = [p for p in others if p.device_mesh.size() > 1 and (rule is None or (p.dim() > 1 and ranks_of(p) is None))]
    if not others:
        return mode, None
    what = f"{len(others)} parameters of {name} are" if divided else f"{name} is"
    message = f"The work of {what} not divided over the ranks: each rank computes the whole updates."
    fix = "Ignore this if steps are short. The work of torch.optim.Muon, and of an optimizer with the methods of "
    fix += "hfp.MatrixRule (docs/optimizers.md), is divided for matrices that are sharded over one axis of the mesh."
    return mode if divided or rule is None else "unchanged", Problem(code="FSDP-N329", message=message, fix=fix)


def _unknown(name: str, form: str) -> Problem:
    """Return the warning of an optimizer without a row.

    Args:
        form: what FSDP gives to the optimizer instead of whole parameters.
    """
    message = f"{name} is not in the table of known optimizers, so it is not known whether it computes the same "
    message += f"updates on {form} as on whole parameters. It runs as it is."
    fix = f"Compare the losses with a run on one process, or {_USE_ELEMENTWISE}. An optimizer that updates each "
    fix += "element alone needs no change."
    return Problem(code="FSDP-W324", message=message, fix=fix)
