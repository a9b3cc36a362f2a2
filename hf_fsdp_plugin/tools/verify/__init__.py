"""``hf-fsdp verify``: checks every byte of a checkpoint."""
