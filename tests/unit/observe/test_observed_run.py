"""The comparison of each requested setting with the live model, and the problems of settings that differ."""

from typing import Any

import pytest

from hf_fsdp_plugin.observe.observed_run import JsonObject, check_settings, format_value
from hf_fsdp_plugin.observe.run_setting_readers import observe_settings
from tests.unit.observe.live_models import make_plan, make_run, make_unit


def rows_of(plan: Any, **facts: Any) -> dict[str, JsonObject]:
    return {row["setting"]: row for row in observe_settings(make_run(plan, **facts))}


def test_report_shows_set_settings_and_important_defaults() -> None:
    rows = rows_of(make_plan())
    assert {"sharding.strategy", "mesh.shard", "wrap.classes", "fsdp.version"} <= rows.keys()
    assert not {"offload.pin_memory", "launch.debug"} & rows.keys()
    assert "offload.pin_memory" in rows_of(make_plan(fsdp_offload_params=True, fsdp_pin_memory=True))


def test_origin_of_a_row_is_that_of_the_spec() -> None:
    plan = make_plan(fsdp_sharding_strategy="FULL_SHARD")
    rows = rows_of(plan)
    assert rows["sharding.strategy"]["origin"] == plan.spec.origin("sharding.strategy").to_json()
    assert rows["prefetch.backward"]["origin"]["source"] == "default"


def test_auto_is_compared_with_the_planned_value() -> None:
    row = rows_of(make_plan(fsdp_size="auto"))["mesh.shard"]
    assert [row[name] for name in ("asked", "planned", "observed", "status")] == ["auto", 2, 2, "applied"]


@pytest.mark.parametrize(
    ("settings", "problems"),
    [
        ({"fsdp_sharding_strategy": "SHARD_GRAD_OP"}, [("FSDP-E503", "sharding.strategy")]),
        ({"fsdp_use_orig_params": False}, [("FSDP-W506", "params.use_orig")]),
        ({"fsdp_sharding_strategy": "FULL_SHARD", "fsdp_backward_prefetch": "BACKWARD_PRE"}, []),
    ],
)
def test_setting_that_differs_has_one_problem(settings: Any, problems: list[tuple[str, str]]) -> None:
    plan = make_plan(**settings)
    found = check_settings(observe_settings(make_run(plan)), plan)
    assert [(problem.code, problem.setting) for problem in found] == problems
    assert all(problem.origin == plan.spec.origin(problem.setting) for problem in found)


def test_model_without_units_differs_in_every_section() -> None:
    rows = rows_of(make_plan(), units=()).values()
    assert {row["status"] for row in rows if not row["setting"].startswith("launch.")} == {"differs"}


@pytest.mark.parametrize(
    "units", [(make_unit("", num_params=0),), (make_unit("0", num_params=0), make_unit("", num_params=0))]
)
@pytest.mark.parametrize("settings", [{}, {"fsdp_offload_params": True}, {"fsdp_mixed_precision_policy": "bf16"}])
def test_units_without_parameters_are_unobservable(units: Any, settings: dict[str, Any]) -> None:
    rows = rows_of(make_plan(**settings), units=units)
    assert not [row for row in rows.values() if "mixed" in str(row["observed"])]
    for name in ("mesh.shard", "mesh.replicate", "precision.param", "offload.params"):
        assert (rows[name]["status"], rows[name]["observed"]) == ("unobservable", None), name
    assert not [row for row in rows.values() if row["status"] == "differs" and not row["setting"].startswith("wrap.")]


@pytest.mark.parametrize(
    ("value", "text"), [(True, "true"), ((), "nothing"), (["a", "b"], "a, b"), (None, ""), (2, "2")]
)
def test_value_is_formatted_for_the_table(value: Any, text: str) -> None:
    assert format_value(value) == text
