"""How each known optimizer computes its update, and how its steps run on a sharded model, if they can.

To add an optimizer, add a row to ``KNOWN_OPTIMIZERS``. For an optimizer without a row, it is tested on small tensors
whether it computes the same update on shards as on whole tensors. A copy of the optimizer, with the same class,
attributes and group settings, trains a matrix and a vector for some steps: once whole, and once in the form in which
FSDP would give them to it. The optimizer itself is not changed.
"""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.optim import Optimizer

from hf_fsdp_plugin.backends.optimizers.parameters import StepMode, parameters_in, set_step_mode
from hf_fsdp_plugin.backends.ranks.agreement import same_on_all_ranks
from hf_fsdp_plugin.plan.fsdp_plan import FsdpPlan
from hf_fsdp_plugin.problems import Problem
from hf_fsdp_plugin.strategies import STRATEGIES
from hf_fsdp_plugin.torch_private.functions import is_sharded

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
    KnownOptimizer("torch.optim.Muon", "tensors", because="orthogonalizes the momentum of each matrix"),
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


def known_optimizer(optimizer: Optimizer) -> KnownOptimizer | None:
    """Return the row of an optimizer; ``None`` for an unknown one.

    A subclass has the row of its base class unless it defines another ``step``.
    """
    if all(callable(getattr(type(optimizer), name, None)) for name in ("first_step", "second_step")):
        return _SHARPNESS_AWARE
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
    code = "" if problem is None else problem.code
    same_on_all_ranks(f"how {type(optimizer).__name__} runs", f"{mode} {code}")
    if problem is None or problem.severity != "error":
        set_step_mode(optimizer, mode)
    return problem


def decide_step_mode(optimizer: Optimizer, plan: FsdpPlan) -> tuple[StepMode, Problem | None]:
    """Return how the optimizer's steps run, and the reason why they cannot, or a warning.

    Collective for an unknown optimizer under FSDP2.
    """
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


def _name(optimizer: Optimizer) -> str:
    """Return the name of the class, with the package because several packages have an ``AdamW``."""
    cls = type(optimizer)
    package = cls.__module__.partition(".")[0]
    return cls.__name__ if package in ("torch", "__main__") else f"{cls.__name__} of {package}"


def _check_flat_shards(optimizer: Optimizer, name: str, known: KnownOptimizer | None, plan: FsdpPlan) -> Problem | None:
    """Return the reason why the optimizer cannot run on flat shards of FSDP1, or the warning that it is not known."""
    because = ""
    if known is None:
        parameters = parameters_in(optimizer)
        outcome = probe_flat_shards(optimizer, parameters[0].device) if parameters else Outcome("equal")
        if outcome.result == "unknown":
            return _untested(name, outcome)
        if outcome.result == "different":
            because = "computes another update on shards of a test tensor than on the whole tensor"
        elif outcome.result == "fails":
            because = f"fails on shards of a test tensor ({outcome.error})"
    elif known.needs == "tensors":
        because = known.because
    elif has_per_shard_state(optimizer) and not plan.use_orig:
        message = f"{name} has state of another shape than its parameters, which cannot be saved for a flat parameter."
        fix = "Set fsdp_use_orig_params: true, or fsdp_version: 2."
        return Problem(code="FSDP-E322", setting="params.use_orig", message=message, fix=fix)
    if not because:
        return None
    message = f"{name} cannot run on FSDP1's flat shards: it {because}. Training would continue with wrong updates."
    return Problem(code="FSDP-E320", message=message, fix=f"Set fsdp_version: 2, or {_USE_ELEMENTWISE}.")


def _decide_fsdp2(optimizer: Optimizer, name: str, known: KnownOptimizer | None) -> tuple[StepMode, Problem | None]:
    parameters = parameters_in(optimizer)
    sharded = [parameter for parameter in parameters if isinstance(parameter, DTensor)]
    if not sharded:
        return "unchanged", None
    # One kernel for several parameters cannot run on DTensors of different meshes, or on DTensors and tensors.
    is_mixed = len({p.device_mesh if isinstance(p, DTensor) else None for p in parameters}) > 1
    if known is not None:
        is_fused = any(group.get("fused") for group in optimizer.param_groups)
        mode = known.fused if known.fused is not None and is_fused else known.fsdp2
        return "local" if mode == "unchanged" and is_mixed and known.needs == "elements" else mode, None
    outcome = probe_dtensors(optimizer, sharded[0])
    if outcome.result == "equal" and not is_mixed:
        return "unchanged", None
    if outcome.result == "unknown":
        return "unchanged", _untested(name, outcome)
    device = sharded[0].to_local().device
    if probe_flat_shards(optimizer, device).result == "equal":
        return "local", None
    if outcome.result == "equal":  # if it cannot update mixed kinds at once, torch raises an error that names them
        return "unchanged", None
    if probe_single_tensors(optimizer, device).result == "equal":
        return "whole", None
    found = f"fails ({outcome.error})" if outcome.result == "fails" else "computes another update"
    message = f"{name} cannot run on FSDP2's sharded parameters: on shards of test tensors it {found}, and it needs "
    message += "several whole parameters at once."
    return "unchanged", Problem(code="FSDP-E323", message=message, fix=f"{_USE_ELEMENTWISE.capitalize()}.")


