"""The programs that measure, one for each result."""
