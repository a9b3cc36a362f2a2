"""The rows of the table of hooks that record collectives for the diagnosis of hangs."""

from __future__ import annotations

from typing import Final

from hf_fsdp_plugin.integrations.hook import Hook

# fmt: off
_COLLECTIVES: Final = "torch.distributed.distributed_c10d:ProcessGroup"
_FUNCTIONAL: Final = "torch.distributed._functional_collectives"
_UNIT: Final = "The record of a collective names the FSDP unit that needs it."
_WITH_RECORD: Final = "torch's flight recorder covers every backend, names FSDP units, and is readable after a crash."
HANG_HOOKS: Final = (
    *(
        Hook(f"{_COLLECTIVES}.{name}", "call_hooks:collective",
             reason="The order of the collectives of each rank is recorded.", until=_WITH_RECORD, direct=True)
        for name in (
            *("allreduce", "broadcast", "reduce", "allgather", "reduce_scatter", "gather", "scatter", "alltoall"),
            *("all_gather_single", "reduce_scatter_single", "all_to_all_single", "barrier", "monitored_barrier"),
            *("_allgather_base", "_reduce_scatter_base", "alltoall_base", "allreduce_coalesced"),
            *("all_gather_single_coalesced", "reduce_scatter_single_coalesced"),
            *("allgather_into_tensor_coalesced", "reduce_scatter_tensor_coalesced"),
        )
    ),
    *(
        Hook(f"{_COLLECTIVES}.{name}", "call_hooks:message",
             reason="A rank that waits for a message names its peer.", until=_WITH_RECORD, direct=True)
        for name in ("send", "recv", "recv_anysource")
    ),
    Hook("torch.distributed.distributed_c10d:Work.wait", "call_hooks:wait",
         reason="The time since which a rank waits in a collective is recorded.", until=_WITH_RECORD, direct=True),
    *(
        Hook(f"{_FUNCTIONAL}:{name}", "call_hooks:functional",
             reason="Collectives of `DTensor` call no method of a process group in Python.",
             until=_WITH_RECORD, direct=True)
        for name in ("all_gather_single", "reduce_scatter_single", "all_reduce", "broadcast", "all_to_all_single",
                     "all_reduce_coalesced")
    ),
    Hook(f"{_FUNCTIONAL}:wait_tensor", "call_hooks:wait_tensor",
         reason="The time since which a rank waits in a collective is recorded.", until=_WITH_RECORD, direct=True),
    *(
        Hook(f"torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup.{name}", "call_hooks:unit_method",
             reason=_UNIT, until=_WITH_RECORD, direct=True)
        for name in ("unshard", "wait_for_unshard", "post_backward")
    ),
    Hook("torch.distributed.fsdp._flat_param:FlatParamHandle.unshard", "call_hooks:unit_method",
         reason=_UNIT, until=_WITH_RECORD, direct=True),
    *(
        Hook(f"torch.distributed.fsdp._runtime_utils:{name}", "call_hooks:unit_function",
             reason=_UNIT, until=_WITH_RECORD, direct=True)
        for name in ("_reduce_grad", "_reduce_grad_no_shard")
    ),
)
# fmt: on
