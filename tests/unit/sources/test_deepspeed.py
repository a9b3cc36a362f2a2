"""Configs of DeepSpeed are recognized, and the error names the equivalent FSDP settings."""

import json

import pytest

ZERO_3 = {
    "bf16": {"enabled": True},
    "fp16": {"enabled": "auto"},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "none"},
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "activation_checkpointing": {"partition_activations": False},
    "gradient_accumulation_steps": "auto",
    "train_micro_batch_size_per_gpu": "auto",
}
ZERO_2 = {"zero_optimization": {"stage": 2}, "train_batch_size": 8}
SETTINGS_OF_ZERO_3 = (
    "fsdp_sharding_strategy: FULL_SHARD",
    "fsdp_offload_params: true",
    "mixed_precision: bf16",
    "fsdp_state_dict_type: FULL_STATE_DICT",
    "fsdp_activation_checkpointing: true",
)


@pytest.mark.parametrize(("content", "settings"), [(ZERO_3, SETTINGS_OF_ZERO_3), (ZERO_2, ("SHARD_GRAD_OP",))])
def test_config_of_deepspeed_is_recognized(problems, tmp_path, content, settings):
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(content))
    for given in ({"config": path}, {"config": content}, {"fsdp": True, "fsdp_config": content},
                  {"fsdp": "full_shard", "fsdp_config": str(path)}):  # fmt: skip
        (problem,) = problems(**given)
        assert problem.code == "FSDP-E060"
        assert all(setting in problem.message for setting in settings)
        assert ("fsdp_offload_params" in problem.message) is (content is ZERO_3)


def test_section_of_deepspeed_names_equivalent_settings(problems):
    section = {"zero_stage": 3, "offload_param_device": "cpu", "zero3_save_16bit_model": True}
    (problem,) = problems({"distributed_type": "DEEPSPEED", "deepspeed_config": section})
    assert problem.code == "FSDP-E120"
    assert "FULL_SHARD, fsdp_offload_params: true, fsdp_state_dict_type: FULL_STATE_DICT" in problem.fix


def test_config_of_fsdp_is_not_one_of_deepspeed(codes):
    assert codes({"distributed_type": "FSDP", "deepspeed_config": {}, "fsdp_config": {"fsdp_version": 2}}) == []
