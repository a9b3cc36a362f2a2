"""The row of the table of hooks that marks calls of torch in the trace of a profiled rank."""

from __future__ import annotations

from typing import Final

from hf_fsdp_plugin.integrations.hook import Hook

# fmt: off
_PROFILE: Final = "`hf-fsdp profile` is removed from this package."
PROFILE_HOOKS: Final = (
    Hook("torch.autograd:backward", "profiling.replacements:backward",
         reason="The trace does not contain where a backward pass begins and ends.", until=_PROFILE,
         always=True),
)
# fmt: on
