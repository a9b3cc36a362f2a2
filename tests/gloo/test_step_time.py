"""A calibration of real ranks predicts the time of their steps."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from hf_fsdp_plugin.backends.sharding.shard import plan_of
from hf_fsdp_plugin.tools.plan.estimate.time import TimeModel
from hf_fsdp_plugin.tools.plan.estimate.types import Workload
from scripts.bench.calibration import Measuring, calibrate
from tests.support.matrices import slow
from tests.support.ranks import Ranks
from tests.support.tiny import parallel_config, tiny_llama
from tests.support.training import fresh_accelerator, sgd


def calibrated_and_measured(version: int) -> tuple[Any, float, float]:
    """The machine, and the predicted and measured CPU seconds of a step."""
    quick = Measuring(device=torch.device("cpu"), clock=time.process_time, repeats=2, block_seconds=0.002)
    machine = calibrate(quick)
    sizes = {"hidden_size": 128, "intermediate_size": 384}
    accelerator = fresh_accelerator(parallel_config("full_shard", version, 2))
    model = tiny_llama(**sizes)
    model, optimizer = accelerator.prepare(model, sgd(model))
    ids = torch.zeros(4, 64, dtype=torch.int64)
    times = []
    for _ in range(4):
        start = time.process_time()
        accelerator.backward(model(input_ids=ids, labels=ids).loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.process_time() - start)
    plan = plan_of(model)
    assert plan is not None
    workload = Workload(micro_batch=4, seq_len=64, optimizer="sgd")
    with torch.device("meta"):
        planned = tiny_llama(**sizes)
    estimate = TimeModel(plan, planned, workload).estimate(machine)
    return machine, estimate.step_seconds, min(times[1:])


@pytest.mark.cpu_ranks("the simulated device does not show speed")
@pytest.mark.parametrize("version", [slow(1), slow(2)])
def test_calibrated_ranks_predict_their_step_time(two_ranks: Ranks, version: int) -> None:
    (machine, predicted, measured), (other, *_) = two_ranks.run(calibrated_and_measured, version)
    assert machine == other  # all ranks have the same figures
    assert not machine.overlaps
    assert {row.kind for row in machine.collectives} == {"all_gather", "reduce_scatter", "all_reduce"}
    assert all(value > 0 for curve in machine.curves.values() for _, value in curve)
    # "python -m scripts.bench step_time" measures the accuracy; this short calibration runs beside other tests.
    assert 1 / 3 < predicted / measured < 3
