"""Figures of a run while it trains: the clock of each rank, figures of a log, slow ranks, and the file of the run."""
