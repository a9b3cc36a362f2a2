"""Hangs and failures inside the ranks: each records its collectives and places; ranks diagnose each other."""
