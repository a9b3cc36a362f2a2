"""Readers of the formats, one file each: they find where tensors are stored. Does not import torch."""
