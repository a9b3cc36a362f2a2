"""What an estimate assumes, one sentence each, and the memory of frameworks that torch's allocator does not count."""

from __future__ import annotations

from typing import Final

from hf_fsdp_plugin.estimate.memory.optimizer import update_loop
from hf_fsdp_plugin.estimate.workload import Workload
from hf_fsdp_plugin.plan.model import FsdpPlan

_MIB: Final = 1 << 20
_CUBLAS: Final = 32 * _MIB
"""cuBLAS workspace of one stream on Hopper (``getChosenWorkspaceSize`` in ``ATen/cuda/CublasHandlePool.cpp``)."""

_CONTEXT: Final = (
    "The CUDA context and NCCL's buffers, which torch does not allocate, are not in the peak. Leave about 1 GB for "
    "them: Transformers' documentation (Model training anatomy) measures 1.3 GB for the kernels alone."
)


def framework_bytes(device_type: str) -> int:
    """Return the bytes that torch allocates on a device for its libraries."""
    return _CUBLAS if device_type == "cuda" else 0


def assumptions(plan: FsdpPlan, workload: Workload) -> tuple[str, ...]:
    """Return the assumptions of an estimate."""
    texts = [
        "All samples have the full sequence length.",
        "Memory that torch's allocator has reserved but not allocated (fragmentation) is not included.",
        f"The optimizer is {workload.optimizer} with {update_loop(workload, plan.device_type)} updates.",
    ]
    if plan.device_type == "cuda":
        texts.append(_CONTEXT)
    if plan.offload_params and plan.device_type == "cpu":
        texts.append("Parameter offload has no effect on CPU ranks.")
    return tuple(texts)
