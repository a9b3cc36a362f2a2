"""Small values that were once accepted, ignored or a traceback. Larger numbers of them are in tests/unit/generated."""

import pytest

HUGE = 10**5000
HUGE_CASE = pytest.param(HUGE, id="5001 digits")
NO_BREAK_SPACE = "\u00a0"


@pytest.mark.parametrize("value", ["Falſe", "truex", -1.0, 2, "", b"true"])
def test_mixed_precision_of_distributed_config_is_a_bool(codes, value):
    (code,) = codes(distributed_config={"fsdp_size": 2, "fsdp_mixed_precision": value})
    assert code in ("FSDP-E101", "FSDP-E050")


@pytest.mark.parametrize("value", ["²", "1٣", f"{NO_BREAK_SPACE}4", HUGE_CASE, "9" * 50, 1.5])
def test_size_of_distributed_config_is_a_number(codes, value):
    assert codes(distributed_config={"fsdp_size": value, "dp_replicate_size": 2}) == ["FSDP-E101"]


@pytest.mark.parametrize("value", [1.0, "1.0", "+1"])
def test_size_one_in_any_form_does_not_shard(assess, value):
    spec = assess(distributed_config={"fsdp_size": value, "dp_replicate_size": 2}).spec
    assert (spec.mesh.shard, spec.sharding.strategy) == (1, "no_shard")


@pytest.mark.parametrize("key", ["fsdp_offload_params", "fsdp_sharding_strategy", "fsdp_size", "fsdp_ignored_modules"])
@pytest.mark.parametrize("value", [b"true", bytearray(b"1"), 1j, range(3), HUGE_CASE, {"a": HUGE}, [HUGE], {HUGE}])
def test_object_that_is_no_text_is_refused(problems, key, value):
    (problem,) = problems({"fsdp_config": {key: value}})
    assert (problem.code, problem.origin.spelling) == ("FSDP-E101", key)
    assert len(str(problem)) < 500


@pytest.mark.parametrize("key", ["bf16", "gradient_checkpointing", "use_cpu", "fsdp"])
@pytest.mark.parametrize("value", [HUGE_CASE, "truex"])
def test_keyword_argument_without_a_meaning_is_refused(problems, key, value):
    (problem,) = problems({"distributed_type": "FSDP"}, training_arguments={key: value})
    assert (problem.origin.spelling, bool(problem.fix)) == (key, True)


@pytest.mark.parametrize("key", ["bf16", "gradient_checkpointing", "use_cpu"])
@pytest.mark.parametrize("value", ["", {}, []])
def test_keyword_argument_without_content_is_refused(codes, key, value):
    assert codes(training_arguments={key: value}) == ["FSDP-E050"]


@pytest.mark.parametrize("value", [None, False, 0])
def test_default_of_keyword_argument_is_not_a_setting(assess, value):
    assessment = assess(training_arguments={"bf16": value, "fsdp_min_num_params": value})
    assert not assessment.spec.origins


def test_long_number_in_json_is_refused_at_its_line(problems, tmp_path):
    path = tmp_path / "fsdp.json"
    path.write_text('{"distributed_type": "FSDP",\n"num_processes": ' + "9" * 5000 + "}")
    (problem,) = problems(str(path))
    assert (problem.code, problem.origin.line) == ("FSDP-E101", 2)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("fsdp_offload_params", f"true{NO_BREAK_SPACE}"),
        ("fsdp_transformer_layer_cls_to_wrap", f"{NO_BREAK_SPACE}A"),
        ("fsdp_sharding_strategy", "full\u2003shard"),
    ],
)
def test_white_space_outside_ascii_is_part_of_the_value(problems, key, value):
    assert [problem.origin.spelling for problem in problems({"fsdp_config": {key: value}})] == [key]
    assert problems(fsdp="full_shard\u2003auto_wrap")


def test_regular_expression_may_end_with_a_newline(assess):
    spec = assess({"distributed_type": "FSDP", "fsdp_config": {"fsdp_ignored_modules": ".*lora.*\n"}}).spec
    assert spec.wrap.ignored_modules == ".*lora.*"


@pytest.mark.parametrize("options", ["ShardingStrategy.False", "FSDPOption.true", "full _shard", "full- shard"])
def test_text_that_is_no_option_is_refused(codes, options):
    assert set(codes(fsdp=options)) == {"FSDP-E023"}


@pytest.mark.parametrize("options", ["Shard_Grad Op", "shard grad_op auto wrap", "FSDPOption.SHARD-GRAD-OP"])
def test_separators_of_a_strategy_may_differ(assess, options):
    assert assess(fsdp=options).spec.sharding.strategy == "shard_grad_op"


def test_flag_with_letter_outside_ascii_is_unknown(codes):
    assert codes(command_line=["--FSDP_AсTIVATION_CPU_OFFLOAD=false"]) == ["FSDP-E020"]


def test_every_refusal_has_a_remedy(problems):
    values = {"fsdp_offload_params": "zzz", "fsdp_size": "x", "fsdp_min_num_params": [1], "fsdp_version": 7.5}
    found = problems({"fsdp_config": values})
    assert [problem.origin.spelling for problem in found] == list(values)
    assert all(problem.fix for problem in found)
