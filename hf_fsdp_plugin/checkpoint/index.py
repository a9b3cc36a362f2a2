"""Where every tensor of a checkpoint lies, for every format that this package, Accelerate or the Trainer writes."""

from __future__ import annotations

from hf_fsdp_plugin.checkpoint.stored import ModelIndex, OptimizerIndex, StoredPiece, StoredTensor

__all__ = ["ModelIndex", "OptimizerIndex", "StoredPiece", "StoredTensor"]
