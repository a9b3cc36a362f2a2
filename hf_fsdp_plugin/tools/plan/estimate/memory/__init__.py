"""Memory of a step in closed form. ``peak.estimate_memory`` predicts it."""
