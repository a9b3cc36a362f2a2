"""Checkpoints: atomic writing, loading with any world size, verification of every byte, and merging.

Only ``shards.py``, ``writing/`` and ``reading/`` import torch, so that ``hf-fsdp inspect``, ``verify`` and ``merge``
start without it.
"""
