"""``hf-fsdp migrate``: rewrites a config for the other FSDP version."""
