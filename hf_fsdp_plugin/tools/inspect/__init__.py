"""``hf-fsdp inspect``: describes checkpoints."""
