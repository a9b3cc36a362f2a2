"""The figures of a log, from the rows of ranks."""

from __future__ import annotations

import pytest

from hf_fsdp_plugin.devices import PEAK_FLOPS, peak_flops
from hf_fsdp_plugin.metrics.figures import figures_of, memory_figures, passes, slowest_rank
from hf_fsdp_plugin.metrics.rows import Row
from hf_fsdp_plugin.tools.plan.estimate.machines import machine_named

START = Row(step=10, measured=10, time=100.0, tokens=1000, forward=5.0, waiting=2.0)


def later(*, steps: int = 4, data: float = 0.0, forward: float = 1.0, waiting: float = 1.0, **values: float) -> Row:
    """The row of a rank some steps after START, in 2 seconds."""
    times = {"data": data, "forward": 5.0 + forward, "waiting": 2.0 + waiting}
    return Row(step=10 + steps, measured=10 + steps, time=102.0, tokens=1400, **times, **values)


def test_figures_are_rates_and_shares_of_the_steps_between() -> None:
    found = figures_of(
        {0: START, 1: START}, {0: later(), 1: later(data=0.5, waiting=0.5)}, world_size=2, flops=1e9, peak=1e12
    )
    assert found["step_seconds"] == pytest.approx(0.5)
    assert found["tokens_per_second"] == pytest.approx(400)
    assert found["tokens_per_second_per_rank"] == pytest.approx(200)
    assert found["tflops_per_rank"] == pytest.approx(0.2)
    assert found["mfu"] == pytest.approx(0.2)
    assert found["communication_exposed"] == pytest.approx(1.5 / 4)
    assert found["data_wait"] == pytest.approx(0.5 / 4)
    assert found["slowest_rank"] == 1
    assert found["slowest_rank_by"] == pytest.approx(0.5 / 1.5)


def test_figures_without_known_peak_have_no_mfu() -> None:
    found = figures_of({0: START}, {0: later()}, world_size=1, counts="samples", flops=1e9)
    assert "mfu" not in found
    assert "slowest_rank" not in found
    assert found["samples_per_second"] == pytest.approx(200)


def test_figures_of_no_step_are_empty() -> None:
    assert figures_of({0: START}, {0: START}, world_size=1) == {}
    assert figures_of({}, {}, world_size=2) == {}


def test_delay_hidden_in_communication_is_no_slower_rank() -> None:
    before, now = dict.fromkeys(range(3), START), {rank: later() for rank in range(3)}
    now[2] = later(forward=1.2, waiting=0.8)
    slower = slowest_rank(before, now)
    assert slower is not None
    assert (slower.rank, slower.phase) == (2, "forward")
    assert slower.by == pytest.approx(0.2 / 1.8)  # although its own time is 20% longer
    assert (slower.seconds, slower.usual) == (pytest.approx(0.3), pytest.approx(0.25))


def test_memory_is_that_of_the_fullest_rank() -> None:
    now = {0: later(peak=1 << 30), 1: later(peak=2 << 30, reserved=3 << 30)}
    assert memory_figures(now, 4 << 30) == {"memory_peak_gib": 2.0, "memory_reserved_gib": 3.0, "memory_share": 0.75}
    assert memory_figures({0: later(peak=1 << 30)}, None) == {"memory_peak_gib": 1.0}


def test_peaks_are_those_of_the_planner() -> None:
    """The runtime imports no tool, so that both have the figures of the data sheets."""
    for name in ("a100-40gb", "a100-80gb", "h100-sxm", "h100-pcie", "h200", "b200"):
        machine = machine_named(name)
        assert peak_flops(machine.device) == machine.peak["bf16"], name
    assert peak_flops("NVIDIA H100 80GB HBM3") == PEAK_FLOPS["H100"]
    assert peak_flops("NVIDIA GeForce RTX 4090") is None


def test_backward_of_frozen_weights_has_fewer_flops() -> None:
    assert passes(100, 100) == 3.0
    assert passes(100, 0) == 2.0
    assert passes(0, 0) == 3.0
