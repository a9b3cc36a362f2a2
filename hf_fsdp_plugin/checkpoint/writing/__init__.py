"""Shards in memory -> a checkpoint in its place."""
