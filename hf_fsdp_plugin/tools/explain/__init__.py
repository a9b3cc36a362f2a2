"""``hf-fsdp explain``: the documentation of a problem code."""
