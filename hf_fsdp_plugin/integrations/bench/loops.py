"""A training step of each system: this package, stock Accelerate, a loop with torch alone, and DDP.

The other systems get the units and settings of the plan of this package.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final

import torch
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import CustomPolicy

from hf_fsdp_plugin.backends.torch_types import torch_dtype
from hf_fsdp_plugin.integrations.accelerate.accelerator import accelerator as planned_accelerator
from hf_fsdp_plugin.integrations.accelerate.private import SharedStates, set_device, set_fsdp
from hf_fsdp_plugin.integrations.bench.cases import DDP, Case
from hf_fsdp_plugin.integrations.patching import install_hooks, remove_hooks
from hf_fsdp_plugin.plan.fsdp_plan import FsdpPlan
from hf_fsdp_plugin.plan.resolve import resolve
from hf_fsdp_plugin.spec.fsdp_spec import FsdpSpec
from hf_fsdp_plugin.strategies import STRATEGIES

MAX_GRAD_NORM: Final = 1.0
_LEARNING_RATE: Final = 1e-4

Batch = Mapping[str, Any]


@dataclass(kw_only=True, slots=True)
class Loop:
    """One built case.

    Attributes:
        hooked: whether the hooks of this package are installed while it runs.
        states: Accelerate's state of the process while it runs.
    """

    model: nn.Module
    optimizer: Any
    backward: Callable[[torch.Tensor], None]
    clip: Callable[[], Any]
    hooked: bool = False
    states: SharedStates = field(default_factory=SharedStates)

    def step(self, batch: Batch) -> torch.Tensor:
        """Run one optimizer step and return its loss, without waiting for the device."""
        loss: torch.Tensor = self.model(**batch).loss
        self.backward(loss)
        self.clip()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def enter(self) -> None:
        """Make the process what the loop needs: hooks and Accelerate's state. Other loops of the process may differ."""
        remove_hooks()
        if self.hooked:
            install_hooks("accelerate")
        self.states.restore()

    def leave(self) -> None:
        self.states.keep()


def make_loop(case: Case, spec: FsdpSpec, model: nn.Module, device: torch.device) -> Loop:
    """Build a case around a model on the CPU. Collective.

    Args:
        spec: the settings of the case.

    Raises:
        SpecError: the settings do not fit the model or the number of ranks.
    """
    remove_hooks()
    SharedStates().restore()
    if case.setting.strategy == DDP:
        accelerator = Accelerator(cpu=device.type == "cpu", mixed_precision=spec.launch.mixed_precision)
        return _accelerated(accelerator, model)
    if case.system == "plugin":
        return _accelerated(planned_accelerator(spec), model, hooked=True)
    plan = resolve(spec, model, world_size=case.setting.world_size, device_type=device.type)
    if case.system == "stock":
        return _accelerated(stock_accelerator(plan, device), model)
    sharded: Any = _sharded_by_hand(plan, model, device)
    parameters = list(sharded.parameters())

    def clip() -> Any:
        if plan.version == 1:
            return sharded.clip_grad_norm_(MAX_GRAD_NORM)
        return nn.utils.clip_grad_norm_(parameters, MAX_GRAD_NORM)

    return Loop(model=sharded, optimizer=_adamw(sharded), backward=torch.Tensor.backward, clip=clip)


def _accelerated(accelerator: Any, model: nn.Module, *, hooked: bool = False) -> Loop:
    prepared, optimizer = accelerator.prepare(model, _adamw(model))
    loop = Loop(
        model=prepared,
        optimizer=optimizer,
        backward=accelerator.backward,
        clip=lambda: accelerator.clip_grad_norm_(prepared.parameters(), MAX_GRAD_NORM),
        hooked=hooked,
    )
    loop.leave()
    return loop


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE)


def stock_accelerator(plan: FsdpPlan, device: torch.device) -> Accelerator:
    """Return the Accelerator. The hooks of this package must not be installed.

    The precision is passed as an object, because a config file cannot set the dtype of the reduction. On CPU ranks
    Accelerate would run DDP: for this comparison its state is set to FSDP before `prepare`.
    """
    classes = sorted({name for unit in plan.units if unit.from_policy for name in unit.class_names})
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=plan.version,
        auto_wrap_policy="transformer_based_wrap" if classes else "no_wrap",
        transformer_cls_names_to_wrap=classes or None,
        mixed_precision_policy=_policy(plan),
        cpu_ram_efficient_loading=False,
        **(_stock_fsdp1(plan) if plan.version == 1 else _stock_fsdp2(plan)),
    )
    precision = plan.precision.param if plan.precision.param in ("bf16", "fp16") else None
    accelerator = Accelerator(cpu=device.type == "cpu", fsdp_plugin=plugin, mixed_precision=precision)
    if device.type == "cpu":
        set_fsdp(accelerator.state)
        accelerator.state.fsdp_plugin = plugin
        set_device(accelerator.state, torch.device("cpu"))  # FSDP1 refuses Accelerate's cpu:0
    return accelerator


