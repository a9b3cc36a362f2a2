"""Readers of configs that were written for other programs: one file per dialect, with a table of all of its keys."""
