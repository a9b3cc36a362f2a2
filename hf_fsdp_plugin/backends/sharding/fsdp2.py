"""FSDP2: applies a plan with ``torch.distributed.fsdp.fully_shard``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from hf_fsdp_plugin.backends.device_meshes import device_mesh
from hf_fsdp_plugin.backends.loading.weight_loader import Places, WeightLoader, cast_buffers
from hf_fsdp_plugin.backends.sharding.forwards import cast_inputs_of, fp32_ids
from hf_fsdp_plugin.plan.fsdp_plan import FsdpPlan, torch_dtype
from hf_fsdp_plugin.torch_private import fsdp2 as private
from hf_fsdp_plugin.torch_private.functions import compute_local_shape_and_global_offset
from hf_fsdp_plugin.torch_private.modules import local_tensor, registrations
from hf_fsdp_plugin.torch_private.modules import parameters as own_parameters


def apply_fsdp2(plan: FsdpPlan, model: nn.Module, device: torch.device, loader: WeightLoader) -> nn.Module:
    """Shard ``model`` in place, unit by unit, and return it. Needs a process group of ``plan.world_size`` ranks.

    Parameters become ``DTensor`` objects. Existing optimizers need the new objects
    (:mod:`hf_fsdp_plugin.backends.optimizers.parameters`).
    """
    cast_buffers(plan, model)
    kwargs: dict[str, Any] = {
        "mesh": device_mesh(plan),
        "offload_policy": CPUOffloadPolicy(pin_memory=plan.pin_memory) if plan.offload_params else OffloadPolicy(),
        "ignored_params": set(loader.prepare_ignored()),
    }
    for unit in plan.units:
        whole = loader.prepare_unit(unit)
        modules = [model.get_submodule(name) for name in unit.modules]
        fully_shard(
            modules if len(modules) > 1 else modules[0],
            reshard_after_forward=unit.reshard_after_forward,
            mp_policy=_mixed_precision(
                plan, is_root=unit.modules == ("",), fp32=fp32_ids(plan, model, unit.parameters)
            ),
            **kwargs,
        )
        _fill(whole, loader)
        for module in modules:
            cast_inputs_of(module, torch_dtype(plan.precision.param))
    if not isinstance(model, FSDPModule):
        # Every parameter belongs to an inner unit. A root unit is still needed: it orders the hooks of the others.
        fully_shard(model, mp_policy=_mixed_precision(plan, is_root=True), **kwargs)
        cast_inputs_of(model, torch_dtype(plan.precision.param))
    # Before FSDP2's own hook, which gathers the parameters.
    model.register_forward_pre_hook(lambda model, args: private.keep_requires_grad(model), prepend=True)
    _set_prefetch_and_no_sync(plan, model)
    return model


@torch.no_grad()
def _fill(whole: Places, loader: WeightLoader) -> None:
    tensors: dict[int, tuple[Any, torch.Tensor]] = {}
    for (module, attribute), values in whole.items():
        sharded = own_parameters(module)[attribute]
        tensors[id(sharded)] = (sharded, values)  # once, also if it is tied
    for sharded, values in tensors.values():
        shape, offset = compute_local_shape_and_global_offset(sharded.shape, sharded.device_mesh, sharded.placements)
        part = values[tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))]
        loader.copy_part(local_tensor(sharded), part)


def adopt_fsdp2(plan: FsdpPlan, model: nn.Module, device: torch.device) -> nn.Module:
    """Complete a model that ``from_pretrained`` has sharded, in place, and return it. Collective.

    Parameters that were added to the sharded model are equal on all ranks afterwards, and their gradients are averaged.
    The precision is that of the plan. Parameters become new objects if they are cast.
    """
    WeightLoader(plan, model, device).prepare_ignored()
    cast_buffers(plan, model)
    _replace_by_masters(plan, model)
    fp32 = fp32_ids(plan, model)
    for state in private.states_in(model):
        private.own_shards(state)
        modules = private.modules_of(state)
        private.set_mixed_precision(state, _mixed_precision(plan, is_root=model in modules, fp32=fp32))
        for module in modules:
            cast_inputs_of(module, torch_dtype(plan.precision.param))
    _set_prefetch_and_no_sync(plan, model)
    return model


def _replace_by_masters(plan: FsdpPlan, model: nn.Module) -> None:
    """Replace trainable shards by shards in the dtype in which the optimizer updates them. Ties are kept."""
    replaced: dict[int, nn.Parameter] = {}
    for registered, name, parameter in registrations(model.modules()):
        master = plan.precision.stored_dtype(parameter)
        if isinstance(parameter, DTensor) and parameter.dtype != master:
            if id(parameter) not in replaced:
                replaced[id(parameter)] = nn.Parameter(parameter.detach().to(master))
            registered[name] = replaced[id(parameter)]


@contextmanager
def _no_sync(model: FSDPModule) -> Iterator[None]:
    """Accumulate gradients on each rank, without reducing them, in the backwards of the block."""
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)


def _set_prefetch_and_no_sync(plan: FsdpPlan, model: nn.Module) -> None:
    """Set which units are gathered ahead of their use, and add ``no_sync``, which scripts for DDP and FSDP1 call.

    Forward prefetch: each unit starts the all-gather of the next unit in the module tree before its own forward. If the
    model executes its modules in another order, prefetch costs memory but does not change results.

    Backward prefetch is when the all-gather of the preceding unit starts in backward. ``pre``: during this unit's
    backward, which is FSDP2's default. ``none``: when the preceding unit needs its parameters; a prefetch list that
    contains only the unit itself disables FSDP2's default. ``post``: after this unit's gradients are computed and
    before their reduce-scatter, so that at most one unit is gathered at a time.
    """
    position = {id(module): index for index, module in enumerate(model.modules())}
    firsts: list[Any] = [model.get_submodule(unit.modules[0]) for unit in plan.units if unit.modules != ("",)]
    units = sorted((m for m in firsts if isinstance(m, FSDPModule)), key=lambda m: position[id(m)])
    if plan.prefetch.forward:
        for unit, successor in pairwise(units):
            unit.set_modules_to_forward_prefetch([successor])
    if plan.prefetch.backward != "pre":
        for unit in units:
            unit.set_modules_to_backward_prefetch([unit])
    if plan.prefetch.backward == "post":
        for predecessor, unit in zip([None, *units], units, strict=False):
            _unshard_after_backward(unit, predecessor)
    if plan.spec.sharding.reduce_replicas_at_last_micro_batch:
        # Accelerate's `no_sync` calls it in each micro-batch but the last one. The gradients are reduce-scattered then.
        root: Any = model
        root.set_requires_gradient_sync = root.set_requires_all_reduce
    if not hasattr(model, "no_sync"):
        model.no_sync = partial(_no_sync, cast(FSDPModule, model))  # type: ignore[assignment]


def _unshard_after_backward(unit: Any, predecessor: FSDPModule | None) -> None:
    """Gather ``predecessor`` when the gradient of ``unit``'s input is computed, at the end of the unit's backward.

    The first unit has no predecessor. It gets the hook too, because the report recognizes the prefetch by the hook.
    """

    def on_input_gradient(gradient: torch.Tensor) -> None:
        assert predecessor is not None
        predecessor.unshard(async_op=True)

    def before_forward(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if predecessor is not None and torch.is_grad_enabled():
            inputs = [*args, *kwargs.values()]
            needs_gradient = [x for x in inputs if isinstance(x, torch.Tensor) and x.requires_grad]
            if needs_gradient:
                needs_gradient[0].register_hook(on_input_gradient)

    private.mark_backward_prefetch(before_forward, "post")
    # Registered after fully_shard's hook, so that it receives the tensor that FSDP2 passes to forward.
    unit.register_forward_pre_hook(before_forward, with_kwargs=True)


def _mixed_precision(plan: FsdpPlan, *, is_root: bool, fp32: frozenset[int] = frozenset()) -> MixedPrecisionPolicy:
    """Return one unit's policy. Only the root casts its output: casts between layers cost memory and change results.

    Inputs are cast by :mod:`hf_fsdp_plugin.backends.sharding.forwards`.

    Gradients whose dtype of reduction is not set are reduced in the dtype of the computation, as FSDP1 does. torch 2.15
    would reduce them in the dtype of the shards.

    Args:
        fp32: ids of the parameters that are gathered in fp32, which is the dtype of their shards.
    """
    per_parameter: dict[str, Any] = {}
    if fp32:
        per_parameter["param_dtype_override_fn"] = lambda p: torch.float32 if id(p) in fp32 else None
    param = torch_dtype(plan.precision.param)
    return MixedPrecisionPolicy(
        param_dtype=param,
        reduce_dtype=torch_dtype(plan.precision.reduce) or param,
        output_dtype=torch_dtype(plan.precision.output) if is_root else None,
        cast_forward_inputs=False,
        **per_parameter,
    )
