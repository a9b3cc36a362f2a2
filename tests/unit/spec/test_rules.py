"""Each rule between settings: configs that it rejects and configs that it accepts."""

import pytest

from hf_fsdp_plugin.spec import rules

FSDP = {"distributed_type": "FSDP"}
FP8 = {"mixed_precision": "fp8"}


def config(launch=None, **fsdp):
    return {**FSDP, **(launch or {}), "fsdp_config": fsdp}


REJECTED = [
    ("FSDP-E120", {"distributed_type": "DEEPSPEED"}, "DeepSpeed"),
    ("FSDP-E120", {"distributed_type": "MEGATRON_LM"}, "Megatron-LM"),
    ("FSDP-E120", {**FSDP, "deepspeed_config": {"zero_stage": 2}}, "deepspeed_config"),
    ("FSDP-E120", {**FSDP, "megatron_lm_config": {"megatron_lm_tp_degree": 2}}, "megatron_lm_config"),
    ("FSDP-E121", config({**FP8, "fp8_config": {"backend": "MSAMP"}}), "MS-AMP"),
    ("FSDP-E166", config({**FP8, "fp8_config": {"backend": "TE"}}), "transformer-engine"),
    ("FSDP-E167", config({**FP8, "fp8_config": {"enable_fsdp_float8_all_gather": True}}, fsdp_version=1), "FSDP2 only"),
    ("FSDP-E167", config({**FP8, "parallelism_config": {"tp_size": 2}}, fsdp_version=2), "mesh.tensor=2"),
    ("FSDP-E167", config(FP8, fsdp_version=2, fsdp_fp32_modules="norm"), "fp32"),
    ("FSDP-E167", config(FP8, fsdp_version=2, mixed_precision_policy={"param_dtype": "fp16"}), "fp16"),
    ("FSDP-E122", {**FSDP, "parallelism_config": {"sp_size": 2}}, "only DeepSpeed"),
    ("FSDP-E122", {**FSDP, "parallelism_config": {"pp_size": 2}}, "pipelines"),
    ("FSDP-E128", config({"num_processes": 4, "parallelism_config": {"cp_size": 2}}, fsdp_version=2, fsdp_size=1,
                         dp_replicate_size=1), "1 × 1 × 2 (replicate × shard × context)"),
    ("FSDP-E129", config({"num_processes": 6, "parallelism_config": {"cp_size": 2, "tp_size": 2}}, fsdp_version=2),
     "mesh.context=2 × mesh.tensor=2"),
    ("FSDP-E137", {**FSDP, "parallelism_config": {"cp_size": 2}}, "requires FSDP2"),
    ("FSDP-E137", config({"parallelism_config": {"tp_size": 2}}, fsdp_version=2, fsdp_sharding_strategy=3), "no_shard"),
    ("FSDP-E138", config({"parallelism_config": {"tp_size": 2, "ep_size": 3}}, fsdp_version=2), "multiple"),
    ("FSDP-E138", config({"parallelism_config": {"tp_size": 2, "ep_size": 8}}, fsdp_version=2, fsdp_size=2), "divide"),
    ("FSDP-E138", config({"parallelism_config": {"cp_size": 2}}, fsdp_version=2, fsdp_size=1, dp_replicate_size=2),
     "only if the model is sharded"),
    ("FSDP-E138", config({"num_processes": 4, "parallelism_config": {"cp_size": 2}}, fsdp_version=2,
                         dp_replicate_size=2), "mesh.shard=1"),
    ("FSDP-E138", config({"num_processes": 4, "parallelism_config": {"ep_size": 8}}, fsdp_version=2),
     "does not divide the 4"),
    ("FSDP-E123", config({"distributed_type": "MULTI_GPU"}, fsdp_version=2), "MULTI_GPU"),
    ("FSDP-E123", config({"distributed_type": False}, fsdp_version=2), "NO"),
    ("FSDP-E123", config({"distributed_type": "MULTI_CPU"}, fsdp_offload_params=True), "fsdp_offload_params"),
    ("FSDP-E126", config(xla=True), "xla.enabled"),
    ("FSDP-E126", config(xla_fsdp_v2=True), "xla.v2"),
    ("FSDP-E126", {"distributed_type": "XLA"}, "launch.distributed_type"),
    ("FSDP-E128", config({"num_processes": 3}, fsdp_size=2, dp_replicate_size=2), "num_processes=3"),
    ("FSDP-E129", config({"num_processes": 6}, fsdp_size=4), "num_processes=6"),
    ("FSDP-E130", config(fsdp_sharding_strategy=3, fsdp_size=2), "no_shard"),
    ("FSDP-E130", config(fsdp_sharding_strategy=1, fsdp_size=1, dp_replicate_size=2), "shard size of 1"),
    ("FSDP-E131", {**FSDP, "num_machines": 2, "machine_rank": 2, "main_process_ip": "h"}, "machine_rank is 2"),
    ("FSDP-E132", {**FSDP, "num_machines": 2, "num_processes": 3}, "num_machines=2"),
    ("FSDP-E133", {**FSDP, "main_process_port": 70000}, "70000"),
    ("FSDP-E140", config(fsdp_activation_checkpointing_offload=True), "activation.offload"),
    ("FSDP-E142", config(fsdp_auto_wrap_policy="SIZE_BASED_WRAP"), "min_num_params"),
    ("FSDP-E142", config(fsdp_wrap_policy="SIZE_BASED_WRAP", min_num_param=0), "min_num_params"),
    ("FSDP-E144", config(transformer_layer_cls_to_wrap="A B"), "'A B'"),
    ("FSDP-E144", config(transformer_layer_cls_to_wrap=["A", "x.y.B"]), "'x.y.B'"),
    ("FSDP-E144", config(transformer_layer_cls_to_wrap="$LAYER"), "'$LAYER'"),
    ("FSDP-E145", config(fsdp_ignored_modules="*lora("), "'*lora('"),
    ("FSDP-E145", config(fsdp_fp32_modules="*norm("), "'*norm('"),
    ("FSDP-E146", config({"mixed_precision": "bf16"}, mixed_precision_policy={"param_dtype": "fp16"}), "param_dtype"),
    ("FSDP-E147", {**FSDP, "use_cpu": True, "mixed_precision": "fp16"}, "precision.param"),
    ("FSDP-E149", config(fsdp_cpu_ram_efficient_loading=True, fsdp_sync_module_states=False), "rank 0"),
]  # fmt: skip


