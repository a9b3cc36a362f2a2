"""Every setting in every pair of sources: the stronger source wins, and the weaker value is reported."""

from __future__ import annotations

from typing import Any

import pytest

from hf_fsdp_plugin.spec.fsdp_spec import FsdpSpec
from hf_fsdp_plugin.vocabulary import BY_NAME, PREFIXES, ROWS, SettingRow

VALUES: dict[str, tuple[Any, Any, Any, Any]] = {
    "bool": (True, "yes", False, "off"),
    "integer": (2, "2", 3, "3.0"),
    "count": (10**6, "1M", 2000, "2_000"),
    "size": (2, "2", 4, "4"),
    "names": (("A",), "['A']", ("B",), "B,"),
    "text": ("a.*", "a.*", "b.*", "b.*"),
    "devices": ("0", "0", "1,2", "1, 2"),
}
"""Kind -> a value with a spelling of it, and another value with a spelling of it."""
ROWS_OF_SPEC = [row for row in BY_NAME.values() if not row.internal and row.opens is None and row.kind in VALUES]
CHOICES = [row for row in BY_NAME.values() if not row.internal and row.kind in ("choice", "mode")]
FIXED = {"launch.compute_environment", "launch.distributed_type"}
"""Settings whose values are other engines or launchers."""


def _pair(row: SettingRow) -> tuple[Any, str, Any, str]:
    if row.kind in VALUES:
        return VALUES[row.kind]
    (one, ways), (two, others) = [item for item in row.choices.items() if item[0] != "auto"][:2]
    typed = [int(value) if value.isdigit() else value for value in (one, two)]
    return typed[0], (*ways, one)[0], typed[1], (*others, two)[0]


def _section(row: SettingRow, value: str) -> dict[str, Any]:
    sections = {"fsdp": "fsdp_config", "parallelism": "parallelism_config", "fp8": "fp8_config"}
    if row.scope == "precision":
        return {"fsdp_config": {"fsdp_mixed_precision_policy": {row.key: value}}}
    return {sections[row.scope]: {row.key: value}} if row.scope in sections else {row.key: value}


def _sources(row: SettingRow, value: str) -> dict[str, dict[str, Any]]:
    """Return the sources that can set a row, strongest first."""
    found: dict[str, dict[str, Any]] = {"--set": {"overrides": [f"{row.name}={value}"]}}
    if row.scope in ("fsdp", "parallelism", "fp8", "launch") and row.key != "use_cpu" and row.kind != "bool":
        found["command line"] = {"command_line": [f"--{row.key}={value}"]}
    if row.scope in ("fsdp", "precision"):
        found["TrainingArguments"] = {"fsdp": True, "fsdp_config": _section(row, value)["fsdp_config"]}
    found["config"] = {"config": {"distributed_type": "FSDP", **_section(row, value)}}
    if row.scope == "fsdp":
        found["environment"] = {"environ": {PREFIXES["fsdp"].upper() + row.spellings[0].upper(): value}}
    return found


@pytest.mark.parametrize("row", [*ROWS_OF_SPEC, *CHOICES], ids=lambda row: row.name)
def test_stronger_source_wins_in_every_pair(assess, row):
    if row.name in FIXED:
        pytest.skip("other values are other engines")
    one, way, two, other = _pair(row)
    for value, written, weak in ((one, way, other), (two, other, way)):
        strong_sources, weak_sources = _sources(row, written), _sources(row, weak)
        names = list(strong_sources)
        for position, high in enumerate(names):
            for low in names[position + 1 :]:
                assessment = assess(**strong_sources[high], **weak_sources[low])
                assert assessment.spec.get(row.name) == value, (high, low)
                codes = {problem.code for problem in assessment.problems if problem.setting == row.name}
                assert "FSDP-W103" in codes or "FSDP-N105" in codes, (high, low, assessment.problems)


