"""``hf-fsdp bench``: measures throughput, memory and scaling."""
