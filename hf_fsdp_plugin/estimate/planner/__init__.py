"""The planner. ``search.advise`` compares the settings."""
