"""``hf-fsdp profile``: where the time of a step goes."""
