"""Marks in the trace of this process: phases of a step, forwards of units, and waits for collectives."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn
from torch.profiler import record_function

from hf_fsdp_plugin.observe.profile.rank_profile import PREFIX, UNIT, Phase
from hf_fsdp_plugin.observe.units import observe_units
from hf_fsdp_plugin.plan.names import unwrapped
from hf_fsdp_plugin.torch_private.modules import set_unit_name, unit_name

P = ParamSpec("P")
R = TypeVar("R")


class Marks:
    """Writes marks while the profiler runs; otherwise every function returns at once.

    Attributes:
        enabled: whether the profiler runs.
        stage_of: returns the stage of a preflight, in which nothing is profiled, for a phase.
        on_forward: called with the inputs of each training forward of a model, also without the profiler.
    """

    def __init__(self) -> None:
        self.enabled = False
        self.stage_of: Callable[[Phase], AbstractContextManager[Any]] | None = None
        self.on_forward: Callable[[tuple[Any, ...], dict[str, Any]], None] | None = None
        self._open = threading.local()  # a recomputed forward runs in a thread of autograd
        self._handles: list[Any] = []

    def __call__(self, name: str) -> AbstractContextManager[Any]:
        return record_function(name) if self.enabled else nullcontext()

    def phase(self, phase: Phase) -> AbstractContextManager[Any]:
        return self(f"{PREFIX}{phase}") if self.stage_of is None else self.stage_of(phase)

    def of_unit(self, prefix: str, unit: Any) -> AbstractContextManager[Any]:
        """Return the mark of a collective of an FSDP1 unit.

        Args:
            prefix: ``GATHER`` or ``REDUCE``.
        """
        return self(f"{prefix}{unit_name(unit, root='')}")

    def instant(self, name: str) -> None:
        with self(name):
            pass

    def watch(self, model: nn.Module) -> None:
        """Mark the forwards of a sharded model, and those of its units."""
        for unit in observe_units(model):
            set_unit_name(unit.live.source, unit.name)
            if not unit.live.is_root and unit.num_params:
                # A checkpointed module is called again inside its wrappers.
                self._mark_forwards(unwrapped(unit.live.modules[0]), f"{UNIT}{unit.name}")
        self._mark_forwards(model)
        self._handles.append(model.register_forward_pre_hook(self._see_input, prepend=True, with_kwargs=True))

    def unwatch(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _see_input(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.on_forward is not None and not torch.compiler.is_compiling() and _trains(module):
            self.on_forward(args, kwargs)

    def _mark_forwards(self, module: nn.Module, name: str = "") -> None:
        """Mark the forwards of a module by a name, or by their phase.

        A forward that an exception ends, as recomputation does, is marked too.
        """

        def begin(module: nn.Module, _: Any) -> None:
            if not torch.compiler.is_compiling():
                mark = self(name or f"{PREFIX}{'forward' if _trains(module) else 'evaluation'}")
                mark.__enter__()
                self._stack().append((id(module), mark))

        def end(module: nn.Module, *_: Any) -> None:
            stack = [] if torch.compiler.is_compiling() else self._stack()
            while stack and any(key == id(module) for key, _ in stack):
                key, mark = stack.pop()
                mark.__exit__(None, None, None)
                if key == id(module):
                    return

        self._handles.append(module.register_forward_pre_hook(begin, prepend=True))
        self._handles.append(module.register_forward_hook(end, always_call=True))

    def _stack(self) -> list[tuple[int, AbstractContextManager[Any]]]:
        if not hasattr(self._open, "marks"):
            self._open.marks = []
        return self._open.marks


def _trains(module: nn.Module) -> bool:
    return module.training and torch.is_grad_enabled()


marks = Marks()
"""The marks of this process."""


def mark_phase(phase: Phase) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorator: mark the calls of a function as a phase of the step."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            with marks.phase(phase):
                return function(*args, **kwargs)

        return call

    return decorate


def mark_backward(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Mark a backward pass: the replacement of ``torch.autograd.backward``."""
    with marks.phase("backward"):
        return original(*args, **kwargs)
