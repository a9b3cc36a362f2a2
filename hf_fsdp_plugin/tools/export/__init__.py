"""``hf-fsdp export``: the newest or the best checkpoint of a run as a Hugging Face folder."""
