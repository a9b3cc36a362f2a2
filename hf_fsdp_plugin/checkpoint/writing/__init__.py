"""Saves the shards of a model and an optimizer as a checkpoint."""
