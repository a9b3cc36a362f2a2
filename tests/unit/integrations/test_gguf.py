"""Tensors of a GGUF file are moved to shared memory one by one, and only when they are complete."""

from __future__ import annotations

import torch

from hf_fsdp_plugin.integrations.transformers.loading import MovedTensors


class Recorder:
    """Records what would be moved."""

    def __init__(self) -> None:
        self.moved: list[float] = []

    def move(self, tensor: torch.Tensor) -> torch.Tensor:
        self.moved.append(float(tensor.sum()))
        return tensor.clone()


def test_tensor_is_moved_when_another_one_is_added() -> None:
    recorder = Recorder()
    tensors = MovedTensors(recorder)  # type: ignore[arg-type]
    for number in range(4):
        tensors[str(number)] = torch.full((2,), float(number))
        assert recorder.moved == [2.0 * earlier for earlier in range(number)]


def test_fused_experts_are_moved_when_both_parts_are_there() -> None:
    recorder = Recorder()
    tensors = MovedTensors(recorder)  # type: ignore[arg-type]
    tensors["experts"] = torch.zeros(2)
    tensors["experts"][0] = 1.0  # the gates, as Transformers fills them
    tensors["other"] = torch.full((2,), 4.0)
    tensors["another"] = torch.full((2,), 5.0)
    assert recorder.moved == [8.0]
    tensors["experts"][1] = 2.0
    tensors["last"] = torch.zeros(2)
    assert sorted(recorder.moved) == [3.0, 8.0, 10.0]
    assert tensors["experts"].tolist() == [1.0, 2.0]
