"""Tables of results, and their comparison."""
