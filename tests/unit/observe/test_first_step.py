"""The facts that are recorded in the first training step, and later."""

import torch

from hf_fsdp_plugin.observe.first_step import record_first_step, recorded_first_step
from hf_fsdp_plugin.observe.units import gradient_bytes
from tests.unit.observe.live_models import make_model


def test_first_training_step_is_recorded() -> None:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    assert recorded_first_step(model).grads_bytes is None
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
