"""The private API of Accelerate that this package uses; read from accelerate 1.15.

Accelerate is imported inside functions only, as ``install`` must not import it. Private functions that are replaced are
listed in :mod:`hf_fsdp_plugin.integrations.hooks` instead.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import nn

from hf_fsdp_plugin.axes import CONTEXT_AXIS
from hf_fsdp_plugin.contracts import Contract, contracts_of, guard_functions
from hf_fsdp_plugin.state import parts_of
from hf_fsdp_plugin.torch_private.context_parallel import ContextMesh, add_cpu_attention

_ACCELERATOR = "accelerate.accelerator:Accelerator"
_STATE = "accelerate.state"
CONTRACTS = (
    *contracts_of(_ACCELERATOR, "refused", "`prepare` and checkpoints", "_models", "_optimizers", "_schedulers",
                  "_dataloaders", "_prepare_one"),
    *contracts_of(_ACCELERATOR, "refused", "context parallelism", "_prepare_cp"),
    Contract(target="accelerate.accelerator:_is_accelerate_prepared", without="off", use="a second `prepare`",
             behavior="`prepare` returns objects with this mark unchanged."),
    *contracts_of(f"{_STATE}:PartialState", "refused", "FSDP on CPU ranks", "_shared_state", "_reset_state"),
    *contracts_of(f"{_STATE}:AcceleratorState", "refused", "FSDP on CPU ranks", "_shared_state"),
    *contracts_of(f"{_STATE}:GradientState", "refused", "a comparison of FSDP versions", "_shared_state"),
)  # fmt: skip


def is_accelerator(obj: Any) -> bool:
    module = sys.modules.get("accelerate")
    return module is not None and isinstance(obj, module.Accelerator)


def prepared_models(accelerator: Any) -> list[nn.Module]:
    """Return the list of models that ``prepare`` has registered. Callers may append to it."""
    return accelerator._models


def prepared_optimizers(accelerator: Any) -> list[Any]:
    """Return the ``AcceleratedOptimizer`` wrappers that ``prepare`` has registered."""
    return list(accelerator._optimizers)


def prepared_schedulers(accelerator: Any) -> list[Any]:
    return list(accelerator._schedulers)


def prepared_dataloaders(accelerator: Any) -> list[Any]:
    return list(accelerator._dataloaders)


def prepare_one(accelerator: Any, obj: Any, *, first_pass: bool = False) -> Any:
    """Prepare an object that is not a model. Schedulers are prepared in the second pass, after their optimizers."""
    return accelerator._prepare_one(obj, first_pass=first_pass)


def prepare_context_parallel(accelerator: Any, model: nn.Module) -> None:
    """Let ``maybe_context_parallel`` divide sequences, and the attention of ``model`` use the causal mask only."""
    if accelerator.device.type == "cpu":
        add_cpu_attention()
    accelerator._prepare_cp(model)
    parts_of(model).put(ContextMesh(accelerator.torch_device_mesh[CONTEXT_AXIS]))


def is_prepared(obj: Any) -> bool:
    return bool(getattr(obj, "_is_accelerate_prepared", False))


def mark_prepared(accelerator: Any, *objects: Any) -> None:
    """Mark the models and registered objects among ``objects``, so that another ``prepare`` returns them unchanged."""
    registered = (*accelerator._dataloaders, *accelerator._optimizers, *accelerator._schedulers)
    for obj in objects:
        if isinstance(obj, nn.Module) or any(obj is known for known in registered):
            obj._is_accelerate_prepared = True


def shared_state() -> dict[str, Any]:
    """Return the state that all Accelerators of the process share; empty before the first one."""
    from accelerate.state import AcceleratorState

    return AcceleratorState._shared_state


def reset_single_process_state(state: Any) -> None:
    """Reset ``PartialState`` if it was initialized for a single process and ``AcceleratorState`` was not yet."""
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    if not state._shared_state and PartialState._shared_state.get("distributed_type") == DistributedType.NO:
        PartialState._reset_state()


def set_in_states(state: Any, **attributes: Any) -> None:
    """Set attributes of an ``AcceleratorState`` and of ``PartialState``, which each new ``AcceleratorState`` copies."""
    from accelerate.state import PartialState

    vars(state).update(attributes)
    PartialState._shared_state.update(attributes)


class SharedStates:
    """Accelerate's state of a process, which all of its Accelerators share.

    A process with several kinds of Accelerators keeps the state of each kind, and restores it before the kind runs.
    """

    def __init__(self) -> None:
        self._kept: tuple[dict[str, Any], ...] = ({}, {}, {})

    def keep(self) -> None:
        """Keep the present state."""
        self._kept = tuple(dict(shared) for shared in self._shared())

    def restore(self) -> None:
        """Make the kept state the present one. Without a kept state, the next Accelerator creates a new one."""
        for shared, kept in zip(self._shared(), self._kept, strict=True):
            shared.clear()
            shared.update(kept)

    @staticmethod
    def _shared() -> tuple[dict[str, Any], ...]:
        from accelerate.state import AcceleratorState, GradientState, PartialState

        return PartialState._shared_state, AcceleratorState._shared_state, GradientState._shared_state


guard_functions(globals(), CONTRACTS)
