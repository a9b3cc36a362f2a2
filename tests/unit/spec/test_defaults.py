"""Defaults, and settings that are derived from other settings."""

import pytest

from hf_fsdp_plugin import FsdpSpec, SpecError, load_spec
from hf_fsdp_plugin.problems import DEFAULT_ORIGIN


def test_accelerate_dialect_is_version_1_without_wrapping(assess):
    spec = assess({"distributed_type": "FSDP"}).spec
    assert (spec.fsdp.version, spec.wrap.policy, spec.prefetch.backward) == (1, "none", "none")
    assert spec.origin("fsdp.version") is DEFAULT_ORIGIN


def test_training_arguments_dialect_is_version_2_with_wrapping(assess):
    spec = assess(fsdp=True).spec
    assert (spec.fsdp.version, spec.wrap.policy, spec.prefetch.backward) == (2, "transformer", "pre")


def test_highest_source_with_fsdp_selects_dialect(assess):
    config = {"distributed_type": "FSDP", "fsdp_config": {"fsdp_offload_params": True}}
    assert assess(config, fsdp="full_shard").spec.fsdp.version == 2
    assert assess(config, training_arguments={"bf16": True}).spec.fsdp.version == 1
    assert assess(environ={"ACCELERATE_USE_FSDP": "true"}).spec.fsdp.version == 1


def test_minimal_config_has_documented_defaults(assess):
    spec = assess({"distributed_type": "FSDP"}).spec
    assert spec.sharding.strategy == "full_shard"
    assert spec.checkpoint.state_dict == "sharded"
    assert spec.params.use_orig and spec.loading.sync_module_states and spec.prefetch.limit_all_gathers
    assert not spec.loading.ram_efficient


@pytest.mark.parametrize(
    ("section", "policy"),
    [
        ({"fsdp_transformer_layer_cls_to_wrap": "A"}, "transformer"),
        ({"min_num_params": 2000}, "size"),
        ({"min_num_params": 0}, "none"),
        ({"min_num_params": 2000, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}, "transformer"),
        ({"transformer_layer_cls_to_wrap": "A", "auto_wrap_policy": "NO_WRAP"}, "none"),
    ],
)
def test_wrap_policy_is_derived(assess, section, policy):
    assert assess({"fsdp_config": section}).spec.wrap.policy == policy


def test_threshold_and_classes_without_policy_are_error(codes):
    assert codes({"fsdp_config": {"min_num_params": 1, "transformer_layer_cls_to_wrap": "A"}}) == ["FSDP-E113"]


@pytest.mark.parametrize(("mode", "param"), [("bf16", "bf16"), ("fp16", "fp16"), ("no", "auto"), (False, "auto")])
def test_mixed_precision_sets_param_and_reduces_in_fp32(assess, mode, param):
    spec = assess({"distributed_type": "FSDP", "mixed_precision": mode}).spec
    assert (spec.precision.param, spec.precision.reduce) == (param, "fp32")
    assert spec.launch.mixed_precision == ("no" if mode is False else mode)


def test_precision_policy_overrides_mixed_precision(assess):
    policy = {"param_dtype": "bfloat16", "reduce_dtype": "torch.bfloat16", "output_dtype": "fp32", "buffer_dtype": 32}
    spec = assess({"mixed_precision": "bf16", "fsdp_config": {"fsdp_mixed_precision_policy": policy}}).spec
    precision = spec.precision
    assert (precision.param, precision.reduce, precision.output, precision.buffer) == ("bf16", "bf16", "fp32", "fp32")
    assert spec.origin("precision.param").spelling == "param_dtype"


def test_dtype_of_higher_source_overrides_launch_mode(assess):
    assessment = assess({"distributed_type": "FSDP", "mixed_precision": "bf16"}, overrides=["precision.param=fp16"])
    assert assessment.ok
    assert assessment.spec.launch.mixed_precision == "fp16"


