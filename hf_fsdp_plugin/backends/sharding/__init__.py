"""Applies a plan to a model with FSDP1 or FSDP2, and makes what scripts do with a model work on the sharded one."""
