"""Agreement of the ranks: errors and plans that are the same on all of them, and ranks that are missing in a call."""
