"""Checks and summaries of checkpoints. Only the comparison of a checkpoint with a config imports torch."""
