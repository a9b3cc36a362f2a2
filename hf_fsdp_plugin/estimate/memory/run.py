"""Runs one forward and backward pass of a model on the meta device, and records what it allocates."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
from torch import nn

from hf_fsdp_plugin.backends.activations import configs_with_cache
from hf_fsdp_plugin.backends.fp32_modules import fp32_forwards
from hf_fsdp_plugin.backends.torch_types import torch_dtype
from hf_fsdp_plugin.estimate.memory.attention import attention_as_on
from hf_fsdp_plugin.estimate.memory.batch import meta_batch
from hf_fsdp_plugin.estimate.memory.layers import EqualLayers, equal_layers
from hf_fsdp_plugin.estimate.memory.passing import replace_forward
from hf_fsdp_plugin.estimate.memory.profile import StepProfile, expand
from hf_fsdp_plugin.estimate.memory.recorder import Recorder
from hf_fsdp_plugin.estimate.memory.split_units import stored_dtypes_outside
from hf_fsdp_plugin.estimate.workload import Workload
from hf_fsdp_plugin.plan.model import FsdpPlan
from hf_fsdp_plugin.plan.modules import is_inside
from hf_fsdp_plugin.problems import Problem, SpecError
from hf_fsdp_plugin.torch_private.modules import parameters as own_parameters


def profile_step(plan: FsdpPlan, model: nn.Module, workload: Workload) -> StepProfile:
    """Return what a forward and backward pass allocates, in the plan's dtypes and with its checkpointing.

    Layers that are equal to another one do not run: their stages are copies. `model` is unchanged afterwards.

    Args:
        model: on the meta device, not sharded.

    Raises:
        SpecError: the model cannot run on the meta device (FSDP-E810), or has other inputs than a batch of text or
            images (FSDP-E811).
    """
    batch = meta_batch(model, micro_batch=workload.micro_batch, seq_len=workload.seq_len)
    try:
        with _attention_of(model, workload):
            return _profile(plan, model, batch)
    except Exception as error:  # whatever the code of the model raises
        raise SpecError([_cannot_run(model, error)]) from error


def _profile(plan: FsdpPlan, model: nn.Module, batch: dict[str, Any]) -> StepProfile:
    groups = [
        group for group in equal_layers(model, plan.fp32_parameters) if _has_own_units(plan, group.representative)
    ]
    skipped = {name: group for group in groups for name in group.copies}
    with ExitStack() as stack:
        stack.enter_context(_training_mode(model))
        stack.enter_context(_compute_dtypes(plan, model, skipped))
        stack.enter_context(_fp32_modules(plan, model))
        recorder = Recorder(plan, model, groups)
        stack.callback(recorder.remove)
        stack.enter_context(stored_dtypes_outside(plan, model))
        stack.enter_context(attention_as_on(plan.device_type))
        stack.enter_context(recorder.tracker)
        recorder.mark("start", "")
        loss = _loss(model(**batch))
        recorder.mark("loss", "")
        loss.backward()
        recorder.finish()
    return StepProfile(
        stages=expand(recorder.stages, recorder.representatives, recorder.unit_names),
        input_bytes=sum(x.untyped_storage().nbytes() for x in batch.values() if isinstance(x, torch.Tensor)),
    )


def _has_own_units(plan: FsdpPlan, layer: str) -> bool:
    """Whether no unit around a layer contains parameters of it. Its stages can be copied only then."""
    around = [unit for unit in plan.units if not any(name and is_inside(name, layer) for name in unit.modules)]
    return not any(is_inside(name, layer) for unit in around for name in unit.parameters)


def _cannot_run(model: nn.Module, error: Exception) -> Problem:
    reason = (str(error).strip().splitlines() or [""])[0]
    return Problem(
        code="FSDP-E810",
        message=f"{type(model).__name__} cannot run on the meta device: {type(error).__name__}: {reason}",
        fix="Use plan --trace, or check that the model accepts a batch of this size.",
    )


def _loss(outputs: Any) -> torch.Tensor:
    """Return the loss. The other outputs are freed, as in the Trainer's ``compute_loss``."""
    loss: torch.Tensor = outputs["loss"] if isinstance(outputs, dict) else outputs[0]
    return loss


