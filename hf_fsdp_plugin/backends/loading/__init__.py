"""Fills shards from whole weights: from mapped files, from memory that ranks share, and from rank 0."""
