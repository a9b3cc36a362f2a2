"""The processes of ``hf-fsdp launch``: flags, world, rendezvous of the machines, environment, ranks and attempts."""
