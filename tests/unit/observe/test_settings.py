"""Each setting as asked and as observed, and the problems of those that differ."""

from collections.abc import Callable
from typing import Any

import pytest

from hf_fsdp_plugin.observe.settings import check_settings, format_value, observe_settings

Make = Callable[..., Any]


def statuses(make_run: Make, plan: Any, **facts: Any) -> dict[str, str]:
    return {row.setting: row.status for row in observe_settings(make_run(plan, **facts))}


def test_settings_that_no_source_sets_are_limited(make_run: Make, make_plan: Make) -> None:
    rows = statuses(make_run, make_plan())
    assert {"sharding.strategy", "mesh.shard", "wrap.classes", "fsdp.version"} <= rows.keys()
    assert not {"offload.pin_memory", "launch.debug"} & rows.keys()
    assert statuses(make_run, make_plan(fsdp_offload_params=True, fsdp_pin_memory=True))["offload.pin_memory"]


def test_auto_is_compared_with_the_planned_value(make_run: Make, make_plan: Make) -> None:
    [row] = [row for row in observe_settings(make_run(make_plan(fsdp_size="auto"))) if row.setting == "mesh.shard"]
    assert (row.asked, row.planned, row.observed, row.status) == ("auto", 2, 2, "applied")


@pytest.mark.parametrize(
    ("settings", "name", "code"),
    [
        ({"fsdp_sharding_strategy": "SHARD_GRAD_OP"}, "sharding.strategy", "FSDP-E503"),
        ({"fsdp_forward_prefetch": True}, "prefetch.forward", "FSDP-E503"),
        ({"fsdp_use_orig_params": False}, "params.use_orig", "FSDP-W506"),
        ({"fsdp_limit_all_gathers": False}, "prefetch.limit_all_gathers", "FSDP-W506"),
    ],
)
def test_setting_that_differs_has_one_problem(
    make_run: Make, make_plan: Make, settings: Any, name: str, code: str
) -> None:
    plan = make_plan(**settings)
    problems = check_settings(observe_settings(make_run(plan)), plan)
    assert [(problem.code, problem.setting) for problem in problems] == [(code, name)]
    assert problems[0].origin == plan.spec.origin(name)


def test_model_without_units_differs_in_every_section(make_run: Make, make_plan: Make) -> None:
    rows = statuses(make_run, make_plan(), units=())
    assert {status for name, status in rows.items() if not name.startswith("launch.")} == {"differs"}


def test_settings_that_match_have_no_problem(make_run: Make, make_plan: Make) -> None:
    plan = make_plan(fsdp_sharding_strategy="FULL_SHARD", fsdp_backward_prefetch="BACKWARD_PRE")
    assert check_settings(observe_settings(make_run(plan)), plan) == []


@pytest.mark.parametrize(
    ("value", "text"), [(True, "true"), ((), "nothing"), (["a", "b"], "a, b"), (None, ""), (2, "2")]
)
def test_format_value(value: Any, text: str) -> None:
    assert format_value(value) == text
