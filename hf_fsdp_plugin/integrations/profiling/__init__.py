"""``hf-fsdp profile`` in a rank, and ``ProfilerCallback``: which steps are profiled, and what is written."""
