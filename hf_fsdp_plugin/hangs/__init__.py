"""Hangs and failures inside the ranks: each records its collectives and places; ranks diagnose each other."""

HANG = 75
"""Exit code of a run that was ended because of a hang. EX_TEMPFAIL of sysexits.h: try again."""
