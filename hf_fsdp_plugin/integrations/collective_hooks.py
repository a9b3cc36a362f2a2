"""Replacements of torch's collectives that record each call (see :mod:`hf_fsdp_plugin.hangs.calls`).

The replacements for waits and for functions of FSDP1's units also call the observers.

Each function takes the original and returns its replacement, because calls of a step must not become slower.
Hooks are installed in the middle of torch's import, so torch is imported in functions only.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from hf_fsdp_plugin.hangs.calls import POINT_TO_POINT, record
from hf_fsdp_plugin.integrations.hooks import COLLECTIVES
from hf_fsdp_plugin.integrations.patching import changes
from hf_fsdp_plugin.observers import ObservedCall, observers
from hf_fsdp_plugin.torch_private.modules import set_unit_name, unit_name

Function = Callable[..., Any]

_FUNCTIONAL: Final = ("all_gather", "reduce_scatter", "all_reduce", "broadcast", "all_to_all")
"""Begins of the names of functional collectives; with hyphens, they are the operations in messages."""


def functional_operation(name: str) -> str | None:
    """Return the operation in messages of a functional collective; ``None`` for other functions."""
    operation = next((begin.replace("_", "-") for begin in _FUNCTIONAL if name.startswith(begin)), None)
    return f"{operation} (coalesced)" if operation is not None and name.endswith("_coalesced") else operation


def record_collective(original: Function) -> Function:
    """Record a method of ``ProcessGroup`` that starts a collective."""
    name = original.__name__
    operation, position = next(found for names, found in COLLECTIVES.items() if name in names.split("|"))
    blocks, calls = name == "monitored_barrier", record()  # which the process keeps

    def call(group: Any, *args: Any, **kwargs: Any) -> Any:
        if not calls.is_open:
            return original(group, *args, **kwargs)
        tensors = args[position] if position is not None and len(args) > position else None
        number = calls.begin(group, operation, tensors)
        if blocks:
            return _waiting(number, original, group, *args, **kwargs)
        work = original(group, *args, **kwargs)
        calls.started(work, number)
        return work

    return call


def record_message(original: Function) -> Function:
    """Record a method of ``ProcessGroup`` that starts a send or a receive."""
    name, calls = original.__name__, record()

    def call(group: Any, *args: Any, **kwargs: Any) -> Any:
        if not calls.is_open:
            return original(group, *args, **kwargs)
        import torch.distributed

        peer = torch.distributed.get_global_rank(group, args[1])
        operation = f"{name} {'to' if name == 'send' else 'from'} rank {peer}"
        number = calls.begin_named(POINT_TO_POINT, operation, peer)
        work = original(group, *args, **kwargs)
        calls.started(work, number)
        return work

    return call


def record_wait(original: Function) -> Function:
    """Record that this rank waits for a ``Work``, and call the observers."""

    calls = record()

    def call(work: Any, *args: Any, **kwargs: Any) -> Any:
        with observers().call("wait"):
            if not (calls.is_open or calls.times_waits):
                return original(work, *args, **kwargs)
            return _waiting(calls.position_of(work), original, work, *args, **kwargs)

    return call


def record_functional(original: Function) -> Function:
    """Record the functional collective, which ``DTensor`` calls, that resolves its process group."""

    def call(group: Any, *args: Any, **kwargs: Any) -> Any:
        import torch

        resolved = original(group, *args, **kwargs)
        if not torch.compiler.is_compiling() and record().is_open:
            _record_caller(inspect.currentframe(), resolved)
        return resolved

    return call


def _record_caller(frame: Any, resolved: Any) -> None:
    """Record the functional collective that has called a frame. Other functions resolve groups too: they are ignored.

    A frame is not kept in a variable of its own, which would be a reference cycle.
    """
    caller = frame.f_back
    if (operation := functional_operation(caller.f_code.co_name)) is None:
        return
    from hf_fsdp_plugin.torch_private.functions import resolve_group

    if (group := resolve_group(resolved)) is not None:
        variables = caller.f_locals
        record().begin(group, operation, variables.get("self", variables.get("inputs")))


def wait_tensor(original: Function) -> Function:
    """Record that this rank waits for a functional collective."""

    def call(tensor: Any) -> Any:
        import torch

        calls = record()
        if torch.compiler.is_compiling() or not (calls.is_open or calls.times_waits):
            return original(tensor)
        return _waiting(calls.last, original, tensor)

    return call


def unit_method(original: Function) -> Function:
    """Record for which FSDP2 unit the collectives of a method are called."""
    return lambda unit, *args, **kwargs: _of_unit(unit, original, unit, *args, **kwargs)


def gather_of_unit(original: Function, kind: ObservedCall = "gather") -> Function:
    """Record, and tell the observers, for which FSDP1 unit a function of its state gathers parameters."""

    def call(state: Any, unit: Any, *args: Any, **kwargs: Any) -> Any:
        with observers().call(kind, unit):
            return _of_unit(unit, original, state, unit, *args, **kwargs)

    return call


def reduction_of_unit(original: Function) -> Function:
    """Record, and tell the observers, for which FSDP1 unit a function of its state reduces gradients."""
    return gather_of_unit(original, "reduction")


def _of_unit(unit: Any, original: Function, *args: Any, **kwargs: Any) -> Any:
    calls = record()
    if not calls.is_open:
        return original(*args, **kwargs)
    before, calls.unit = calls.unit, unit_name(unit)
    try:
        return original(*args, **kwargs)
    finally:
        calls.unit = before


def _waiting(number: int, original: Function, *args: Any, **kwargs: Any) -> Any:
    calls = record()
    calls.waits(number)
    try:
        return original(*args, **kwargs)
    finally:
        calls.waited()


if TYPE_CHECKING:  # the launcher imports this module without torch
    from torch import nn


def record_calls(path: Path) -> None:
    """Record all collectives from now on. Does nothing if the file cannot be written."""
    from hf_fsdp_plugin.backends.ranks.agreement import wait_listener

    with contextlib.suppress(OSError):
        record().open(path)
        wait_listener().notify = record().on_arrival
        changes().install("calls", "hangs")


def name_units(model: nn.Module) -> None:
    """Give the units of a sharded model their names for the record, if collectives are recorded.

    FSDP2's units know the names of their modules only from the first forward on, FSDP1's never do.
    """
    if record().is_open:
        from hf_fsdp_plugin.observe.units import observe_units

        for unit in observe_units(model):
            set_unit_name(unit.live.source, unit.name)
