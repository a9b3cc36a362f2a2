"""``TrainingArguments`` as keyword values."""

import enum
import json

import pytest


class FsdpOption(str, enum.Enum):  # noqa: UP042 (Transformers declares it so)
    FULL_SHARD = "full_shard"
    AUTO_WRAP = "auto_wrap"


class ShardingStrategy(enum.Enum):
    FULL_SHARD = enum.auto()
    SHARD_GRAD_OP = enum.auto()


CONFIG = {"fsdp_transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"], "backward_prefetch": "backward_post"}


def test_a_config_is_a_dict_a_path_or_json_text(judge, tmp_path):
    (tmp_path / "c.json").write_text(json.dumps(CONFIG))
    (tmp_path / "c.yaml").write_text(
        "fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer\nbackward_prefetch: backward_post"
    )
    whole = {"distributed_type": "FSDP", "fsdp_config": CONFIG}
    (tmp_path / "whole.json").write_text(json.dumps(whole))
    for config in (
        CONFIG,
        json.dumps(CONFIG),
        tmp_path / "c.json",
        str(tmp_path / "c.yaml"),
        str(tmp_path / "whole.json"),
    ):
        assessment = judge(fsdp="full_shard auto_wrap", fsdp_config=config)
        assert assessment.ok, assessment.problems
        assert assessment.spec.wrap.classes == ("LlamaDecoderLayer",)
        assert assessment.spec.prefetch.backward == "post"
        assert assessment.spec.fsdp.version == 2


def test_a_path_gives_origins_with_its_lines(judge, tmp_path):
    (tmp_path / "c.yaml").write_text("# text\nfsdp_offload_params: true\n")
    spec = judge(fsdp=True, fsdp_config=str(tmp_path / "c.yaml")).spec
    assert spec.origin("offload.params").place == f"{tmp_path / 'c.yaml'}:2"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("missing.json", "there is no such file"),
        ('{"a": }', "is not JSON"),
        (5, "expected a dict, a path or JSON text"),
        ({"offlaod_params": True}, "Did you mean fsdp_offload_params?"),
    ],
)
def test_a_config_that_cannot_be_read_is_an_error(complaints, config, message):
    assert message in complaints(fsdp=True, fsdp_config=config)[0]


def test_enums_are_read_by_name(judge):
    spec = judge(fsdp=[FsdpOption.FULL_SHARD, FsdpOption.AUTO_WRAP]).spec
    assert spec.asked("sharding.strategy")
    spec = judge(fsdp=True, fsdp_config={"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP}).spec
    assert spec.sharding.strategy == "shard_grad_op"


@pytest.mark.parametrize("words", ["fulll_shard", "full_shard autowrap", "zero3", "offlaod"])
def test_a_word_that_is_none_is_an_error(complaints, words):
    assert "is no word of fsdp" in complaints(fsdp=words)[0]


def test_a_config_beside_fsdp_off_is_an_error(complaints):
    assert "turns FSDP off, beside an fsdp_config" in complaints(fsdp=False, fsdp_config=CONFIG)[0]
    assert complaints(fsdp_config=CONFIG) == []


def test_arguments_that_are_not_about_fsdp_are_passed_over(judge):
    arguments = {"output_dir": "out", "learning_rate": 1e-4, "fsdp": "full_shard", "bf16": True, "fp16": False}
    assessment = judge(training_arguments=arguments)
    assert assessment.ok
    assert assessment.spec.precision.param == "bf16"
    assert not assessment.spec.asked("launch.use_cpu")


def test_bf16_and_fp16_together_are_an_error(complaints):
    (text,) = complaints(training_arguments={"fsdp": True, "bf16": True, "fp16": True})
    assert "fp16=True contradicts TrainingArguments bf16=True" in text


def test_both_ways_to_checkpoint_activations_are_an_error(complaints):
    arguments = {"fsdp": True, "gradient_checkpointing": True, "fsdp_config": {"activation_checkpointing": True}}
    assert "recomputed twice" in complaints(training_arguments=arguments)[0]


def test_arguments_of_old_versions_are_read(judge):
    spec = judge(training_arguments={"fsdp": "full_shard auto_wrap", "fsdp_min_num_params": 2000}).spec
    assert (spec.wrap.policy, spec.wrap.min_num_params) == ("size", 2000)
