"""The table of readers covers the vocabulary, and readers return the value of the live model.

``tests/gloo/test_observe.py`` tests the other readers on sharded models.
"""

from typing import Any

import pytest
import torch

from hf_fsdp_plugin.observe.first_step import FirstStep
from hf_fsdp_plugin.observe.run_setting_readers import READERS, observe_settings, read_setting
from hf_fsdp_plugin.observe.weights import WeightComparison
from tests.unit.observe.live_models import make_plan, make_run


def test_every_setting_has_a_reader_or_a_reason() -> None:
    plan = make_plan()
    names = [name for name, _ in plan.settings()]
    assert set(names) >= READERS.keys()
    without_reader = [name for name in names if name not in READERS]
    assert {name.partition(".")[0] for name in without_reader} == {"launch", "xla"}
    # A setting that the plan decides differs from the spec's value, or is a section of the plan.
    assert not [name for name in without_reader if plan.get(name) != plan.spec.get(name)]
    for name in names:
        observed = read_setting(name, make_run())
        assert observed.reason or not observed.unobservable, name


@pytest.mark.parametrize(
    ("name", "facts", "value", "matches"),
    [
        ("sharding.strategy", {"world_size": 1}, "full_shard", True),
        ("precision.output", {"first_step": FirstStep(output_dtype=torch.bfloat16)}, "bf16", None),
        ("checkpoint.state_dict", {"state_dict": "local"}, "local", None),
        ("checkpoint.asynchronous", {"saved_asynchronously": True}, True, None),
        ("launch.num_processes", {"world_size": 3}, 3, None),
        ("launch.num_machines", {}, 1, None),
        ("launch.dynamo_config", {}, "not compiled", True),
        ("xla.enabled", {}, False, True),
    ],
)
def test_reader_returns_live_value(name: str, facts: Any, value: Any, matches: bool | None) -> None:
    observed = read_setting(name, make_run(**facts))
    assert (observed.value, observed.matches, observed.unobservable) == (value, matches, False)


@pytest.mark.parametrize(("asked", "status"), [("auto", "applied"), ("bf16", "applied"), ("fp32", "differs")])
def test_dtype_that_is_not_asked_for_matches(asked: str, status: str) -> None:
    plan = make_plan(fsdp_mixed_precision_policy={"output_dtype": asked})
    rows = observe_settings(make_run(plan, first_step=FirstStep(output_dtype=torch.bfloat16)))
    assert [row["status"] for row in rows if row["setting"] == "precision.output"] == [status]


@pytest.mark.parametrize(
    "name", ["checkpoint.state_dict", "checkpoint.asynchronous", "offload.pin_memory", "launch.machine_rank"]
)
def test_reader_without_evidence_is_unobservable(name: str) -> None:
    assert read_setting(name, make_run()).unobservable


@pytest.mark.parametrize(
    ("weights", "value", "matches"),
    [
        ({"num_on_meta": 2}, False, False),
        ({"differing": ("unit 0",)}, False, False),
        ({"num_broadcast": 6, "num_shared_ranks": 2}, True, True),
        ({"num_broadcast": 6, "num_shared_ranks": 0}, None, None),
        ({"num_broadcast": 5, "num_shared_ranks": 2}, False, False),
        ({"replicated": True}, True, True),
        ({}, None, None),
    ],
)
def test_ram_efficient_follows_from_compared_weights(weights: Any, value: Any, matches: bool | None) -> None:
    compared = WeightComparison(**{"num_on_meta": 0, "differing": (), "replicated": False, **weights})
    run = make_run(make_plan(fsdp_cpu_ram_efficient_loading=True), weights=compared)
    observed = read_setting("loading.ram_efficient", run)
    assert (observed.value, observed.matches, observed.unobservable) == (value, matches, value is None)
