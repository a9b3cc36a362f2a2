"""Shards a model according to a plan. Each backend is one file with one function, ``apply_…(plan, model, device)``."""
