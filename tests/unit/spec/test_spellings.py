"""Every spelling of every value of every setting."""

import pytest

FULL = "full_shard"
YES = [True, "true", "True", "TRUE", "yes", "on", "1", 1]
NO = [False, "false", "False", "no", "off", "0", 0]
ZERO2 = "hybrid_shard_zero2"
ZERO2_SPELLINGS = [5, "HYBRID_SHARD_ZERO2", "_HYBRID_SHARD_ZERO2", "ShardingStrategy._HYBRID_SHARD_ZERO2"]
CLASS_KEYS = ["fsdp_transformer_layer_cls_to_wrap", "transformer_cls_names_to_wrap", "fsdp_transformer_cls_to_wrap"]
HUNDRED_MILLION = [100000000, "1e8", 1e8, "100M", "100m", "0.1B", "100_000_000", "100,000,000", "100000k"]

SPELLINGS = [
    ("fsdp.version", 1, [1, "1", 1.0], ["fsdp_version", "version"]),
    ("fsdp.version", 2, [2, "2"], ["fsdp_version", "version", "FSDP_VERSION"]),
    ("sharding.strategy", FULL, [1, "1", "FULL_SHARD", "full_shard", "Full Shard"], ["fsdp_sharding_strategy"]),
    ("sharding.strategy", FULL, ["FULL_SHARD", True, "true"], ["fsdp_reshard_after_forward"]),
    ("sharding.strategy", "shard_grad_op", [2, "2", "SHARD_GRAD_OP"], ["sharding_strategy"]),
    ("sharding.strategy", "shard_grad_op", ["SHARD_GRAD_OP", False, "false", 2], ["reshard_after_forward"]),
    ("sharding.strategy", "no_shard", [3, "3", "NO_SHARD", "no_shard"], ["fsdp_sharding_strategy"]),
    ("sharding.strategy", "hybrid_shard", [4, "4", "HYBRID_SHARD", "hybrid-shard"], ["fsdp_sharding_strategy"]),
    ("sharding.strategy", ZERO2, ZERO2_SPELLINGS, ["fsdp_sharding_strategy", "fsdp_reshard_after_forward"]),
    ("mesh.shard", 4, [4, "4"], ["fsdp_size", "dp_shard_size"]),
    ("mesh.shard", "auto", ["auto", -1], ["fsdp_size"]),
    ("mesh.replicate", 2, [2, "2"], ["dp_replicate_size"]),
    ("wrap.policy", "transformer", ["TRANSFORMER_BASED_WRAP", "transformer"], ["fsdp_auto_wrap_policy"]),
    ("wrap.policy", "transformer", ["transformer_based_wrap"], ["fsdp_auto_wrap_policy", "fsdp_wrap_policy"]),
    ("wrap.policy", "none", ["NO_WRAP", "no_wrap", "none"], ["fsdp_auto_wrap_policy", "wrap_policy"]),
    ("wrap.classes", ("A", "B"), ["A,B", "A, B", " A , B ", ["A", "B"], ["A, B"], "['A', 'B']"], CLASS_KEYS),
    ("wrap.classes", ("BertLayer",), ["BertLayer", ["BertLayer"], "BertLayer,"], ["transformer_layer_cls_to_wrap"]),
    ("wrap.min_num_params", 100_000_000, HUNDRED_MILLION, ["min_num_params", "fsdp_min_num_params", "min_num_param"]),
    ("wrap.ignored_modules", ".*lora.*", [".*lora.*"], ["fsdp_ignored_modules"]),
    ("offload.params", True, YES, ["fsdp_offload_params", "offload_params", "cpu_offload", "fsdp_cpu_offload"]),
    ("offload.params", False, NO, ["fsdp_offload_params", "cpu_offload"]),
    ("offload.optimizer", True, YES, ["fsdp_offload_optimizer", "offload_optimizer"]),
    ("offload.pin_memory", False, NO, ["pin_memory", "fsdp_pin_memory"]),
    ("prefetch.backward", "pre", ["BACKWARD_PRE", "backward_pre", 1, "1"], ["fsdp_backward_prefetch"]),
    ("prefetch.backward", "post", ["BACKWARD_POST", 2], ["fsdp_backward_prefetch_policy"]),
    ("prefetch.backward", "none", ["NO_PREFETCH", "no_prefetch", "None"], ["fsdp_backward_prefetch"]),
    ("prefetch.forward", True, YES, ["fsdp_forward_prefetch"]),
    ("prefetch.limit_all_gathers", False, NO, ["fsdp_limit_all_gathers", "limit_all_gathers"]),
    ("checkpoint.state_dict", "full", ["FULL_STATE_DICT", "FULL", "full", 1, "1"], ["fsdp_state_dict_type"]),
    ("checkpoint.state_dict", "local", ["LOCAL_STATE_DICT", "LOCAL", 2], ["fsdp_state_dict_type"]),
    ("checkpoint.state_dict", "sharded", ["SHARDED_STATE_DICT", "SHARDED", 3], ["state_dict_type"]),
    ("activation.checkpointing", "full", [*YES, "full"], ["fsdp_activation_checkpointing"]),
    ("activation.checkpointing", "none", [*NO, "none"], ["fsdp_activation_checkpointing"]),
    ("activation.checkpointing", "selective", ["selective"], ["activation_checkpointing"]),
    ("loading.ram_efficient", True, YES, ["fsdp_cpu_ram_efficient_loading"]),
    ("loading.sync_module_states", False, NO, ["fsdp_sync_module_states"]),
    ("params.use_orig", False, NO, ["fsdp_use_orig_params"]),
    ("precision.fp32_modules", ".*norm", [".*norm"], ["fsdp_fp32_modules", "fp32_modules"]),
    ("precision.param", "bf16", ["bf16", "bfloat16", "torch.bfloat16"], ["fsdp_mixed_precision_policy"]),
]


