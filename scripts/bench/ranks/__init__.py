"""Scripts that launched ranks run."""
