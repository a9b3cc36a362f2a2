"""Which settings enable FSDP. What Transformers and Accelerate run without FSDP runs without it here too."""

import pytest

YAML = {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 1, "fsdp_min_num_params": 2000}}
OFF = ["", [], None, False, "false", "  "]


@pytest.mark.parametrize("fsdp", OFF, ids=repr)
@pytest.mark.parametrize("fsdp_config", [None, {}, ""], ids=["none", "empty", "text"])
def test_empty_fsdp_does_not_enable_fsdp(assess, fsdp, fsdp_config):
    assessment = assess(fsdp=fsdp, fsdp_config=fsdp_config)
    assert assessment.ok and not assessment.spec.enabled
    assert {problem.code for problem in assessment.problems} <= {"FSDP-W124"}


@pytest.mark.parametrize("fsdp", OFF, ids=repr)
@pytest.mark.parametrize("content", [{"fsdp_version": 2}, {"activation_checkpointing": True}, {"misspelt": 1}])
def test_fsdp_config_without_fsdp_is_reported(assess, codes, fsdp, content):
    assessment = assess(fsdp=fsdp, fsdp_config=content)
    assert assessment.ok and not assessment.spec.enabled
    assert "FSDP-W033" in codes(fsdp=fsdp, fsdp_config=content, severity="warning")


@pytest.mark.parametrize("fsdp", OFF, ids=repr)
def test_fsdp_config_applies_if_the_launcher_enables_fsdp(assess, codes, fsdp):
    spec = assess(YAML, fsdp=fsdp, fsdp_config={"offload_params": True}).spec
    assert spec.enabled and spec.offload.params and spec.fsdp.version == 1
    assert codes(YAML, fsdp=fsdp, fsdp_config={"misspelt": 1}) == ["FSDP-E020"]
    # The values that Transformers 4 writes do not override the launcher's.


@pytest.mark.parametrize(
    "flags", [["--fsdp="], ["--fsdp", ""], ["--fsdp", "", "--fsdp_min_num_params", "0"]], ids=" ".join
)
def test_empty_fsdp_flag_does_not_enable_fsdp(assess, flags):
    assessment = assess(command_line=flags)
    assert assessment.ok and not assessment.spec.enabled
    assert assess(command_line=["--fsdp"]).spec.enabled
    assert assess(command_line=["--use_fsdp", *flags]).spec.enabled


def test_empty_fsdp_flag_does_not_turn_the_config_off(assess, codes):
    assert assess(YAML, command_line=["--fsdp="]).spec.enabled
    assert codes(YAML, command_line=["--fsdp="], severity="warning") == ["FSDP-W164"]
    assert codes(YAML, fsdp=False, severity="warning") == []  # also the Trainer's default


@pytest.mark.parametrize(
    ("file", "enabled"),
    [
        ({"base_model": "m", "fsdp": None, "fsdp_config": None, "bf16": "auto", "fp8": True}, False),
        ({"base_model": "m", "fsdp": [], "fsdp_config": {}}, False),
        ({"base_model": "m", "bf16": True}, False),
        ({"base_model": "m", "fsdp": ["full_shard"]}, True),
        ({"base_model": "m", "fsdp": None, "fsdp_config": {"offload_params": True}}, True),
        ({"model_name_or_path": "m", "fsdp": "", "fsdp_config": {"offload_params": True}}, False),
        ({"model_name_or_path": "m", "fsdp_config": {"offload_params": True}}, False),
        ({"model_name_or_path": "m", "fsdp": ["full_shard", "auto_wrap"]}, True),
    ],
)
def test_training_file_enables_fsdp_as_its_script_does(assess_converted, file, enabled):
    assessment = assess_converted(file)
    assert assessment.ok and assessment.spec.enabled is enabled
    assert ("FSDP-W124" in [problem.code for problem in assessment.problems]) is not enabled


def test_training_file_has_version_of_training_arguments(assess_converted):
    spec = assess_converted({"model_name_or_path": "m", "fsdp": ["full_shard", "auto_wrap"]}).spec
    assert (spec.fsdp.version, spec.wrap.policy) == (2, "transformer")
    assert assess_converted({"base_model": "m", "fsdp": ["full_shard"], "fsdp_version": 1}).spec.fsdp.version == 1


@pytest.mark.parametrize(
    ("key", "value", "code"), [("pipeline_parallel_size", 2, "FSDP-E122"), ("sequence_parallel_size", 2, "FSDP-E122")]
)
def test_unsupported_key_of_training_file_is_error(assess_converted, key, value, code):
    given = {"model_name_or_path": "m", "fsdp": ["full_shard"]}
    (problem,) = [p for p in assess_converted({**given, key: value}).problems if p.severity == "error"]
    assert problem.code == code
    assert assess_converted({**given, key: type(value)(value == 2)}).ok


@pytest.mark.parametrize(
    ("options", "reshard", "strategy"),
    [
        ("full_shard auto_wrap", False, "shard_grad_op"),
        ("shard_grad_op auto_wrap", True, "full_shard"),
        ("hybrid_shard", False, "hybrid_shard_zero2"),
    ],
)
def test_fsdp_config_overrides_options_of_fsdp(assess_converted, options, reshard, strategy):
    config = {"version": 2, "reshard_after_forward": reshard}
    for assessment in (
        assess_converted(fsdp=options, fsdp_config=config),
        assess_converted(command_line=["--fsdp", options, "--fsdp_config", str(config).replace("'", '"').lower()]),
        assess_converted({"model_name_or_path": "m", "fsdp": options, "fsdp_config": config}),
    ):
        assert assessment.ok and assessment.spec.sharding.strategy == strategy
        found = [problem for problem in assessment.problems if problem.setting == "sharding.strategy"]
        assert strategy in found[0].message + found[0].fix


def test_options_of_fsdp_conflict_with_reshard_in_version_1(problems):
    (problem,) = problems(fsdp="full_shard", fsdp_config={"version": 1, "reshard_after_forward": False})
    assert problem.code == "FSDP-E102" and problem.fix == "Keep one of them: full_shard, or shard_grad_op."


@pytest.mark.parametrize("given", [{}, {"fp8_config": {"backend": "AO"}}, {"bf16": True}])
def test_precision_alone_does_not_enable_fsdp(assess, given):
    assessment = assess({"mixed_precision": "bf16", **given})
    assert assessment.ok and not assessment.spec.enabled
    assert assess({"mixed_precision": "bf16", **given, "fsdp_config": {"fsdp_version": 2}}).spec.enabled
