"""Applies a plan: fills and shards a model, adapts its optimizers, and makes all ranks agree on what they do.

The backends are ``sharding.fsdp1`` and ``sharding.fsdp2``: one function each, ``apply_…(plan, model, device, loader)``.
"""
