"""Hang diagnosis: each rank records its collectives for its launcher; a pure function compares them."""
