"""``hf-fsdp bench``: measures steps of one model under several strategies, settings and numbers of ranks."""
