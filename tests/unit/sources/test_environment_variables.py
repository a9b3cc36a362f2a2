"""Environment variables, including those that stock launchers write."""

import os

import pytest

from hf_fsdp_plugin.sources import config_location, environment_variables
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


@pytest.mark.parametrize(("value", "expected"), [("maybe", ["FSDP-E101"]), ("true", []), ("false", []), ("", [])])
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
    assert config_location.accelerate_cache(variables) == folder.replace("/", os.sep)


POD = {
    "PET_NNODES": "4", "PET_NPROC_PER_NODE": "8", "PET_RDZV_BACKEND": "c10d", "PET_RDZV_ENDPOINT": "worker-0:23456",
    "PET_MASTER_ADDR": "unused", "PET_RDZV_ID": "job", "PET_MAX_RESTARTS": "3", "RANK": "1", "WORLD_SIZE": "4",
}  # fmt: skip
"""As the training operator of Kubernetes sets them."""
STATIC = {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "master-0", "PET_MASTER_PORT": "23456"}
ONE_MACHINE = {"distributed_type": "FSDP", "num_machines": 1, "num_processes": 2, "machine_rank": 0}


def test_variables_of_torchrun_override_the_config(assess):
    assessment = assess(ONE_MACHINE, environ=POD)
    launch = assessment.spec.launch
    assert (launch.num_machines, launch.num_processes, launch.rdzv_backend) == (4, 32, "c10d")
    assert (launch.main_process_ip, launch.main_process_port) == ("worker-0", 23456)
    assert str(assessment.spec.origin("launch.num_machines")) == "environment PET_NNODES=4"
    notes = [(each.code, each.setting) for each in assessment.problems if each.code == "FSDP-N105"]
    assert notes == [("FSDP-N105", "launch.num_machines"), ("FSDP-N105", "launch.num_processes")]
    launch = assess(ONE_MACHINE, environ=STATIC).spec.launch
    assert (launch.num_machines, launch.machine_rank, launch.main_process_port) == (2, 1, 23456)


def test_flags_override_variables_of_torchrun(assess):
    flags = ["--num_machines=2", "--main_process_ip", "10.0.0.1"]
    assessment = assess(ONE_MACHINE, environ=POD, command_line=flags)
    launch = assessment.spec.launch
    assert (launch.num_machines, launch.num_processes, launch.main_process_ip) == (2, 16, "10.0.0.1")
    assert {each.severity for each in assessment.problems} == {"note"}
    assert assess(environ=POD, overrides=["num_processes=4"]).spec.launch.num_processes == 4


def test_ranks_of_other_launchers_ignore_variables_of_torchrun(assess):
    """Flags of torchrun have replaced them, or the pod itself is the rank."""
    for variables in (POD | {"TORCHELASTIC_RUN_ID": "job"}, environment_variables.variables_without_torchrun(POD)):
        assert assess(ONE_MACHINE, environ=variables).spec.launch.num_machines == 1


@pytest.mark.parametrize(("value", "ranks"), [("auto", "auto"), ("gpu", "auto"), ("3", 3)])
def test_ranks_of_a_pod(assess, value, ranks):
    assert assess(environ={"PET_NPROC_PER_NODE": value}).spec.launch.num_processes == ranks


@pytest.mark.parametrize(
    ("name", "value", "setting"),
    [
        ("PET_NNODES", "two", "num_machines"),
        ("PET_NNODES", "2:4", "num_machines"),
        ("PET_NNODES", "0", "num_machines"),
        ("PET_NPROC_PER_NODE", "cpu", "num_processes"),
        ("PET_NODE_RANK", "first", "machine_rank"),
        ("PET_RDZV_ENDPOINT", "worker-0:port", "main_process_port"),
        ("PET_RDZV_BACKEND", "etcd-v2", "rdzv_backend"),
    ],
)
def test_invalid_variable_of_torchrun_is_one_error(problems, name, value, setting):
    (problem,) = problems(environ={name: value})
    assert (problem.code, problem.setting, problem.origin.spelling) == ("FSDP-E101", f"launch.{setting}", name)
    assert value.rpartition(":")[2] in problem.message and problem.fix


def test_options_from_variables_of_torchrun():
    found = environment_variables.torchrun_options(POD | {"PET_RDZV_CONF": "timeout=60"})
    assert found == {"max_restarts": "3", "rdzv_conf": "timeout=60"}
    assert environment_variables.torchrun_options(STATIC) == {}
    assert environment_variables.torchrun_options(POD | {"TORCHELASTIC_RUN_ID": "job"}) == {}
