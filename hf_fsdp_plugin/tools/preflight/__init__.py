"""``hf-fsdp check --run``: a tiny clone of the model trains on CPU ranks."""
