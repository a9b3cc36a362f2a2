"""Checks and summaries of checkpoints, and of the files of ``from_pretrained``. No torch."""
