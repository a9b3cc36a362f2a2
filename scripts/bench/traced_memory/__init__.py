"""Memory of a training step, traced without memory: the real model and the real backends under fake tensors.

The tests and the benchmarks check the closed form with it (``hf_fsdp_plugin.tools.plan.estimate.memory``), on every
torch version.
"""

from scripts.bench.traced_memory.memory import CannotTrace, TracedMemory, trace_memory

__all__ = ["CannotTrace", "TracedMemory", "trace_memory"]
