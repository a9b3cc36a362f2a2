"""Values without content: null means "not set"; empty text, lists and mappings are errors."""

from typing import Any

import pytest

from hf_fsdp_plugin.vocabulary import BY_NAME, ROWS, SettingRow, canonical_setting

KEYS = [row for row in ROWS if row.scope in ("fsdp", "parallelism", "launch", "dynamo", "fp8", "precision")]
SETTINGS = [row for row in KEYS if row.opens is None and not row.ignored and row.kind != "any"]
TEXTS = [row for row in SETTINGS if row.scope == "fsdp" and row.kind != "mapping"]


def _config(row: SettingRow, value: Any) -> dict[str, Any]:
    section = {row.key: value}
    if row.scope == "precision":
        return {"fsdp_config": {"fsdp_mixed_precision_policy": section}}
    sections = {name: f"{name}_config" for name in ("fsdp", "parallelism", "dynamo", "fp8")}
    return {sections[row.scope]: section} if row.scope in sections else section


@pytest.mark.parametrize("row", SETTINGS, ids=lambda row: row.key)
def test_null_is_not_set(assess, row):
    assessment = assess(_config(row, None))
    name = canonical_setting(row.name)
    assert assessment.ok and (name is None or not assessment.spec.asked(name))


@pytest.mark.parametrize("row", SETTINGS, ids=lambda row: row.key)
def test_empty_value_in_a_config_is_an_error(problems, row):
    for empty in ("", "  ", [], {}) if row.kind != "mapping" else ("", "  "):
        (problem,) = problems(_config(row, empty))
        assert (problem.code, problem.setting, problem.origin.spelling) == (
            "FSDP-E050",
            canonical_setting(row.name),
            row.key,
        )
        assert row.key in problem.fix


@pytest.mark.parametrize("row", SETTINGS, ids=lambda row: row.key)
def test_word_for_null_is_refused_unless_it_is_a_choice(codes, row):
    for word in ("none", "None", "null", "~"):
        is_choice = any(word.lower() in (value.lower(), *others) for value, others in row.choices.items())
        assert ("FSDP-E050" in codes(_config(row, word))) is not is_choice


@pytest.mark.parametrize("row", TEXTS, ids=lambda row: row.key)
def test_variable_without_a_value_is_not_set(assess, row):
    for value in ("", "none", "NULL"):
        assessment = assess(environ={f"FSDP_{row.spellings[0].upper()}": value})
        assert assessment.ok, assessment.problems
        is_choice = any(value.lower() in (name, *others) for name, others in row.choices.items())
        name = canonical_setting(row.name)
        assert is_choice or name is None or not assessment.spec.asked(name)


@pytest.mark.parametrize("row", TEXTS, ids=lambda row: row.key)
def test_set_and_flag_without_a_value_are_errors(codes, row):
    config = {"fsdp_config": {"fsdp_version": 2}}
    assert codes(config, overrides=[f"{row.key}="]) == ["FSDP-E050"]
    assert codes(config, overrides={row.key: None}) == ["FSDP-E050"]
    assert codes(config, command_line=[f"--{row.key}="]) == ["FSDP-E050"]


def test_null_leaves_the_weaker_source(assess, tmp_path):
    path = tmp_path / "fsdp.yaml"
    path.write_text("distributed_type: FSDP\nfsdp_config:\n  fsdp_sharding_strategy:\n")
    spec = assess(str(path), environ={"FSDP_SHARDING_STRATEGY": "2"}).spec
    assert str(spec.origin("sharding.strategy")) == "environment FSDP_SHARDING_STRATEGY=2"


@pytest.mark.parametrize("override", ["sharding.strategy=", "sharding.strategy=none"])
def test_empty_override_does_not_leave_a_weaker_source(assess, override):
    assert not assess({"fsdp_config": {"fsdp_sharding_strategy": 2}}, overrides=[override]).ok


@pytest.mark.parametrize("section", ["fsdp_config", "parallelism_config", "dynamo_config"])
def test_section_without_keys_is_accepted(codes, section):
    assert codes({"distributed_type": "FSDP", section: None}) == []
    assert codes({"distributed_type": "FSDP", section: {}}) == []
    assert codes({"distributed_type": "FSDP", section: ""}) == ["FSDP-E022"]
    assert codes({"distributed_type": "FSDP", section: []}) == ["FSDP-E022"]


def test_null_fields_of_a_distributed_config_have_defaults(assess):
    spec = assess(distributed_config={"fsdp_size": 2, "tp_size": None, "fsdp_cpu_offload": None}).spec
    assert (spec.mesh.shard, spec.offload.params) == (2, False)


def test_every_setting_of_the_spec_is_covered():
    assert {canonical_setting(row.name) for row in SETTINGS} >= {
        name for name, row in BY_NAME.items() if not row.internal and not row.ignored and row.opens is None
    }
