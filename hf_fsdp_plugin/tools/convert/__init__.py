"""``hf-fsdp convert``: configs of other programs."""