def test_policy_section_contains_fp32_modules(assess):
    policy = {"param_dtype": "bf16", "fp32_modules": ".*norm"}
    spec = assess({"distributed_type": "FSDP", "fsdp_config": {"fsdp_mixed_precision_policy": policy}}).spec
    assert (spec.precision.param, spec.precision.fp32_modules) == ("bf16", ".*norm")


@pytest.mark.parametrize(
    ("name", "meant", "value", "key"),
    [(name, meant, value, key) for name, meant, values, keys in SPELLINGS for value in values for key in keys],
)
def test_every_spelling_is_read(assess, name, meant, value, key):
    assessment = assess({"distributed_type": "FSDP", "fsdp_config": {key: value}})
    assert assessment.ok, assessment.problems
    assert assessment.spec.get(name) == meant
    assert assessment.spec.origin(name).spelling == key


@pytest.mark.parametrize(
    ("options", "strategy", "offload"),
    [
        ("full_shard auto_wrap", FULL, False),
        ("FULL_SHARD AUTO_WRAP", FULL, False),
        ("full_shard,auto_wrap", FULL, False),
        ("full_shard, auto_wrap, offload", FULL, True),
        ("full shard", FULL, False),
        ("full shard auto wrap", FULL, False),
        ("hybrid shard zero2", ZERO2, False),
        (["shard_grad_op", "offload"], "shard_grad_op", True),
        (["FSDPOption.NO_SHARD"], "no_shard", False),
        ('"full_shard auto_wrap offload"', FULL, True),  # SageMaker adds quotes to hyperparameters
        ('["full_shard", "auto_wrap"]', FULL, False),
        ("['shard_grad_op', 'offload']", "shard_grad_op", True),
        ("hybrid_shard auto_wrap", "hybrid_shard", False),
        (True, FULL, False),
        ("true", FULL, False),
    ],
)
def test_fsdp_options_are_read(assess, options, strategy, offload):
    assessment = assess(fsdp=options)
    assert assessment.ok, assessment.problems
    assert assessment.spec.sharding.strategy == strategy
    assert assessment.spec.offload.params is offload
    assert assessment.spec.launch.distributed_type == "FSDP"
    assert assessment.spec.fsdp.version == 2


