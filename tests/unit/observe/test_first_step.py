"""Facts that only a running step shows."""

import torch
from torch import nn

from hf_fsdp_plugin.observe.first_step import record_first_step, recorded_first_step
from hf_fsdp_plugin.observe.memory import gradient_bytes, storage_bytes


def test_first_training_step_is_recorded(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    first_step = record_first_step(model, optimizer)
    model.eval()(torch.ones(1, 4))
    assert first_step.output_dtype is None
    for _ in range(2):
        model.train()(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert first_step.output_dtype is torch.float32
    assert first_step.grads_bytes == 4 * 50 and gradient_bytes(model, []) == 0
    assert recorded_first_step(model) is first_step


def test_model_without_recording_has_empty_facts(model: nn.Module) -> None:
    assert recorded_first_step(model).grads_bytes is None


def test_shared_storage_is_counted_once() -> None:
    tensor = torch.ones(8)
    assert storage_bytes([tensor, tensor[:2], torch.ones(2, device="meta")]) == 32
    assert storage_bytes([tensor, torch.ones(1)], excluding=[tensor]) == 4
