"""Whether a checkpoint is complete and undamaged, and what it is. No torch but for the comparison with a config."""
