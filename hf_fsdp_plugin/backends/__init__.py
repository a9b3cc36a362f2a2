"""Plan -> sharded model. Each backend is one file with one function, ``apply_…(plan, model, device)``."""
