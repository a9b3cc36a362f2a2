"""``TrainingArguments`` as keyword arguments."""

import json

import pytest
import yaml
from torch.distributed.fsdp import ShardingStrategy
from transformers.trainer_utils import FSDPOption

CONFIG = {"fsdp_transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"], "backward_prefetch": "backward_post"}


def test_fsdp_config_may_be_dict_path_or_json(assess, tmp_path):
    (tmp_path / "c.json").write_text(json.dumps(CONFIG))
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(CONFIG))
    (tmp_path / "whole.json").write_text(json.dumps({"distributed_type": "FSDP", "fsdp_config": CONFIG}))
    files = (tmp_path / "c.json", str(tmp_path / "c.yaml"), str(tmp_path / "whole.json"))
    for config in (CONFIG, json.dumps(CONFIG), *files):
        assessment = assess(fsdp="full_shard auto_wrap", fsdp_config=config)
        assert assessment.ok, assessment.problems
        assert assessment.spec.wrap.classes == ("LlamaDecoderLayer",)
        assert assessment.spec.prefetch.backward == "post"
        assert assessment.spec.fsdp.version == 2


def test_fsdp_config_path_has_line_numbers(assess, tmp_path):
    (tmp_path / "c.yaml").write_text("# text\nfsdp_offload_params: true\n")
    spec = assess(fsdp=True, fsdp_config=str(tmp_path / "c.yaml")).spec
    assert spec.origin("offload.params").source_line == f"{tmp_path / 'c.yaml'}:2"


@pytest.mark.parametrize(
    ("config", "code"),
    [("missing.json", "FSDP-E001"), ('{"a": ', "FSDP-E006"), (5, "FSDP-E055"), ({"offlaod_params": 1}, "FSDP-E020")],
)
def test_invalid_fsdp_config_is_error(codes, config, code):
    assert codes(fsdp=True, fsdp_config=config) == [code]


def test_enum_is_read_by_name(assess):
    spec = assess(fsdp=[FSDPOption.FULL_SHARD, FSDPOption.AUTO_WRAP]).spec
    assert spec.asked("sharding.strategy")
    spec = assess(fsdp=True, fsdp_config={"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP}).spec
    assert spec.sharding.strategy == "shard_grad_op"


@pytest.mark.parametrize("options", ["fulll_shard", "full_shard autowrap", "zero3", "offlaod"])
def test_unknown_fsdp_option_is_error(codes, options):
    assert codes(fsdp=options) == ["FSDP-E023"]


def test_arguments_without_fsdp_meaning_are_ignored(assess):
    arguments = {"output_dir": "out", "learning_rate": 1e-4, "fsdp": "full_shard", "bf16": True, "fp16": False}
    assessment = assess(training_arguments=arguments)
    assert assessment.ok
    assert assessment.spec.precision.param == "bf16"
    assert not assessment.spec.asked("launch.use_cpu")


def test_bf16_and_fp16_together_are_error(problems):
    (problem,) = problems(training_arguments={"fsdp": True, "bf16": True, "fp16": True})
    assert (problem.code, problem.origin.spelling) == ("FSDP-E102", "fp16")
    assert "TrainingArguments bf16=True" in problem.message


def test_two_kinds_of_checkpointing_are_error(codes):
    arguments = {"fsdp": True, "gradient_checkpointing": True, "fsdp_config": {"activation_checkpointing": True}}
    assert codes(training_arguments=arguments) == ["FSDP-E112"]
