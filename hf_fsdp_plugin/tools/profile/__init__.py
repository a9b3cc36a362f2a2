"""``hf-fsdp profile`` and ``ProfilerCallback``: where the time of a step goes."""
