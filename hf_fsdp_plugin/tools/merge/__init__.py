"""``hf-fsdp merge``: a checkpoint as a Hugging Face folder."""