def _untested(name: str, outcome: Outcome) -> Problem:
    message = f"{name} is unknown, and it could not be tested whether its updates are the same on shards "
    message += f"({outcome.error})."
    fix = "If it uses norms or products of whole parameters, compare the losses with a run on one process, or "
    return Problem(code="FSDP-W324", message=message, fix=f"{fix}{_USE_ELEMENTWISE}.")


_NUM_STEPS = 7
"""Steps of a test: more than those in which an optimizer with a built-in warmup changes no parameter (RAdam: 5)."""
_LR = 1e-2
_TOLERANCE = 1e-3
"""Relative difference of two updates. Updates with the same sums differ by less than 1e-5 in fp32."""
_CUT = 0.6
"""The end of the first of a flattened tensor's two shards. It does not coincide with a row of the matrix."""

Tensors = list[torch.Tensor]
Train = Callable[..., Tensors]
"""(initial tensors, gradients of each step) -> the tensors after the last step."""
Run = Callable[[Train, Tensors, list[Tensors]], Tensors]
"""(function that trains, initial tensors, gradients of each step) -> the tensors after the last step."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one probe.

    Attributes:
        result: ``equal``, ``different``, ``fails`` if only the sharded run fails, ``unknown`` if the optimizer cannot
            be tested.
        error: the exception of the run that failed.
    """

    result: Literal["equal", "different", "fails", "unknown"]
    error: str = ""


def probe_flat_shards(optimizer: Optimizer, device: torch.device) -> Outcome:
    """Compare whole tensors with flattened pieces, as FSDP1 has them. No communication."""
    return _compare(optimizer, device, _run_on_pieces)


def probe_single_tensors(optimizer: Optimizer, device: torch.device) -> Outcome:
    """Compare one step for all tensors with one step for each tensor. No communication."""
    return _compare(optimizer, device, lambda train, start, grads: train(start, grads, singly=True))


def probe_dtensors(optimizer: Optimizer, like: DTensor) -> Outcome:
    """Compare whole tensors with DTensors that are sharded like ``like``. Collective.

    The tensors are divisible by the number of shards, so that all ranks run the same operations.
    """

    mesh = like.device_mesh
    replicate: list[Placement] = [Replicate()] * mesh.ndim
    placements = [Shard(0) if is_sharded(placement) else Replicate() for placement in like.placements]

    def run(train: Train, start: Tensors, grads: list[Tensors]) -> Tensors:
        def sharded(whole: torch.Tensor) -> DTensor:
            return DTensor.from_local(whole, mesh, replicate, run_check=False).redistribute(mesh, placements)

        end = train(list(map(sharded, start)), [list(map(sharded, step)) for step in grads])
        return [tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for tensor in end]

    return _compare(optimizer, torch.device(like.to_local().device), run, rows=2 * mesh.size())


def _compare(optimizer: Optimizer, device: torch.device, run: Run, rows: int = 6) -> Outcome:
    """Compare two runs for the settings of each parameter group. The worst result counts."""
    if any(isinstance(getattr(type(optimizer), name, None), property) for name in ("param_groups", "state")):
        return Outcome("unknown", "it wraps another optimizer")
    devices = [device] if device.type != "cpu" else []
    with torch.random.fork_rng(devices, device_type=devices[0].type if devices else "cuda"):
        outcomes = [_compare_group(optimizer, group, device, run, rows) for group in _distinct_settings(optimizer)]
    order = ("unknown", "fails", "different", "equal")
    return min(outcomes, key=lambda outcome: order.index(outcome.result))


