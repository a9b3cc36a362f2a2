"""Decisions of models that depend on the values of tensors, which fake tensors do not have."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def unpacked_samples() -> Iterator[None]:
    """Make Transformers create the attention mask of samples that are not packed.

    Transformers looks for packed samples in the position ids. For fake tensors it assumes that there are some, and
    creates a mask of all pairs of tokens, which real tensors without packing do not need.
    """
    masking: Any = sys.modules.get("transformers.masking_utils")
    original = getattr(masking, "find_packed_sequence_indices", None)
    if original is None:
        yield
        return
    masking.find_packed_sequence_indices = lambda position_ids: None
    try:
        yield
    finally:
        masking.find_packed_sequence_indices = original
