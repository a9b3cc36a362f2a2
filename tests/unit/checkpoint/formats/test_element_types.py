"""Element types by name: torch's sizes."""

from __future__ import annotations

import pytest
import torch

from hf_fsdp_plugin.checkpoint.formats.stored_tensors import SIZES


@pytest.mark.parametrize("name", sorted(SIZES))
def test_type_has_the_size_of_torch(name: str) -> None:
    assert SIZES[name] == getattr(torch, name).itemsize
