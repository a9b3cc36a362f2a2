"""The rows of the table of hooks that mark calls of torch in the trace of a profiled rank."""

from __future__ import annotations

from typing import Final

from hf_fsdp_plugin.integrations.hook import Hook

# fmt: off
_PROFILE: Final = "`hf-fsdp profile` is removed from this package."
PROFILE_HOOKS: Final = (
    Hook("torch.autograd:backward", "profiling.replacements:backward",
         reason="The trace does not contain where a backward pass begins and ends.", until=_PROFILE),
    Hook("torch.distributed.distributed_c10d:Work.wait", "profiling.replacements:wait",
         reason="The trace does not contain that a thread waits for a collective of gloo.", until=_PROFILE),
    Hook("torch.distributed.fsdp._runtime_utils:_unshard", "profiling.replacements:unshard",
         reason="FSDP1 does not name the units that it gathers in a trace, as FSDP2 does.", until=_PROFILE),
    Hook("torch.distributed.fsdp._runtime_utils:_reduce_grad", "profiling.replacements:reduce_grad",
         reason="FSDP1 does not name the units whose gradients it reduces in a trace.", until=_PROFILE),
    Hook("torch.distributed.fsdp._runtime_utils:_reduce_grad_no_shard", "profiling.replacements:reduce_grad",
         reason="FSDP1 does not name the units whose gradients it reduces in a trace.", until=_PROFILE),
)
# fmt: on
