"""``hf-fsdp schema``: a JSON Schema of the YAML config."""
