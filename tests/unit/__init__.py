"""The tests for each edit: one process, no training, less than a second each."""
