"""Precedence of the sources: every pair, with equal and with different values."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from hf_fsdp_plugin.spec.precedence import PRECEDENCE

GIVEN: dict[str, Callable[[str], dict[str, Any]]] = {
    "DistributedConfig": lambda value: {"distributed_config": {"fsdp_size": 2, "fsdp_cpu_offload": value}},
    "--set": lambda value: {"overrides": [f"offload.params={value}"]},
    "command line": lambda value: {"command_line": ["--fsdp_offload_params", value]},
    "TrainingArguments": lambda value: {"fsdp": True, "fsdp_config": {"offload_params": value}},
    "FullyShardedDataParallelPlugin": lambda value: {"plugin_object": {"cpu_offload": value}},
    "config": lambda value: {"config": {"distributed_type": "FSDP", "fsdp_config": {"fsdp_offload_params": value}}},
    "environment": lambda value: {"environ": {"FSDP_OFFLOAD_PARAMS": value}},
}
PAIRS = list(itertools.combinations(GIVEN, 2))


def test_every_source_has_precedence_test():
    # These two set a mesh only, and settings of the launcher only.
    assert len(PRECEDENCE) == len({*GIVEN, "ParallelismConfig", "variables of torchrun"})


@pytest.mark.parametrize(
    ("other", "code", "shard"),
    [
        ({"overrides": ["mesh.shard=8"]}, "FSDP-W103", 8),
        ({"fsdp": True, "fsdp_config": {"dp_shard_size": 8}}, "FSDP-W103", 8),
        ({"plugin_object": {"fsdp_version": 2}}, None, 4),
        ({"config": {"distributed_type": "FSDP", "fsdp_config": {"dp_shard_size": 8}}}, "FSDP-W103", 4),
        ({"environ": {"ACCELERATE_USE_FSDP": "true", "PARALLELISM_CONFIG_DP_SHARD_SIZE": "4"}}, "FSDP-N104", 4),
    ],
    ids=str,
)
def test_mesh_of_parallelism_config_has_level_of_the_script(assess, other, code, shard):
    mesh = {"dp_shard_size": 4, "dp_replicate_size": 2}
    found = assess(**{"config": {"distributed_type": "FSDP"}, **other}, parallelism_config=mesh)
    assert found.ok and (found.spec.mesh.replicate, found.spec.mesh.shard) == (2, shard)
    codes = [problem.code for problem in found.problems if problem.setting == "mesh.shard"]
    assert codes == ([code] if code else [])


BY_FLAG = set(itertools.product(("--set", "command line"), ("config", "environment")))


@pytest.mark.parametrize(("lower_value", "code"), [("false", "FSDP-W103"), ("yes", "FSDP-N104")])
@pytest.mark.parametrize(("high", "low"), PAIRS)
def test_higher_source_overrides_lower(assess, high, low, lower_value, code):
    """A flag that overrides a file or the environment is a note: it is given for one run, on purpose."""
    code = "FSDP-N105" if code == "FSDP-W103" and (high, low) in BY_FLAG else code
    assessment = assess(**GIVEN[high]("true"), **GIVEN[low](lower_value))
    assert assessment.ok
    assert assessment.spec.offload.params is True
    (problem,) = (problem for problem in assessment.problems if problem.setting == "offload.params")
    assert (problem.code, problem.origin.text) == (code, lower_value)
    assert str(assessment.spec.origin("offload.params")) in problem.message


def test_two_values_in_one_source_are_error(problems):
    (problem,) = problems({"fsdp_config": {"fsdp_offload_params": True, "cpu_offload": False}})
    assert (problem.code, problem.setting, problem.origin.spelling) == ("FSDP-E102", "offload.params", "cpu_offload")
    assert "config fsdp_offload_params=True" in problem.message


@pytest.mark.parametrize(
    "section",
    [{"fsdp_offload_params": True, "cpu_offload": "yes"}, {"fsdp_sharding_strategy": 1, "strategy": "FULL_SHARD"}],
)
def test_equal_values_in_one_source_are_note(codes, section):
    assert codes({"fsdp_config": section}) == []
    assert codes({"fsdp_config": section}, severity="note") == ["FSDP-N104"]


def test_training_arguments_and_plugin_have_equal_precedence(codes):
    assert codes(fsdp="full_shard", plugin_object={"reshard_after_forward": False}) == ["FSDP-E102"]
    assert codes({"fsdp_config": {"fsdp_sharding_strategy": 1}}, plugin_object={"reshard_after_forward": False}) == []


def test_fsdp_false_does_not_disable_launcher(assess):
    assessment = assess({"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 1}}, fsdp=False)
    assert assessment.ok
    assert assessment.spec.launch.distributed_type == "FSDP"


def test_fsdp_variable_alone_does_not_enable_fsdp(assess):
    alone = {"FSDP_CPU_RAM_EFFICIENT_LOADING": "false"}
    assert assess(fsdp=False, environ=alone).spec.launch.distributed_type == "NO"
    assert assess(fsdp=False, environ={"ACCELERATE_USE_FSDP": "true"}).spec.launch.distributed_type == "FSDP"


def test_fsdp_in_script_enables_it_under_other_launcher(assess):
    assessment = assess({"distributed_type": "MULTI_GPU", "num_processes": 2}, fsdp="full_shard auto_wrap")
    assert assessment.ok
    assert assessment.spec.launch.distributed_type == "FSDP"
    assert "FSDP-W160" in [problem.code for problem in assessment.problems]
    assert assess({"distributed_type": "FSDP"}, fsdp="full_shard").problems[0].code != "FSDP-W160"


def test_fsdp_in_script_enables_it_under_multi_gpu_flag(assess):
    assessment = assess(command_line=["--multi_gpu"], fsdp="full_shard auto_wrap")
    assert assessment.ok and assessment.spec.enabled
    assert [problem.code for problem in assessment.problems] == ["FSDP-W160"]


@pytest.mark.parametrize("engine", ["DEEPSPEED", "MEGATRON_LM"])
def test_fsdp_in_script_under_other_engine_is_error(codes, engine):
    assert codes({"distributed_type": engine}, fsdp="full_shard") == ["FSDP-E120"]


def test_implied_precision_of_weaker_source_is_noted(codes):
    config = {"distributed_type": "FSDP", "mixed_precision": "bf16"}
    assert "FSDP-N105" in codes(config, training_arguments={"fp16": True}, severity="note")
