"""Memory of a step in closed form: shards and buffers from the plan, and activations counted on meta tensors."""

from hf_fsdp_plugin.estimate.memory.estimate import estimate_memory, estimate_scheme

__all__ = ["estimate_memory", "estimate_scheme"]
