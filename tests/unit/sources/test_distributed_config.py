"""Transformers' ``DistributedConfig`` as a source of settings."""

import dataclasses
import json

import pytest
from transformers.distributed.configuration_utils import DistributedConfig

import hf_fsdp_plugin as hfp
from hf_fsdp_plugin.spec.load import with_script_settings
from hf_fsdp_plugin.vocabulary import find_row
from tests.support.matrices import needs_transformers


def with_replicas(*values):
    return pytest.param(*values, marks=needs_transformers("5.23"))


YAML = {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 1, "fsdp_sharding_strategy": 2}}


@pytest.mark.parametrize(
    ("fields", "name", "value"),
    [
        ({"fsdp_size": 4}, "mesh.shard", 4),
        ({"fsdp_size": 4}, "mesh.replicate", 1),
        ({"fsdp_size": 4}, "fsdp.version", 2),
        ({"fsdp_size": 4}, "sharding.strategy", "full_shard"),
        ({"fsdp_size": 4}, "offload.params", False),
        ({"fsdp_size": 4}, "precision.param", "auto"),
        ({"fsdp_size": 4}, "launch.distributed_type", "FSDP"),
        with_replicas({"fsdp_size": 2, "dp_replicate_size": 2}, "mesh.replicate", 2),
        with_replicas({"fsdp_size": 2, "dp_replicate_size": 2}, "sharding.strategy", "hybrid_shard"),
        with_replicas({"dp_replicate_size": 2}, "mesh.shard", 1),
        with_replicas({"dp_replicate_size": 2}, "sharding.strategy", "no_shard"),
        ({"fsdp_size": 2, "fsdp_cpu_offload": True}, "offload.params", True),
        ({"fsdp_size": 2, "fsdp_mixed_precision": True}, "precision.param", "bf16"),
        ({"fsdp_size": 2, "fsdp_mixed_precision": True}, "precision.reduce", "fp32"),
    ],
)
@pytest.mark.parametrize("make", [dict, lambda **fields: DistributedConfig(**fields)], ids=["dict", "object"])
def test_field_sets_setting(make, fields, name, value):
    spec = hfp.load_spec(distributed_config=make(**fields), environ={})
    assert spec.get(name) == value
    merged = with_script_settings(hfp.load_spec(YAML, environ={}), distributed_config=make(**fields))
    assert merged.get(name) == value


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(DistributedConfig)])
def test_every_field_is_known(field):
    row = find_row(field, ("distributed",))
    assert row is not None and row.scope == "distributed"


@pytest.mark.parametrize(
    "field",
    [
        {"tp_plan": {"layers.*.mlp.up_proj": "colwise"}}, {"ep_plan": {"layers.*.mlp.experts": "ep_dispatch_experts"}},
        {"ep_implementation": "all_to_all"}, {"enable_sequence_parallel": True}, {"enable_expert_parallel": True},
        {"fsdp_plan": {"layers.*": "free_full_weight"}},
    ],
    ids=str,
)  # fmt: skip
def test_field_without_effect_is_reported(codes, field):
    config = {"fsdp_size": 2, "tp_size": 1, **field}
    assert codes(distributed_config=config) == []
    assert codes(severity="note", distributed_config=config) == ["FSDP-N080"]


def test_pipeline_is_refused(codes):
    assert codes(distributed_config={"fsdp_size": 2, "pp_size": 2}) == ["FSDP-E122"]
    assert codes(distributed_config={"fsdp_size": 2, "pp_size": 1}) == []
    with pytest.raises(hfp.SpecError, match="FSDP-E122"):
        with_script_settings(hfp.load_spec(YAML, environ={}), distributed_config={"fsdp_size": 2, "pp_size": 2})


def test_axes_are_settings(codes):
    config = {"fsdp_size": 4, "tp_size": 2, "ep_size": 4, "tp_plan": {"layers.*": "colwise"}, "ep_plan": {"x": "y"}}
    mesh = with_script_settings(hfp.load_spec({"distributed_type": "FSDP"}, environ={}), distributed_config=config).mesh
    assert (mesh.shard, mesh.replicate, mesh.tensor, mesh.expert) == (4, 1, 2, 4)
    assert codes(severity="note", distributed_config=config) == []


def test_misspelled_field_is_refused(codes):
    assert codes(distributed_config={"fsdp_szie": 2}) == ["FSDP-E020"]


@pytest.mark.parametrize("size", ["two", 0, -1, 2.5])
def test_invalid_size_is_refused(codes, size):
    assert codes(distributed_config={"fsdp_size": size}) == ["FSDP-E101"]


def test_sizes_of_one_set_nothing(assess):
    assessment = assess(YAML, distributed_config={"fsdp_size": 1})
    assert [problem.code for problem in assessment.problems] == ["FSDP-N081"]
    assert assessment.spec.settings and assessment.spec.mesh == assess(YAML).spec.mesh
    assert assessment.spec.fsdp.version == 1


def test_values_of_other_sources_are_overridden(codes):
    config = {"fsdp_size": 2}
    assert codes(YAML, severity="warning", distributed_config=config) == ["FSDP-W103", "FSDP-W103"]
    merged = with_script_settings(hfp.load_spec(YAML, environ={}), distributed_config=config)
    assert [problem.code for problem in merged.problems if problem.severity == "warning"] == ["FSDP-W103"] * 2
    assert merged.prefetch.backward == "pre"
    assert with_script_settings(merged, distributed_config=config) == merged


def test_json_file_is_read(tmp_path):
    path = tmp_path / "distributed.json"
    DistributedConfig(fsdp_size=2).to_json_file(path)
    spec = hfp.load_spec(distributed_config=path, environ={})
    assert (spec.mesh.shard, spec.origin("mesh.shard").source) == (2, str(path))
    path.write_text(json.dumps({"fsdp_size": 2})[:-1])
    with pytest.raises(hfp.SpecError):
        hfp.load_spec(distributed_config=path, environ={})


@pytest.mark.parametrize("value", ["perhaps", "", [], {}, 2, 10**50], ids=range(6))
def test_switch_that_is_not_true_or_false_is_an_error(problems, value):
    (problem,) = problems(distributed_config={"fsdp_size": 2, "fsdp_mixed_precision": value})
    assert (problem.code, problem.origin.spelling) == ("FSDP-E101", "fsdp_mixed_precision")


@pytest.mark.parametrize("value", ["²", "٣", "1" * 5000, 10**50, True, "2.5"], ids=range(6))
def test_size_that_is_no_number_is_an_error(codes, value):
    assert codes(distributed_config={"fsdp_size": value}) == ["FSDP-E101"]