@pytest.mark.parametrize(
    ("section", "strategy", "codes"),
    [
        ({"fsdp_sharding_strategy": 4, "fsdp_reshard_after_forward": False}, "hybrid_shard_zero2", ["FSDP-N109"]),
        ({"fsdp_sharding_strategy": 4, "fsdp_reshard_after_forward": True}, "hybrid_shard", ["FSDP-N108"]),
        ({"fsdp_sharding_strategy": 3, "fsdp_reshard_after_forward": False}, "no_shard", ["FSDP-N108"]),
        ({"fsdp_sharding_strategy": "FULL_SHARD", "fsdp_reshard_after_forward": True}, "full_shard", ["FSDP-N108"]),
        ({"dp_replicate_size": 2}, "hybrid_shard", ["FSDP-N111"]),
        ({"dp_replicate_size": 2, "fsdp_reshard_after_forward": False}, "hybrid_shard_zero2", ["FSDP-N111"]),
        ({"dp_replicate_size": 2, "dp_shard_size": 2, "strategy": 2}, "hybrid_shard_zero2", ["FSDP-N111"]),
        ({"dp_replicate_size": 2, "dp_shard_size": 1}, "no_shard", []),
        ({"dp_replicate_size": 1}, "full_shard", []),
    ],
)
@pytest.mark.parametrize("version", [1, 2])
def test_strategy_follows_reshard_and_mesh(assess, section, strategy, codes, version):
    assessment = assess({"fsdp_config": {"fsdp_version": version, **section}})
    assert assessment.ok, assessment.problems
    assert assessment.spec.sharding.strategy == strategy
    assert [problem.code for problem in assessment.problems] == codes


@pytest.mark.parametrize(
    "section",
    [
        {"fsdp_sharding_strategy": 1, "fsdp_reshard_after_forward": False},
        {"fsdp_sharding_strategy": 2, "fsdp_reshard_after_forward": True},
        {"fsdp_sharding_strategy": 5, "fsdp_reshard_after_forward": True},
        {"fsdp_sharding_strategy": 4, "fsdp_reshard_after_forward": "SHARD_GRAD_OP"},
    ],
)
def test_strategy_that_conflicts_with_reshard_is_error(codes, section):
    assert codes({"fsdp_config": section}) == ["FSDP-E102"]


def test_reshard_of_higher_source_overrides_strategy(assess):
    config = {"fsdp_config": {"fsdp_sharding_strategy": "SHARD_GRAD_OP"}}
    assessment = assess(config, overrides=["reshard_after_forward=true"])
    assert assessment.ok
    assert assessment.spec.sharding.strategy == "full_shard"
    (problem,) = (problem for problem in assessment.problems if problem.code == "FSDP-N105")
    assert problem.setting == "sharding.strategy" and "--set" in problem.message


def test_gradient_checkpointing_is_native(assess):
    spec = assess(training_arguments={"fsdp": True, "gradient_checkpointing": True}).spec
    assert (spec.activation.checkpointing, spec.activation.native) == ("full", True)
    own = assess(training_arguments={"fsdp": True, "fsdp_config": {"activation_checkpointing": True}}).spec
    assert (own.activation.checkpointing, own.activation.native) == ("full", False)


def test_options_of_compile_and_other_engines_are_kept(assess):
    spec = assess({"deepspeed_config": {"zero_stage": 3}, "dynamo_config": {"dynamo_backend": "INDUCTOR"}}).spec
    assert dict(spec.launch.extra) == {"deepspeed_config": {"zero_stage": 3}}
    assert dict(spec.launch.dynamo_config) == {"dynamo_backend": "inductor"}


def test_load_spec_raises_all_problems_at_once():
    config = {"fsdp_config": {"fsdp_ofload_params": True, "fsdp_sharding_strategy": 9}, "num_proceses": 2}
    with pytest.raises(SpecError) as caught:
        load_spec(config, environ={})
    assert [problem.code for problem in caught.value.problems] == ["FSDP-E020", "FSDP-E020", "FSDP-E101"]


def test_load_spec_accepts_text_and_paths(tmp_path):
    path = tmp_path / "fsdp.yaml"
    path.write_text("distributed_type: FSDP\n")
    spec = load_spec(str(path), environ={})
    assert isinstance(spec, FsdpSpec)
    assert spec.problems == ()
    assert load_spec(path, environ={}) == spec


@pytest.mark.parametrize(("section", "version"), [({}, 2), ({"fsdp_version": 1}, 1)])
def test_ambiguous_version_is_warning(section, version) -> None:
    file = {"distributed_type": "FSDP", "fsdp_config": {"fsdp_sharding_strategy": 1, **section}}
    spec = load_spec(file, training_arguments={"fsdp": "full_shard auto_wrap"}, environ={})
    assert spec.fsdp.version == version
    assert ("FSDP-W106" in [problem.code for problem in spec.problems]) is (not section)
