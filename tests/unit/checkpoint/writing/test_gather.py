"""The note about large models that are gathered on rank 0."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from hf_fsdp_plugin.checkpoint.writing import state_files


@pytest.mark.parametrize(
    ("num_bytes", "world_size", "noted"), [(280e9, 8, True), (280e9, 1, False), (1e9, 8, False), (0, 8, False)]
)
def test_large_models_are_noted(
    monkeypatch: pytest.MonkeyPatch, num_bytes: float, world_size: int, noted: bool
) -> None:
    printed: list[str] = []
    monkeypatch.setattr(state_files, "print_once", lambda problem: printed.append(str(problem)))
    monkeypatch.setattr(dist, "get_world_size", lambda: world_size)
    state_files._note_size(int(num_bytes))
    assert len(printed) == noted
    assert all("FSDP-N407" in text and "280 GB" in text and "hf-fsdp merge" in text for text in printed)
