"""Where in a step the program is: forward or backward of which unit, clipping or update."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from hf_fsdp_plugin.plan.fsdp_plan import FsdpPlan
from hf_fsdp_plugin.plan.names import canonical_name
from hf_fsdp_plugin.torch_private.functions import in_backward
from scripts.bench.traced_memory.private import next_sequence_number, running_sequence_number


class Places:
    """Follows a step.

    In backward, the unit is the one in whose forward the running node of the autograd graph was created. Hooks on
    gradients would keep tensors alive.
    """

    def __init__(self, root: str) -> None:
        """Create the place before a step. ``root`` is the name of the root unit: the class of the model."""
        self._root = root
        self._phase = "preparation"
        self._units: list[str] = []
        self._starts: list[int] = []
        self._names: list[str] = []
        self._last = root

    def watch(self, plan: FsdpPlan, model: nn.Module) -> None:
        """Register hooks on the modules of all units of a sharded model."""
        modules: dict[str, nn.Module] = {}
        for name, module in model.named_modules():
            modules.setdefault(canonical_name(name), module)  # the wrapper, not the module inside
        for unit in plan.units:
            for name in unit.modules:
                module = modules[name]
                module.register_forward_pre_hook(self._entering(unit.name or self._root), prepend=True)
                module.register_forward_hook(self._leave, always_call=True)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Set the part of the step: ``forward``, ``backward``, or one without units."""
        before, self._phase = self._phase, name
        try:
            yield
        finally:
            self._phase = before

    def now(self) -> str:
        """Return the present place, such as ``forward of model.layers.3`` or ``clipping``."""
        if in_backward():
            return f"backward of {self._unit_of_backward()}"
        if self._phase == "forward":
            return f"forward of {self._units[-1] if self._units else self._root}"
        return f"backward of {self._root}" if self._phase == "backward" else self._phase

    def _unit_of_backward(self) -> str:
        if self._units:  # a recompute
            return self._units[-1]
        number = running_sequence_number()
        if number is not None and self._starts:
            self._last = self._names[max(bisect_right(self._starts, number) - 1, 0)]
        return self._last

    def _entering(self, name: str) -> Any:
        def enter(module: nn.Module, args: Any) -> None:
            self._units.append(name)
            self._mark(name)

        return enter

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._units.pop()
        self._mark(self._units[-1] if self._units else self._last if in_backward() else self._root)

    def _mark(self, name: str) -> None:
        """Remember which unit creates the nodes of the graph from now on."""
        self._starts.append(next_sequence_number())
        self._names.append(name)