@pytest.fixture(autouse=True)
def only_torchao(monkeypatch):
    """torchao is installed, and no other library of fp8."""
    monkeypatch.setattr(rules, "_is_installed", lambda backend: backend == "ao")


@pytest.mark.parametrize(
    ("code", "given", "part"), REJECTED, ids=[f"{code}-{n}" for n, (code, *_) in enumerate(REJECTED)]
)
def test_invalid_config_is_one_error_with_fix(problems, code, given, part):
    (problem,) = problems(given)
    assert problem.code == code
    assert part in str(problem)
    assert problem.fix


@pytest.mark.parametrize(
    "given",
    [
        {**FSDP, "deepspeed_config": {}, "megatron_lm_config": {}, "fp8_config": None},
        config({**FP8, "fp8_config": {"backend": "AO", "enable_fsdp_float8_all_gather": True}}, fsdp_version=2),
        config({**FP8, "fp8_config": {"backend": "NO", "pad_inner_dim": False}}, fsdp_version=1),
        config({**FP8, "parallelism_config": {"cp_size": 2}}, fsdp_version=2),
        config({"fp8_config": {"backend": "NO"}}),
        config(xla=False),
        config(fsdp_activation_checkpointing=True, fsdp_activation_checkpointing_offload=True),
        config(fsdp_version=1, fsdp_activation_checkpointing=True, fsdp_activation_checkpointing_offload=True),
        config(fsdp_auto_wrap_policy="SIZE_BASED_WRAP", fsdp_min_num_params="1e6"),
        config(fsdp_offload_optimizer=True),
        config(transformer_layer_cls_to_wrap="A, B"),
        config(fsdp_ignored_modules=r".*\.lora_[AB]\..*"),
        config({"mixed_precision": "bf16"}, mixed_precision_policy={"param_dtype": "bf16", "reduce_dtype": "bf16"}),
        {**FSDP, "use_cpu": True, "mixed_precision": "bf16"},
        {**FSDP, "use_cpu": False, "mixed_precision": "fp16"},
        config({"num_processes": 4}, fsdp_size=2, dp_replicate_size=2),
        config({"num_processes": 6}, fsdp_size=3),
        {**FSDP, "main_process_port": 65535},
        config({"num_processes": -1}, fsdp_size=2, dp_replicate_size=2),
        config(fsdp_sharding_strategy=3, fsdp_size=1),
        {**FSDP, "num_machines": 2, "machine_rank": 1, "num_processes": 4, "main_process_ip": "h"},
        config(fsdp_cpu_ram_efficient_loading=True, fsdp_sync_module_states=True),
        {**FSDP, "parallelism_config": {"tp_size": 1, "cp_size": 1, "sp_size": 1, "cp_comm_strategy": "allgather"}},
    ],
)
def test_valid_config_is_accepted(codes, given):
    assert codes(given) == []


