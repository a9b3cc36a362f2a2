"""Readers of every checkpoint format: where each tensor is stored, one file a format. Does not import torch."""
