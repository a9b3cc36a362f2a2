"""Environment variables, including those that stock launchers write."""

import os

import pytest

from hf_fsdp_plugin.sources import environment
from hf_fsdp_plugin.spec.load import load_spec

LAUNCHED = {  # written by accelerate launch for a file with SHARD_GRAD_OP
    "ACCELERATE_USE_FSDP": "true", "ACCELERATE_MIXED_PRECISION": "bf16", "FSDP_VERSION": "1",
    "FSDP_SHARDING_STRATEGY": "SHARD_GRAD_OP", "FSDP_RESHARD_AFTER_FORWARD": "true", "FSDP_OFFLOAD_PARAMS": "false",
    "FSDP_MIN_NUM_PARAMS": "100000000", "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_FORWARD_PREFETCH": "false", "FSDP_TRANSFORMER_CLS_TO_WRAP": "['LlamaDecoderLayer']",
    "FSDP_USE_ORIG_PARAMS": "true", "FSDP_CPU_RAM_EFFICIENT_LOADING": "true", "FSDP_SYNC_MODULE_STATES": "true",
    "FSDP_ACTIVATION_CHECKPOINTING": "false", "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
    "ACCELERATE_DYNAMO_BACKEND": "NO", "OMP_NUM_THREADS": "1",
}  # fmt: skip


def test_variables_of_accelerate_launch_are_read(assess):
    assessment = assess(environ=LAUNCHED)
    assert not [problem for problem in assessment.problems if problem.severity != "note"]
    spec = assessment.spec
    assert (spec.sharding.strategy, spec.wrap.policy, spec.wrap.min_num_params) == ("shard_grad_op", "transformer", 0)
    assert (spec.wrap.classes, spec.precision.param) == (("LlamaDecoderLayer",), "bf16")


@pytest.mark.parametrize(("version", "strategy"), [("1", "shard_grad_op"), ("2", "full_shard")])
def test_env_version_selects_strategy_variable(assess, version, strategy):
    assessment = assess(environ=LAUNCHED | {"FSDP_VERSION": version})
    assert assessment.spec.sharding.strategy == strategy
    assert "FSDP-N110" in [problem.code for problem in assessment.problems]


def test_unknown_variable_is_warning_with_suggestion(problems):
    assert problems(environ={"FSDP_OFLOAD_PARAMS": "1"}) == []
    (problem,) = problems(environ={"FSDP_OFLOAD_PARAMS": "1"}, severity="warning")
    assert (problem.code, problem.origin.spelling) == ("FSDP-W035", "FSDP_OFLOAD_PARAMS")
    assert "FSDP_OFFLOAD_PARAMS" in problem.fix


@pytest.mark.parametrize(("value", "expected"), [("maybe", ["FSDP-E036"]), ("true", []), ("false", []), ("", [])])
def test_use_fsdp_variable_must_be_bool(codes, value, expected):
    assert codes(environ={"ACCELERATE_USE_FSDP": value}) == expected


def test_mesh_variables_are_read(assess):
    names = {"PARALLELISM_CONFIG_DP_SHARD_SIZE": "2", "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "2"}
    spec = assess(environ=names).spec
    assert (spec.mesh.shard, spec.mesh.replicate, spec.sharding.strategy) == (2, 2, "hybrid_shard")


@pytest.mark.parametrize(("value", "asked"), [("true", True), ("1", True), ("False", False)])
def test_use_cpu_false_of_launcher_is_not_a_setting(assess, value, asked):
    assert assess(environ={"ACCELERATE_USE_CPU": value}).spec.asked("launch.use_cpu") is asked


def test_environment_of_process_is_default(monkeypatch):
    monkeypatch.setenv("FSDP_OFFLOAD_PARAMS", "true")
    assert load_spec({"distributed_type": "FSDP"}).offload.params
    assert not load_spec({"distributed_type": "FSDP"}, environ={}).offload.params


@pytest.mark.parametrize(
    ("variables", "folder"),
    [
        ({"HF_HOME": "/hf"}, "/hf/accelerate"),
        ({"XDG_CACHE_HOME": "/xdg"}, "/xdg/huggingface/accelerate"),
        ({"HOME": "/home/me"}, "/home/me/.cache/huggingface/accelerate"),
        ({"HF_HOME": "~/hf", "HOME": "/home/me"}, "/home/me/hf/accelerate"),
    ],
)
def test_default_file_is_in_accelerate_cache(variables, folder):
    assert environment.accelerate_cache(variables) == folder.replace("/", os.sep)
