"""A training step of each system: this package, stock Accelerate, and DDP, which is stock Accelerate's own.

Stock Accelerate gets the units and settings of the plan of this package.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin
from torch import nn
from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy

from hf_fsdp_plugin.backends.torch_types import torch_dtype
from hf_fsdp_plugin.integrations.accelerate.accelerator import accelerator as planned_accelerator
from hf_fsdp_plugin.integrations.accelerate.private import SharedStates, set_device, set_fsdp
from hf_fsdp_plugin.integrations.bench import DDP, Case
from hf_fsdp_plugin.integrations.patching import install_hooks, remove_hooks
from hf_fsdp_plugin.plan.fsdp_plan import FsdpPlan
from hf_fsdp_plugin.plan.resolve import resolve
from hf_fsdp_plugin.spec.fsdp_spec import FsdpSpec
from hf_fsdp_plugin.strategies import STRATEGIES

MAX_GRAD_NORM: Final = 1.0
LEARNING_RATE: Final = 1e-4

Batch = Mapping[str, Any]


class Loop:
    """One built case. Collective.

    Args:
        hooked: whether the hooks of this package are installed while it runs.
    """

    def __init__(self, accelerator: Any, model: nn.Module, *, hooked: bool = False) -> None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
        self._accelerator, self.hooked, self._states = accelerator, hooked, SharedStates()
        self._model, self._optimizer = accelerator.prepare(model, optimizer)
        self.leave()

    def step(self, batch: Batch) -> torch.Tensor:
        """Run one optimizer step and return its loss, without waiting for the device."""
        loss: torch.Tensor = self._model(**batch).loss
        self._accelerator.backward(loss)
        self._accelerator.clip_grad_norm_(self._model.parameters(), MAX_GRAD_NORM)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss.detach()

    def enter(self) -> None:
        """Install the hooks and the state of Accelerate that this loop needs. Other loops of the process may differ."""
        remove_hooks()
        if self.hooked:
            install_hooks("accelerate")
        self._states.restore()

    def leave(self) -> None:
        self._states.keep()


def make_loop(case: Case, spec: FsdpSpec, model: nn.Module, device: torch.device) -> Loop:
    """Build a case around a model on the CPU. Collective.

    Args:
        spec: the settings of the case.

    Raises:
        SpecError: the settings do not fit the model or the number of ranks.
    """
    remove_hooks()
    SharedStates().restore()
    if case.strategy == DDP:
        return Loop(Accelerator(cpu=device.type == "cpu", mixed_precision=spec.launch.mixed_precision), model)
    if case.system == "plugin":
        return Loop(planned_accelerator(spec), model, hooked=True)
    plan = resolve(spec, model, world_size=case.world_size, device_type=device.type)
    return Loop(stock_accelerator(plan, device), model)


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