@pytest.mark.parametrize("options", [False, "", "false", [], "False", "no", "off", "0", 0])
def test_false_option_disables_fsdp(assess, options):
    assert assess(fsdp=options).spec.launch.distributed_type == "NO"


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("fsdp_offload_params", "maybe", "true or false"),
        ("fsdp_offload_params", 2, "true or false"),
        ("fsdp_min_num_params", float("nan"), "an integer"),
        ("fsdp_min_num_params", "inf", "an integer"),
        ("fsdp_min_num_params", "1e400", "an integer"),
        ("fsdp_min_num_params", -1, "at least 0"),
        ("fsdp_min_num_params", 1.5, "an integer"),
        ("fsdp_min_num_params", True, "an integer"),
        ("fsdp_min_num_params", 10**40, "at most"),
        ("fsdp_min_num_params", "9" * 10_000, "an integer"),
        ("fsdp_min_num_params", "1e-7", "an integer"),
        ("fsdp_min_num_params", "2,4", "an integer"),
        ("fsdp_min_num_params", "0,1,2", "an integer"),
        ("fsdp_min_num_params", "1_0", "an integer"),
        ("fsdp_min_num_params", "010", "an integer"),
        ("fsdp_sharding_strategy", "not.full_shard", "or 1 to 5"),
        ("fsdp_sharding_strategy", "_full_shard", "or 1 to 5"),
        ("fsdp_sharding_strategy", "full_shard.", "or 1 to 5"),
        ("fsdp_sharding_strategy", "-full_shard", "or 1 to 5"),
        ("fsdp_sharding_strategy", "full - shard", "or 1 to 5"),
        ("fsdp_sharding_strategy", "x.ShardingStrategy.FULL_SHARD", "or 1 to 5"),
        ("fsdp_sharding_strategy", "ShardingStrategy.1", "or 1 to 5"),
        ("fsdp_backward_prefetch", "BAC\u212aWARD_PRE", "pre"),  # KELVIN SIGN, whose lower case is k
        ("fsdp_min_num_params", "1\u0663", "an integer"),  # an Arabic digit
        ("fsdp_state_dict_type", "1.full", "full"),
        ("fsdp_sharding_strategy", 9, "or 1 to 5"),
        ("fsdp_sharding_strategy", "FULL_SHRD", "Did you mean full_shard?"),
        ("fsdp_reshard_after_forward", "perhaps", "strategy"),
        ("fsdp_state_dict_type", ["FULL"], "a single value"),
        ("fsdp_backward_prefetch", {"a": 1}, "a single value"),
        ("fsdp_transformer_layer_cls_to_wrap", 5, "a class name"),
        ("fsdp_version", 3, "1 or 2"),
        ("fsdp_size", 0, "at least 1"),
        ("xla_fsdp_settings", "x", "a mapping"),
    ],
)
def test_invalid_value_is_error_with_expected_values(problems, key, value, expected):
    (problem,) = problems({"fsdp_config": {key: value}})
    assert (problem.code, problem.origin.spelling) == ("FSDP-E101", key)
    assert expected in str(problem)


@pytest.mark.parametrize("value", [-1, "-1", 2.5, "4.9", 0, 6, "9" * 400])
def test_number_that_is_no_strategy_is_refused(problems, value):
    (problem,) = problems({"fsdp_config": {"fsdp_sharding_strategy": value}})
    assert (problem.code, problem.setting) == ("FSDP-E101", "sharding.strategy")
    assert problem.message.endswith("or 1 to 5.")


@pytest.mark.parametrize("value", ["+-1", "--1", "1.", ".5", "²", "-", "1e3"])
def test_text_like_number_is_refused(codes, value):
    assert codes({"fsdp_config": {"fsdp_sharding_strategy": value}}) == ["FSDP-E101"]


@pytest.mark.parametrize(
    ("value", "number"),
    [
        ("1,000,000", 10**6),
        ("1_000_000", 10**6),
        ("1.5e6", 1_500_000),
        ("1.5M", 1_500_000),
        ("2b", 2 * 10**9),
        ("0", 0),
    ],
)
def test_ways_to_write_a_number(assess, value, number):
    spec = assess({"distributed_type": "FSDP", "fsdp_config": {"fsdp_min_num_params": value}}).spec
    assert spec.wrap.min_num_params == number


@pytest.mark.parametrize("text", ["010", "8:12", "0x10", "0b1", "0" * 5000 + "1", "0x" + "f" * 4000])
def test_number_that_yaml_reads_differently_is_refused(codes, tmp_path, text):
    path = tmp_path / "fsdp.yaml"
    path.write_text(f"distributed_type: FSDP\nnum_processes: {text}\nfsdp_config: {{}}\n")
    assert codes(str(path)) == ["FSDP-E101"]