def _policy(plan: FsdpPlan) -> MixedPrecision | MixedPrecisionPolicy | None:
    param, reduce, output, buffer = (
        torch_dtype(getattr(plan.precision, name)) for name in ("param", "reduce", "output", "buffer")
    )
    if (param, reduce, output, buffer) == (None,) * 4:
        return None
    if plan.version == 1:
        return MixedPrecision(param_dtype=param, reduce_dtype=reduce, buffer_dtype=buffer)
    return MixedPrecisionPolicy(param_dtype=param, reduce_dtype=reduce, output_dtype=output)


def _stock_fsdp1(plan: FsdpPlan) -> dict[str, Any]:
    prefetch = {"pre": "BACKWARD_PRE", "post": "BACKWARD_POST", "none": "NO_PREFETCH"}[plan.prefetch.backward]
    return {
        "sharding_strategy": STRATEGIES[plan.strategy].torch_name,
        "backward_prefetch": prefetch,
        "forward_prefetch": plan.prefetch.forward,
        "limit_all_gathers": plan.prefetch.limit_all_gathers,
        "use_orig_params": plan.use_orig,
        "cpu_offload": plan.offload_params and plan.device_type != "cpu",
        "sync_module_states": False,
    }


def _stock_fsdp2(plan: FsdpPlan) -> dict[str, Any]:
    return {
        "reshard_after_forward": STRATEGIES[plan.strategy].reshards_after_forward,
        "cpu_offload": plan.offload_params,
    }


def _sharded_by_hand(plan: FsdpPlan, model: nn.Module, device: torch.device) -> nn.Module:
    """Shard a model on the CPU and return it. Collective."""
    return _raw_fsdp1(plan, model, device) if plan.version == 1 else _raw_fsdp2(plan, model)


def _raw_fsdp2(plan: FsdpPlan, model: nn.Module) -> nn.Module:
    casts = {name: torch_dtype(getattr(plan.precision, name)) for name in ("param", "reduce", "output")}
    between = MixedPrecisionPolicy(param_dtype=casts["param"], reduce_dtype=casts["reduce"])
    last = MixedPrecisionPolicy(param_dtype=casts["param"], reduce_dtype=casts["reduce"], output_dtype=casts["output"])
    kwargs: dict[str, Any] = {
        "mesh": _mesh(plan),
        "offload_policy": CPUOffloadPolicy(pin_memory=plan.pin_memory) if plan.offload_params else OffloadPolicy(),
    }
    firsts: list[Any] = []
    for unit in plan.units:
        modules = [model.get_submodule(name) for name in unit.modules]
        policy = last if unit.modules == ("",) else between
        reshard = unit.reshard_after_forward
        fully_shard(modules, reshard_after_forward=reshard, mp_policy=policy, **kwargs)
        firsts += [modules[0]] if unit.modules != ("",) else []
    if plan.units[-1].modules != ("",):
        fully_shard(model, mp_policy=last, **kwargs)
    position = {id(module): index for index, module in enumerate(model.modules())}
    firsts.sort(key=lambda module: position[id(module)])
    if plan.prefetch.forward:
        for first, following in pairwise(firsts):
            first.set_modules_to_forward_prefetch([following])
    if plan.prefetch.backward == "none":
        for each in firsts:
            each.set_modules_to_backward_prefetch([each])
    return model


def _raw_fsdp1(plan: FsdpPlan, model: nn.Module, device: torch.device) -> nn.Module:
    strategy, precision = STRATEGIES[plan.strategy], plan.precision
    wrapped = {id(model.get_submodule(name)) for unit in plan.units for name in unit.modules if name}
    casts = precision.param != "unchanged" or precision.buffer != "unchanged"
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=CustomPolicy(lambda module: id(module) in wrapped),
        sharding_strategy=ShardingStrategy[strategy.torch_name],
        device_mesh=_mesh(plan) if strategy.is_sharded else None,
        cpu_offload=CPUOffload(offload_params=plan.offload_params and device.type != "cpu"),
        mixed_precision=MixedPrecision(
            param_dtype=torch_dtype(precision.param),
            reduce_dtype=torch_dtype(precision.reduce),
            buffer_dtype=torch_dtype(precision.buffer),
        )
        if casts
        else None,
        backward_prefetch={
            "pre": BackwardPrefetch.BACKWARD_PRE,
            "post": BackwardPrefetch.BACKWARD_POST,
            "none": None,
        }[plan.prefetch.backward],
        forward_prefetch=plan.prefetch.forward,
        limit_all_gathers=plan.prefetch.limit_all_gathers,
        use_orig_params=plan.use_orig,
        device_id=torch.device("cpu") if device.type == "cpu" else device,
    )


def _mesh(plan: FsdpPlan) -> DeviceMesh:
    strategy = STRATEGIES[plan.strategy]
    if strategy.is_sharded and not strategy.hybrid:
        return init_device_mesh(plan.device_type, (plan.mesh.shard,))
    return init_device_mesh(
        plan.device_type, (plan.mesh.replicate, plan.mesh.shard), mesh_dim_names=("replicate", "shard")
    )
