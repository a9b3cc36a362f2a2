"""Checks that a checkpoint is complete and undamaged, and summaries. Only the comparison with a config uses torch."""
