"""A training step of each system: this package, stock Accelerate, a hand-written loop, and DDP."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from accelerate import Accelerator
from torch import nn

from hf_fsdp_plugin.integrations.accelerate.accelerator import accelerator as planned_accelerator
from hf_fsdp_plugin.integrations.accelerate.private import SharedStates
from hf_fsdp_plugin.integrations.bench.cases import DDP, Case
from hf_fsdp_plugin.integrations.bench.hand_written import sharded_by_hand
from hf_fsdp_plugin.integrations.bench.stock import stock_accelerator
from hf_fsdp_plugin.integrations.patching import install_hooks, remove_hooks
from hf_fsdp_plugin.plan.resolve import resolve
from hf_fsdp_plugin.spec.model import FsdpSpec

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
    sharded: Any = sharded_by_hand(plan, model, device)
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
