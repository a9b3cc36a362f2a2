"""What an estimate assumes, one sentence each."""

from __future__ import annotations

from hf_fsdp_plugin.estimate.memory.device import NEEDED_RATIO, RESERVED_RATIO, UNKNOWN, Gpu, library_assumptions
from hf_fsdp_plugin.estimate.memory.optimizer import update_loop
from hf_fsdp_plugin.estimate.workload import Workload
from hf_fsdp_plugin.plan.model import FsdpPlan

_RATIOS = (
    f"The allocator reserves {RESERVED_RATIO:g} times the allocated memory, and needs {NEEDED_RATIO:g} times: medians "
    "of traced steps, which vary from 1.1 to 1.6 and from 1.03 to 1.23. --trace simulates it."
)
_SIMULATED = (
    "torch's caching allocator is simulated with the streams of FSDP, on a GPU that is otherwise empty. Under FSDP1, "
    "memory of up to two all-gathers waits for the computation."
)


def assumptions(plan: FsdpPlan, workload: Workload, gpu: Gpu = UNKNOWN, *, traced: bool = False) -> tuple[str, ...]:
    """Return the assumptions of an estimate."""
    loop = update_loop(workload, plan.device_type)
    is_default = workload.update_loop is None and loop == "fused"
    default = ", the Trainer's default (adamw_torch_fused); --foreach or --for-loop for others" if is_default else ""
    texts = ["All samples have the full sequence length."]
    if plan.device_type == "cpu":
        texts.append("Memory that torch's allocator has reserved but not allocated (fragmentation) is not included.")
    texts.append(f"The optimizer is {workload.optimizer} with {loop} updates{default}.")
    if plan.device_type == "cuda":
        texts.append(_SIMULATED if traced else _RATIOS)
    texts += library_assumptions(plan, gpu)
    if plan.offload_params and plan.device_type == "cpu":
        texts.append("Parameter offload has no effect on CPU ranks.")
    return tuple(texts)
