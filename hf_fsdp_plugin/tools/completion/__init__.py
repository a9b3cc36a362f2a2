"""``hf-fsdp completion``: completes flags in shells."""