@contextmanager
def _attention_of(model: nn.Module, workload: Workload) -> Iterator[None]:
    """Use the workload's attention. FlashAttention keeps what torch's kernels keep; some models have eager only."""
    setter: Any = getattr(model, "set_attn_implementation", None)
    before = getattr(getattr(model, "config", None), "_attn_implementation", None)
    wanted = "eager" if workload.attention == "eager" else "sdpa"
    if setter is None or before in (None, wanted):
        yield
        return
    with suppress(ValueError):  # the model has no such attention
        setter(wanted)
    try:
        yield
    finally:
        with suppress(ValueError):
            setter(before)


@contextmanager
def _training_mode(model: nn.Module) -> Iterator[None]:
    config: Any = getattr(model, "config", None)
    training, cached = model.training, configs_with_cache(model)
    problem_type = getattr(config, "problem_type", None)  # classifiers set it in their first forward
    model.train()
    for each in cached:
        each.use_cache = False
    try:
        yield
    finally:
        model.train(training)
        for each in cached:
            each.use_cache = True
        if hasattr(config, "problem_type"):
            config.problem_type = problem_type


@contextmanager
def _compute_dtypes(plan: FsdpPlan, model: nn.Module, skipped: Mapping[str, EqualLayers]) -> Iterator[None]:
    """Replace the parameters by ones in the dtype in which FSDP gathers them, except in layers that do not run."""
    dtype = torch_dtype(plan.precision.param)
    skipped_modules = {id(module) for name in skipped for module in model.get_submodule(name).modules()}
    replaced: list[tuple[dict[str, nn.Parameter | None], str, nn.Parameter]] = []
    new: dict[int, nn.Parameter] = {}
    in_trained_flat = _in_trained_flat(plan, model)
    kept = {id(model.get_parameter(name)) for name in plan.fp32_parameters}
    for module in model.modules():
        if id(module) in skipped_modules:
            continue
        registered = own_parameters(module)
        for name, parameter in registered.items():
            if parameter is None:
                continue
            if id(parameter) not in new:
                casts = dtype is not None and parameter.is_floating_point()
                computed = torch.float32 if id(parameter) in kept else dtype if casts else parameter.dtype
                data = torch.empty_like(parameter, device="meta", dtype=computed)
                needs_grad = parameter.requires_grad or id(parameter) in in_trained_flat
                new[id(parameter)] = nn.Parameter(data, requires_grad=needs_grad)
            replaced.append((registered, name, parameter))
            registered[name] = new[id(parameter)]
    try:
        yield
    finally:
        for registered, name, parameter in replaced:
            registered[name] = parameter


@contextmanager
def _fp32_modules(plan: FsdpPlan, model: nn.Module) -> Iterator[None]:
    """Let the plan's fp32 modules compute as the backend lets them compute."""
    undo: list[Callable[[], Any]] = []
    for module, forward in list(fp32_forwards(plan, model)):
        replace_forward(module, forward, undo)
    try:
        yield
    finally:
        for step in reversed(undo):
            step()


def _in_trained_flat(plan: FsdpPlan, model: nn.Module) -> set[int]:
    """Return the ids of parameters in units that FSDP1 trains, frozen ones too.

    In a forward, all parameters of a unit are views of its flat parameter, which needs a gradient if one of them does
    (``FlatParamHandle._use_unsharded_views``). So activations are saved for the gradients of frozen ones as well.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    units = ([parameters[name] for name in unit.parameters] for unit in plan.units if plan.backend == "fsdp1")
    return {id(p) for own in units if any(p.requires_grad for p in own) for p in own if p.is_floating_point()}
