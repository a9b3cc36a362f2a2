"""The processes of ``hf-fsdp launch``: flags, world, environment, ranks."""