@pytest.mark.parametrize(
    ("given", "code", "setting"),
    [
        (config(fsdp_version=2, fsdp_limit_all_gathers=False), "FSDP-W148", "prefetch.limit_all_gathers"),
        (config({"fp8_config": {"backend": "AO"}}, fsdp_version=2), "FSDP-W165", "fp8.backend"),
        (config(fsdp_version=2, fsdp_use_orig_params=False), "FSDP-W148", "params.use_orig"),
        (config(wrap_policy="SIZE_BASED", min_num_param=9, transformer_layer_cls="A"), "FSDP-W143", "wrap.classes"),
        (config(wrap_policy="NO_WRAP", transformer_layer_cls="A"), "FSDP-W143", "wrap.classes"),
        (config(fsdp_offload_params=True, fsdp_offload_optimizer=True), "FSDP-W171", "offload.optimizer"),
        (config(auto_wrap_policy="TRANSFORMER_BASED_WRAP", min_num_params=9), "FSDP-W143", "wrap.min_num_params"),
        ({"distributed_type": "MULTI_GPU", "fsdp_config": {}}, "FSDP-W124", "launch.distributed_type"),
        ({**FSDP, "num_machines": 2, "machine_rank": 1}, "FSDP-W134", "launch.main_process_ip"),
        (config(xla_fsdp_grad_ckpt=True), "FSDP-W127", "xla.grad_ckpt"),
    ],
)
def test_setting_without_effect_is_warning(problems, given, code, setting):
    assert problems(given) == []
    (problem,) = problems(given, severity="warning")
    assert (problem.code, problem.setting) == (code, setting)


def test_variables_do_not_conflict_with_other_parallelism(codes):
    environ = {"FSDP_CPU_RAM_EFFICIENT_LOADING": "false"}
    assert codes({"distributed_type": "MULTI_GPU"}, environ=environ) == []
    assert codes({"distributed_type": "MULTI_GPU"}, environ=environ, severity="warning") == ["FSDP-W124"]


def test_fsdp1_settings_have_no_warning_under_fsdp1(codes):
    given = config(fsdp_version=1, fsdp_limit_all_gathers=False, fsdp_use_orig_params=False)
    assert codes(given, severity="warning") == []


def test_native_checkpointing_cannot_offload(codes):
    arguments = {"fsdp": True, "gradient_checkpointing": True, "fsdp_config": {"activation_offload": True}}
    assert codes(training_arguments=arguments) == ["FSDP-E141"]


def test_rule_skips_value_that_could_not_be_read(codes):
    given = config(fsdp_auto_wrap_policy="SIZE_BASED_WRAP", fsdp_min_num_params=float("nan"))
    assert codes(given) == ["FSDP-E101"]


def test_errors_of_all_kinds_are_reported_together(codes):
    given = config(
        {"machine_rank": 5, "use_cpu": True, "mixed_precision": "fp16"},
        fsdp_typo=1, fsdp_offload_params="perhaps", transformer_layer_cls_to_wrap="A B",
    )  # fmt: skip
    assert sorted(codes(given)) == ["FSDP-E020", "FSDP-E101", "FSDP-E131", "FSDP-E144", "FSDP-E147"]


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD"])
def test_strategy_with_shard_size_of_1_is_error(codes, strategy):
    given = config({"num_processes": 4}, fsdp_sharding_strategy=strategy, fsdp_size=1)
    assert codes(given) == ["FSDP-E130"]
    assert codes({**given, "num_processes": 1}) == []


def test_shard_size_of_1_without_strategy_is_no_shard(assess):
    assessment = assess(config({"num_processes": 4}, fsdp_size=1))
    assert assessment.spec.sharding.strategy == "no_shard"
    assert "FSDP-W162" in [problem.code for problem in assessment.problems]
    both = assess(config({"num_processes": 4}, fsdp_size=1, dp_replicate_size=4))
    assert both.spec.sharding.strategy == "no_shard"
    assert "FSDP-W162" not in [problem.code for problem in both.problems]


@pytest.mark.parametrize("key", ["xla", "xla_fsdp_v2"])
def test_xla_is_left_to_transformers_if_torch_xla_exists(problems, assess, monkeypatch, tmp_path, key):
    given = {"fsdp": "full_shard", "fsdp_config": {key: True, "xla_fsdp_settings": {"compute_dtype": "bfloat16"}}}
    (problem,) = problems(**given)
    assert problem.code == "FSDP-E126" and "torch_xla is not installed" in problem.message
    (tmp_path / "torch_xla").mkdir()
    (tmp_path / "torch_xla" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert [problem.code for problem in problems(**given, severity="warning")] == ["FSDP-W163"]
    assessment = assess(**given)
    assert assessment.ok and not assessment.spec.enabled and assessment.spec.uses_xla
