"""``hf-fsdp check``: a config with its settings, problems and plan; also what ``launch --dry_run`` prints."""
