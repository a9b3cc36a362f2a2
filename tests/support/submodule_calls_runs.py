"""Cases that ranks run: modules of a sharded model that are called outside the model's forward, and ``generate``."""

from __future__ import annotations

from typing import Any

import torch

from tests.support.training import fresh_accelerator


def encode(config: dict[str, Any], folder: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the embeddings that a sharded SentenceTransformer and a bare one compute."""
    from sentence_transformers import SentenceTransformer

    sentences = ["w1 w2 w3", "w4", "w5 w6"]
    expected = SentenceTransformer(folder, device="cpu").encode(sentences, convert_to_tensor=True)
    accelerator = fresh_accelerator(config)
    model = accelerator.prepare(SentenceTransformer(folder, device="cpu"))
    return accelerator.unwrap_model(model).encode(sentences, convert_to_tensor=True), expected
