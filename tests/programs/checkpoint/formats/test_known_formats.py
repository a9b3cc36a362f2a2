"""The part of tests/unit/checkpoint/formats/test_known_formats.py that starts processes or computes for seconds."""

from __future__ import annotations

import time
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

from hf_fsdp_plugin.checkpoint.formats.known_formats import read_stored_model


def test_reading_time_is_proportional_to_the_pieces(tmp_path: Path) -> None:
    seconds = []
    for num_pieces in (450, 1800):
        folder = tmp_path / str(num_pieces)
        weights = {f"layers.{i}.weight": torch.zeros(2, i % 3 + 1) for i in range(num_pieces)}
        dcp.save({"model": weights}, checkpoint_id=folder / "pytorch_model_fsdp_0", no_dist=True)
        durations = []
        for _ in range(3):
            start = time.process_time()
            index = read_stored_model(folder)
            durations.append(time.process_time() - start)
        assert len(index.tensors) == num_pieces
        seconds.append(min(durations))
    assert seconds[1] < 10 * seconds[0]  # 4 if it is proportional, 16 if it is quadratic