def _compare_group(optimizer: Optimizer, group: dict[str, Any], device: torch.device, run: Run, rows: int) -> Outcome:
    error, train = "", partial(_train, optimizer, group)
    # Some optimizers accept matrices only.
    for shapes in ([(rows, 10), (rows,)], [(rows, 10), (rows, 4)]):
        start, grads = _random_tensors(shapes, device)
        try:
            whole = train(start, grads)
        except Exception as failure:
            error = error or _text(failure)
            continue
        if all(torch.equal(before, after) for before, after in zip(start, whole, strict=True)):
            error = error or "the step changes nothing"
            continue
        try:
            other = run(train, start, grads)
        except Exception as failure:
            return Outcome("fails", _text(failure))
        steps = zip(start, whole, other, strict=True)
        same = all((end - another).norm() <= _TOLERANCE * (end - begin).norm() for begin, end, another in steps)
        return Outcome("equal" if same else "different")
    return Outcome("unknown", error)


def _train(
    optimizer: Optimizer, group: dict[str, Any], start: Tensors, grads: list[Tensors], singly: bool = False
) -> Tensors:
    """Return the tensors after training all of them with one copy of the optimizer.

    Args:
        singly: step once for each tensor.
    """
    error: Exception | None = None
    for make in (_copy, _construct):
        parameters = [nn.Parameter(tensor.clone()) for tensor in start]
        try:
            trained = make(optimizer, group, parameters)
            torch.manual_seed(0)
            for step in grads:
                for parameter, grad in zip(parameters, step, strict=True):
                    parameter.grad = grad.clone()
                for trained.param_groups[0]["params"] in [[p] for p in parameters] if singly else [parameters]:
                    type(trained).step(trained)
            return [parameter.detach() for parameter in parameters]
        except Exception as failure:
            error = error or failure
    assert error is not None
    raise error


def _run_on_pieces(train: Train, start: Tensors, grads: list[Tensors]) -> Tensors:
    """Train the first pieces of all flattened tensors, then the second ones, as two ranks do."""
    ends = [train(_pieces(start, rank), [_pieces(step, rank) for step in grads]) for rank in (0, 1)]
    return [torch.cat(parts).view_as(whole) for *parts, whole in zip(*ends, start, strict=True)]


def _pieces(wholes: Tensors, rank: int) -> Tensors:
    return [whole.reshape(-1).tensor_split([round(_CUT * whole.numel())])[rank] for whole in wholes]


def _copy(optimizer: Optimizer, group: dict[str, Any], parameters: Sequence[nn.Parameter]) -> Optimizer:
    """Return an optimizer with the same attributes, without state and hooks."""
    copied = object.__new__(type(optimizer))
    for name, value in vars(optimizer).items():
        if "hooks" in name:
            vars(copied)[name] = OrderedDict()
        elif name != "step":  # a learning rate scheduler wraps the step of this object
            vars(copied)[name] = copy.copy(value) if isinstance(value, (dict, list, set)) else value
    copied.state = defaultdict(dict)
    copied.param_groups = [{**group, "params": list(parameters)}]
    return copied


def _construct(optimizer: Optimizer, group: dict[str, Any], parameters: Sequence[nn.Parameter]) -> Optimizer:
    """Return a new optimizer with the same defaults, for classes that create state in the constructor."""
    accepted = inspect.signature(type(optimizer)).parameters
    settings = {key: value for key, value in optimizer.defaults.items() if key in accepted}
    return type(optimizer)([{**group, "params": list(parameters)}], **settings)


def _distinct_settings(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the settings of the groups, with a learning rate that is not zero (warmup begins at zero)."""
    found: dict[str, dict[str, Any]] = {}
    for group in optimizer.param_groups:
        settings = {key: copy.copy(v) for key, v in group.items() if key not in ("params", "param_names")}
        if isinstance(settings.get("lr"), torch.Tensor):
            settings["lr"] = torch.full_like(settings["lr"], _LR)
        elif settings.get("lr") is not None:
            settings["lr"] = _LR
        found[repr(sorted((key, repr(value)) for key, value in settings.items()))] = settings
    return list(found.values())


def _random_tensors(shapes: Sequence[tuple[int, ...]], device: torch.device) -> tuple[Tensors, list[Tensors]]:
    """Return initial tensors and gradients, equal on all ranks. The norms of their pieces differ."""
    generator = torch.Generator().manual_seed(0)

    def random(shape: tuple[int, ...], scale: float) -> torch.Tensor:
        tensor = torch.randn(shape, generator=generator)
        return (tensor * torch.linspace(0.1, scale, tensor.numel()).view(shape)).to(device)

    start = [random(shape, 1.0) for shape in shapes]
    return start, [[random(shape, 5.0) for shape in shapes] for _ in range(_NUM_STEPS)]


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