@pytest.mark.parametrize(
    ("mode", "param"),
    [
        ("torch.bfloat16", "bf16"), ("bfloat16", "bf16"), ("BF16", "bf16"), ("torch.float16", "fp16"), (16, "fp16"),
        ("fp32", "auto"), ("torch.float32", "auto"), ("no", "auto"), (False, "auto"),
    ],
)  # fmt: skip
def test_every_spelling_of_a_mode_sets_the_parameters(assess, mode, param):
    spec = assess({"distributed_type": "FSDP", "mixed_precision": mode, "fsdp_config": {}}).spec
    assert spec.precision.param == param
    assert spec.launch.mixed_precision == (param if param != "auto" else "no")


def test_stronger_mode_without_mixed_precision_is_used(assess):
    config = {"distributed_type": "FSDP", "mixed_precision": "bf16", "fsdp_config": {}}
    assert assess(config, overrides={"mixed_precision": "fp32"}).spec.precision.param == "auto"


@pytest.mark.parametrize("key", ["fsdp_bac\u212award_prefetch", "prefetch.bac\u212award"])
def test_key_with_letter_outside_ascii_is_refused(codes, key):
    assert codes({"fsdp_config": {key: "BACKWARD_PRE"}}) == ["FSDP-E020"]
    assert codes(overrides={key: "BACKWARD_PRE"}) == ["FSDP-E020"]
    assert codes(environ={"F\u017fDP_VERSION": "3"}) == []


@pytest.mark.parametrize("options", ["shard_grad_op full_shard auto_wrap", ["full_shard", "no_shard"]])
def test_two_strategies_in_one_value_are_an_error(assess, options):
    codes = [problem.code for problem in assess(fsdp=options).problems if problem.severity == "error"]
    assert codes == ["FSDP-E023"]


def test_one_strategy_twice_is_accepted(assess):
    assert assess(fsdp="full_shard full_shard auto_wrap").ok


@pytest.mark.parametrize("value", ["SIZE_BASED_WRAP", "SIZED_BASED_WRAP", "size", "size-based-wrap"])
def test_every_spelling_of_the_size_policy_is_read(assess, value):
    section = {"fsdp_auto_wrap_policy": value, "fsdp_min_num_params": 1}
    assert assess({"distributed_type": "FSDP", "fsdp_config": section}).spec.wrap.policy == "size"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("fsdp_sharding_strategy", "BackwardPrefetch.FULL_SHARD"),
        ("fsdp_sharding_strategy", "torch.full_shard"),
        ("fsdp_backward_prefetch", "FSDPOption.BACKWARD_PRE"),
        ("fsdp_state_dict_type", "torch.full"),
        ("fsdp_mixed_precision_policy", "PrecisionType.bf16"),
        ("fsdp_auto_wrap_policy", "torch.NO_WRAP"),
    ],
)
def test_prefix_of_another_setting_is_refused(codes, key, value):
    assert codes({"fsdp_config": {key: value}}) == ["FSDP-E101"]


@pytest.mark.parametrize("value", ["offload", "unsloth", "offload_disk"])
def test_checkpointing_of_another_library_names_the_settings(assess_converted, value):
    given = {"base_model": "x", "fsdp_config": {"fsdp_version": 2}, "gradient_checkpointing": value}
    (problem,) = [p for p in assess_converted(given).problems if p.severity == "error"]
    assert (problem.code, problem.setting) == ("FSDP-E053", "activation.checkpointing")
    assert "fsdp_activation_checkpointing_offload: true" in problem.fix


@pytest.mark.parametrize("number", ["1e1", "1_0", "1,000", "1k", "2.5", "+-2", "1.", "", "²", "1٣"])
@pytest.mark.parametrize("key", ["num_processes", "num_machines", "machine_rank", "main_process_port"])
def test_small_number_is_written_in_digits(assess, key, number):
    assert not assess({"distributed_type": "FSDP", key: number}).ok


@pytest.mark.parametrize("number", [4, 4.0, "4", "4.0", "+4", " 4 "])
def test_ways_to_write_a_small_number(assess, number):
    assert assess({"distributed_type": "FSDP", "num_processes": number}).spec.launch.num_processes == 4
