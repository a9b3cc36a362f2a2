"""The formats of checkpoints: readers that find where tensors are stored, and the manifest. Does not import torch."""
