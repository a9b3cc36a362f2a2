"""A run over its attempts: its identity, how its ranks exited, and whether it is started again."""
