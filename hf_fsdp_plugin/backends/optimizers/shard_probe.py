"""Test on small tensors whether an optimizer computes the same update on shards as on whole tensors.

A copy of the optimizer, with the same class, attributes and group settings, trains a matrix and a vector for some
steps: once whole, and once in the form in which FSDP would give them to it. The optimizer itself is not changed.
"""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

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


def probe_flat_shards(optimizer: torch.optim.Optimizer, device: torch.device) -> Outcome:
    """Compare whole tensors with flattened pieces, as FSDP1 has them. No communication."""
    return _compare(optimizer, device, _run_on_pieces)


def probe_single_tensors(optimizer: torch.optim.Optimizer, device: torch.device) -> Outcome:
    """Compare one step for all tensors with one step for each tensor. No communication."""
    return _compare(optimizer, device, lambda train, start, grads: train(start, grads, singly=True))


def probe_dtensors(optimizer: torch.optim.Optimizer, like: DTensor) -> Outcome:
    """Compare whole tensors with DTensors that are sharded like ``like``. Collective.

    The tensors are divisible by the number of shards, so that all ranks run the same operations.
    """

    mesh = like.device_mesh
    replicate: list[Placement] = [Replicate()] * mesh.ndim
    placements = [Shard(0) if placement.is_shard() else Replicate() for placement in like.placements]

    def run(train: Train, start: Tensors, grads: list[Tensors]) -> Tensors:
        def sharded(whole: torch.Tensor) -> DTensor:
            return DTensor.from_local(whole, mesh, replicate, run_check=False).redistribute(mesh, placements)

        end = train(list(map(sharded, start)), [list(map(sharded, step)) for step in grads])
        return [tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for tensor in end]

    return _compare(optimizer, torch.device(like.to_local().device), run, rows=2 * mesh.size())


def _compare(optimizer: torch.optim.Optimizer, device: torch.device, run: Run, rows: int = 6) -> Outcome:
    """Compare two runs for the settings of each parameter group. The worst result counts."""
    if any(isinstance(getattr(type(optimizer), name, None), property) for name in ("param_groups", "state")):
        return Outcome("unknown", "it wraps another optimizer")
    devices = [device] if device.type != "cpu" else []
    with torch.random.fork_rng(devices, device_type=devices[0].type if devices else "cuda"):
        outcomes = [_compare_group(optimizer, group, device, run, rows) for group in _distinct_settings(optimizer)]
    order = ("unknown", "fails", "different", "equal")
    return min(outcomes, key=lambda outcome: order.index(outcome.result))


def _compare_group(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], device: torch.device, run: Run, rows: int
) -> Outcome:
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
        same = all(map(_same_update, start, whole, other))
        return Outcome("equal" if same else "different")
    return Outcome("unknown", error)


def _same_update(start: torch.Tensor, whole: torch.Tensor, other: torch.Tensor) -> bool:
    return bool((whole - other).norm() <= _TOLERANCE * (whole - start).norm())


def _train(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], start: Tensors, grads: list[Tensors], singly: bool = False
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


def _copy(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], parameters: Sequence[nn.Parameter]
) -> torch.optim.Optimizer:
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


def _construct(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], parameters: Sequence[nn.Parameter]
) -> torch.optim.Optimizer:
    """Return a new optimizer with the same defaults, for classes that create state in the constructor."""
    accepted = inspect.signature(type(optimizer)).parameters
    settings = {key: value for key, value in optimizer.defaults.items() if key in accepted}
    return type(optimizer)([{**group, "params": list(parameters)}], **settings)


def _distinct_settings(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
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
        slope = torch.linspace(0.1, scale, tensor.numel()).view(shape)
        return (tensor * slope).to(device)

    start = [random(shape, 1.0) for shape in shapes]
    return start, [[random(shape, 5.0) for shape in shapes] for _ in range(_NUM_STEPS)]


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