def test_every_setting_is_in_a_pair():
    covered = {row.name for row in (*ROWS_OF_SPEC, *CHOICES)}
    rest = {
        "xla.settings",
        "launch.dynamo_config",
        "launch.extra",
        "fp8.te_options",
        "activation.native",
        "launch.main_training_function",
    }
    assert covered | rest == {name for name, _, _ in FsdpSpec().settings()}


NO_WRAP = {"distributed_type": "FSDP", "fsdp_config": {"fsdp_auto_wrap_policy": "NO_WRAP"}}


def test_auto_wrap_of_a_stronger_source_overrides_no_wrap(assess):
    assessment = assess(NO_WRAP, fsdp="full_shard auto_wrap")
    assert assessment.spec.wrap.policy == "transformer"
    (problem,) = (problem for problem in assessment.problems if problem.code == "FSDP-W103")
    assert (problem.setting, problem.origin.text) == ("wrap.policy", "NO_WRAP")


def test_no_wrap_of_a_stronger_source_overrides_auto_wrap(assess):
    assessment = assess(fsdp="full_shard auto_wrap", overrides=["wrap.policy=none"])
    assert assessment.spec.wrap.policy == "none"
    assert [problem.setting for problem in assessment.problems if problem.code == "FSDP-W103"] == ["wrap.policy"]


def test_auto_wrap_and_no_wrap_of_one_source_conflict(codes):
    assert codes(fsdp="full_shard auto_wrap", fsdp_config={"auto_wrap_policy": "NO_WRAP"}) == ["FSDP-E102"]
    assert codes(fsdp="full_shard auto_wrap", fsdp_config={"auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}) == []


@pytest.mark.parametrize(("reshard", "strategy"), [("true", "full_shard"), ("false", "shard_grad_op")])
def test_reshard_of_a_stronger_source_overrides_no_shard(assess, reshard, strategy):
    config = {"distributed_type": "FSDP", "fsdp_config": {"fsdp_sharding_strategy": "NO_SHARD"}}
    assessment = assess(config, overrides=[f"reshard_after_forward={reshard}"])
    assert assessment.spec.sharding.strategy == strategy
    assert [problem.setting for problem in assessment.problems] == ["sharding.strategy"]


def test_checkpointing_that_is_off_does_not_hide_the_trainers(assess):
    arguments = {"fsdp": True, "gradient_checkpointing": True}
    assessment = assess(training_arguments=arguments, overrides=["activation.checkpointing=none"])
    assert assessment.spec.activation.native
    assert "FSDP-W150" in [problem.code for problem in assessment.problems]
    weaker = assess({"fsdp_config": {"fsdp_activation_checkpointing": False}}, training_arguments=arguments)
    assert "FSDP-W150" not in [problem.code for problem in weaker.problems]


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_false_flag_turns_off_a_weaker_mode(assess, dtype):
    config = {"distributed_type": "FSDP", "mixed_precision": dtype}
    assessment = assess(config, overrides=[f"{dtype}=false"])
    assert (assessment.spec.launch.mixed_precision, assessment.spec.precision.param) == ("no", "auto")
    notes = [problem.origin.spelling for problem in assessment.problems if problem.code == "FSDP-N105"]
    assert notes == ["mixed_precision"]
    assert assess(config, training_arguments={dtype: False}).spec.precision.param == dtype
    other = {"bf16": "fp16", "fp16": "bf16"}[dtype]
    assert assess(config, overrides=[f"{other}=false"]).spec.precision.param == dtype
    assert assess(config, environ={}, overrides=[f"mixed_precision={other}"]).spec.precision.param == other


def test_false_flag_and_mode_of_one_source_conflict(codes):
    assert codes({"distributed_type": "FSDP", "fp16": False, "mixed_precision": "fp16"}) == ["FSDP-E102"]
    assert codes({"distributed_type": "FSDP", "fp16": False, "mixed_precision": "bf16"}) == []


def test_every_kind_is_documented():
    from scripts.update_docs import KINDS

    assert {row.kind for row in ROWS} - {"choice", "mode"} <= set(KINDS)
