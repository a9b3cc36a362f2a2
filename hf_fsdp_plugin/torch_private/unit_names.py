"""Names of FSDP units, as torch's own objects of a unit have them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from hf_fsdp_plugin.contracts import contracts_of, guard

if TYPE_CHECKING:  # torch may be in the middle of its import when hooks import this module
    from torch import nn

ROOT: Final = "the root unit"
_NAME: Final = "_hf_fsdp_unit_name"
_FULLY_SHARD: Final = "torch.distributed.fsdp._fully_shard"
_MESSAGES: Final = "the names of units in messages about collectives"
CONTRACTS = (
    *contracts_of(
        "torch.distributed.fsdp.fully_sharded_data_parallel:FullyShardedDataParallel", "off", _MESSAGES, "_handle"
    ),
    *contracts_of("torch.distributed.fsdp._flat_param:FlatParamHandle", "off", _MESSAGES, "_fully_sharded_module"),
    *contracts_of("torch.distributed.fsdp:FSDPModule", "off", _MESSAGES, "_get_fsdp_state"),
    *contracts_of(f"{_FULLY_SHARD}._fsdp_state:FSDPState", "off", _MESSAGES, "_fsdp_param_groups|_fsdp_param_group"),
    *contracts_of(f"{_FULLY_SHARD}._fsdp_param_group:FSDPParamGroup", "off", _MESSAGES, "_module_fqn"),
)


def set_unit_names(model: nn.Module, names: Mapping[str, str]) -> None:
    """Give each unit of a sharded model its name.

    FSDP2's units know the names of their modules only from the first forward on, FSDP1's never do.

    Args:
        names: name of a module in the tree -> name of the unit.
    """
    for path, module in model.named_modules():
        handle = getattr(module, "_handle", None)  # FSDP1
        state = module._get_fsdp_state() if hasattr(module, "_get_fsdp_state") else None  # FSDP2
        groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
        for unit in (handle, *groups):
            if unit is not None and _NAME not in vars(unit):
                setattr(unit, _NAME, names.get(path, path) or ROOT)


def unit_name(unit: Any) -> str:
    """Return the name of a unit: one of FSDP1's handles or of FSDP2's parameter groups."""
    name = getattr(unit, _NAME, None)
    if name is None:
        path = getattr(unit, "_module_fqn", None)
        module = getattr(unit, "_fully_sharded_module", None)
        name = type(module).__name__ if path is None and module is not None else path
        if name is None:
            return ""
        name = name or ROOT
        setattr(unit, _NAME, name)
    return str(name)


guard(globals(), CONTRACTS, off={"set_unit_names": None, "unit_name": ""})
