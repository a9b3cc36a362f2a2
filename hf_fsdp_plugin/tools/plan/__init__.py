"""``hf-fsdp plan``: predicts memory, communication and time of a step."""
