"""``hf-fsdp watch``: a run as its files show it, in a terminal or as a page."""
