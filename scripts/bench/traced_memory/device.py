"""What differs between the CPU, on which a step is traced, and the device of the plan."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch.autograd.graph import saved_tensors_hooks

from hf_fsdp_plugin.backends.sharding import forwards as checkpointing
from hf_fsdp_plugin.plan.fsdp_plan import FsdpPlan
from hf_fsdp_plugin.tools.plan.estimate.machines import Machine
from hf_fsdp_plugin.tools.plan.estimate.memory.peak import framework_bytes
from hf_fsdp_plugin.tools.plan.estimate.memory.tracker import dropout_with_byte_mask, run_attention
from hf_fsdp_plugin.tools.plan.estimate.types import MemoryKind
from scripts.bench.allocator.caching_allocator import MIN_BLOCK
from scripts.bench.traced_memory.recorder import Block, Recorder, ShardCopies

_KINDS: Final[dict[str, MemoryKind]] = {
    "params": "params", "grads": "grads", "optimizer": "optimizer", "buffers": "other", "gathered": "gathered",
}  # fmt: skip
_UPDATE: Final = ("clipping", "optimizer step")


class Device:
    """The device of a plan."""

    def __init__(self, plan: FsdpPlan, machine: Machine | None) -> None:
        self.type = plan.device_type
        self.is_cpu = plan.device_type == "cpu"
        self.offloads = plan.offload_params and not self.is_cpu
        self.shard_copies: ShardCopies = "until_gathered" if self.offloads else "none"
        if self.offloads and plan.backend == "fsdp1" and plan.use_orig:
            # The original parameters are views of the copy until the unit is resharded (``flat_param_to``).
            self.shard_copies = "while_gathered"
        self.framework_bytes = framework_bytes(plan.device_type, machine)

    def size_of(self, block: Block) -> int:
        """Return the bytes that the device's allocator takes for a block."""
        return block.size if self.is_cpu else -(-block.size // MIN_BLOCK) * MIN_BLOCK

    def kind_of(self, block: Block) -> MemoryKind | None:
        """Return the kind of a block; ``None`` if it is in host memory, while the device is not the CPU."""
        if block.label == "host":
            return None
        kind = _KINDS.get(block.label or "") or ("other" if block.where in _UPDATE else "activations")
        if self.offloads and (kind in ("params", "optimizer") or block.where in _UPDATE):
            return None
        return kind

    @contextmanager
    def functions(self, recorder: Recorder) -> Iterator[None]:
        """Run attention, dropout and activation offload as on the device."""
        with ExitStack() as stack:
            if not self.is_cpu:
                original = F.scaled_dot_product_attention

                def attention(*args: Any, **kwargs: Any) -> torch.Tensor:
                    with _replaced(F, "scaled_dot_product_attention", original):
                        return run_attention(self.type, *args, **kwargs)

                stack.enter_context(_replaced(F, "scaled_dot_product_attention", attention))
                stack.enter_context(_replaced(F, "dropout", dropout_with_byte_mask))
                stack.enter_context(_replaced(checkpointing, "save_on_cpu", lambda **_: _host_copies(recorder)))
            yield


def _host_copies(recorder: Recorder) -> saved_tensors_hooks:
    def pack(tensor: torch.Tensor) -> torch.Tensor:
        copy = tensor.clone()
        recorder.label([copy], "host")
        return copy

    return saved_tensors_hooks(pack, torch.clone)


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
