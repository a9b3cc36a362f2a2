"""Tests of commands from start to end, of processes and networks, and of what takes seconds."""
