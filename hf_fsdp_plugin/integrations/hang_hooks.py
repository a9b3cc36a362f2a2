"""The rows of the table of hooks that record collectives for the diagnosis of hangs, and mark them in a profile."""

from __future__ import annotations

from typing import Final

from hf_fsdp_plugin.integrations.hook import Hook

# fmt: off
_COLLECTIVES: Final = "torch.distributed.distributed_c10d:ProcessGroup"
_FUNCTIONAL: Final = "torch.distributed._functional_collectives"
_FSDP1: Final = "torch.distributed.fsdp._runtime_utils"
_UNIT: Final = "The record of a collective names the FSDP unit that needs it."
_WITH_RECORD: Final = "torch's flight recorder covers every backend, names FSDP units, and is readable after a crash."
_OLD_NAMES: Final = {
    "all_gather_single": ("_allgather_base",),
    "reduce_scatter_single": ("_reduce_scatter_base",),
    "all_to_all_single": ("alltoall_base",),
}
"""Method of a process group -> the method that torch 2.11 and 2.12 have instead, and call."""
CALL_HOOKS: Final = (
    Hook("torch.distributed.distributed_c10d:Work.wait", "call_hooks:wait",
         reason="The time since which a rank waits in a collective is recorded, and marked in the trace of a profile.",
         until=_WITH_RECORD, direct=True),
    Hook(f"{_FSDP1}:_unshard", "call_hooks:gather_of_unit",
         reason="FSDP1 names the unit that it gathers neither for a record of collectives nor in a trace, as FSDP2 "
                "does.",
         until=_WITH_RECORD, direct=True),
    Hook(f"{_FSDP1}:_post_backward_hook", "call_hooks:reduction_of_unit",
         reason="FSDP1 names the unit whose gradients it reduces neither for a record of collectives nor in a trace.",
         until=_WITH_RECORD, direct=True),
)
HANG_HOOKS: Final = (
    *(
        Hook(f"{_COLLECTIVES}.{name}", "call_hooks:collective",
             reason="The order of the collectives of each rank is recorded.", until=_WITH_RECORD, direct=True,
             instead=_OLD_NAMES.get(name, ()))
        for name in (
            *("allreduce", "broadcast", "reduce", "allgather", "reduce_scatter", "gather", "scatter", "alltoall"),
            *("barrier", "monitored_barrier", "allreduce_coalesced"), *_OLD_NAMES,
        )
    ),
    *(
        Hook(f"{_COLLECTIVES}.{name}", "call_hooks:message",
             reason="A rank that waits for a message names its peer.", until=_WITH_RECORD, direct=True)
        for name in ("send", "recv")
    ),
    Hook(f"{_FUNCTIONAL}:_resolve_group", "call_hooks:functional",
         reason="Collectives of `DTensor` call no method of a process group in Python. All of them call this function.",
         until=_WITH_RECORD, direct=True, instead=("_resolve_group_name",)),
    Hook(f"{_FUNCTIONAL}:wait_tensor", "call_hooks:wait_tensor",
         reason="The time since which a rank waits in a collective is recorded.", until=_WITH_RECORD, direct=True),
    *(
        Hook(f"torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup.{name}", "call_hooks:unit_method",
             reason=_UNIT, until=_WITH_RECORD, direct=True)
        for name in ("unshard", "post_backward")
    ),
)
# fmt: on
