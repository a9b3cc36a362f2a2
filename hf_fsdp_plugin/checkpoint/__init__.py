"""Checkpoints: atomic writing, loading with any world size, and verification of every byte.

Only ``saved_state.py``, ``writing/`` and ``reading/`` import torch, so that ``hf-fsdp inspect`` and ``verify`` start
without it.
"""
