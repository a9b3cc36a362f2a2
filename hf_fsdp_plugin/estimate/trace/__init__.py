"""Memory of a training step, traced without memory: the real model and the real backends under fake tensors."""

from hf_fsdp_plugin.estimate.trace.memory import trace_memory

__all__ = ["trace_memory"]
