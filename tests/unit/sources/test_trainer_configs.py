"""Configs of axolotl, LLaMA-Factory, ms-swift and training scripts: every key is mapped, without effect, or refused."""

import json

import pytest

from hf_fsdp_plugin.sources.config_tree import ConfigFile
from hf_fsdp_plugin.sources.interface import Sources
from hf_fsdp_plugin.tools.convert import conversion
from hf_fsdp_plugin.tools.convert.dialects.interface import leaves

ZERO3 = {
    "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}},
    "bf16": {"enabled": "auto"},
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_clipping": 0.5,
}


@pytest.fixture
def assess(assess_converted):
    return assess_converted


@pytest.fixture
def reading(tmp_path):
    """Write a config, read it as a dialect, and check that no key is lost."""

    def run(text, name="config.yaml", *, converts=False):
        path = tmp_path / name
        path.write_text(text)
        read = conversion.read(Sources(config=ConfigFile.at(path), environ={}), converts=converts)
        errors = {p.origin.spelling for p in read.problems if p.severity == "error"}
        keys = [entry.key for _, entry in leaves(read.dialect_of.table, read.document.root.value)]
        recorded = {outcome.origin.spelling for outcome in read.outcomes}
        assert all(key in recorded or key in errors or key.rpartition(".")[2] in errors for key in keys)
        return read

    return run


def fates(read):
    return {outcome.origin.spelling: outcome.fate for outcome in read.outcomes}


def found(read):
    return sorted(problem.code for problem in read.problems if problem.code not in ("FSDP-N067", "FSDP-N071"))


AXOLOTL = """
base_model: m
fsdp: [full_shard, auto_wrap]
fsdp_config:
  fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer
  fsdp_offload_params: true
  fsdp_state_dict_type: FULL_STATE_DICT
  fsdp_final_state_dict_type: FULL_STATE_DICT
micro_batch_size: 2
wandb_project:
"""


def test_old_form_of_axolotl_is_fsdp1(assess, reading, tmp_path):
    read = reading(AXOLOTL)
    assert read.dialect_of.name == "axolotl" and found(read) == []
    assert read.arguments == {"per_device_train_batch_size": 2}
    assert fates(read)["fsdp_config.fsdp_final_state_dict_type"] == "irrelevant"
    spec = assess(tmp_path / "config.yaml").spec
    assert (spec.enabled, spec.fsdp.version, spec.offload.params, spec.checkpoint.state_dict) == (True, 1, True, "full")
    assert spec.wrap.classes == ("LlamaDecoderLayer",)


def test_new_form_of_axolotl_needs_no_fsdp(assess):
    config = {
        "base_model": "m",
        "fsdp_config": {"fsdp_version": 2, "reshard_after_forward": False},
        "dp_shard_size": 2,
        "tensor_parallel_size": 2,
        "sequence_parallel_degree": 2,
        "bf16": "auto",
    }
    spec = assess(config).spec
    assert (spec.enabled, spec.fsdp.version, spec.sharding.strategy) == (True, 2, "shard_grad_op")
    assert (spec.mesh.shard, spec.mesh.tensor, spec.mesh.context, spec.precision.param) == (2, 2, 2, "bf16")


def test_axolotl_without_fsdp_does_not_enable_it(assess):
    assert not assess({"base_model": "m", "fsdp_version": 2}).spec.enabled


@pytest.mark.parametrize(
    ("key", "fate"),
    [
        ("expert_parallel_size: 2", None),
        ("expert_parallel_size: 1", "irrelevant"),
        ("fp32_norms: true", None),
        ("fp32_norms: false", "irrelevant"),
        ("activation_offloading: true", "irrelevant"),
        ("ddp_find_unused_parameters: true", "irrelevant"),
    ],
)
def test_key_of_axolotl_has_fate(reading, key, fate):
    read = reading(f"{AXOLOTL}{key}\n")
    assert fates(read).get(key.partition(":")[0]) == fate
    assert found(read) == ([] if fate else ["FSDP-E062"])


def test_unknown_key_of_axolotl_is_reported(reading):
    assert found(reading(f"{AXOLOTL}warmup_ration: 0.1\n")) == ["FSDP-W072"]
    assert found(reading(f"{AXOLOTL}fsdp_vresion: 2\n")) == ["FSDP-E020"]
    assert found(reading(f"{AXOLOTL}dp_shard_sizes: 2\n")) == ["FSDP-E061"]


def test_unknown_version_of_axolotl_is_error(assess, codes, tmp_path):
    (tmp_path / "config.yaml").write_text(AXOLOTL + "fsdp_version: 3\n")
    assert codes(tmp_path / "config.yaml") == ["FSDP-E101"]


def test_fp8_of_axolotl_overrides_bf16(assess, reading, tmp_path):
    read = reading("base_model: m\nfsdp_config: {fsdp_version: 2}\nfp8: true\nbf16: true\n")
    assert fates(read)["bf16"] == "irrelevant" and found(read) == []


@pytest.mark.parametrize("head", ["base_model: m", "finetuning_type: full", "tuner_type: full", "output_dir: out"])
def test_deepspeed_file_is_converted_with_its_keys(reading, tmp_path, head):
    (tmp_path / "zero3.json").write_text(json.dumps(ZERO3))
    batch = "micro_batch_size" if "base" in head else "per_device_train_batch_size"
    read = reading(f"{head}\ndeepspeed: zero3.json\nbf16: true\n{batch}: 4\n", converts=True)
    settings = {setting.name: setting.value for setting in read.settings}
    assert settings["sharding.strategy"] == "full_shard" and settings["fsdp.version"] == "2"
    assert "zero_optimization.stage" in fates(read) and found(read) == []
    assert read.arguments["max_grad_norm"] == 0.5


def test_missing_deepspeed_file_is_error(reading):
    read = reading("finetuning_type: full\ndeepspeed: zero4.json\n")
    assert found(read) == ["FSDP-E001"] and read.problems[0].origin.line == 2


@pytest.mark.parametrize("head", ["base_model: m", "finetuning_type: full", "model_name_or_path: m"])
def test_fsdp_and_deepspeed_conflict(reading, tmp_path, head):
    (tmp_path / "zero3.json").write_text(json.dumps(ZERO3))
    text = f"{head}\nfsdp: full_shard\ndeepspeed: zero3.json\nbf16: true\nper_device_train_batch_size: 4\n"
    assert "FSDP-E073" in found(reading(text))
    assert "FSDP-E073" not in found(reading(text.replace("fsdp: full_shard", "fsdp: ''")))


def test_mixed_dialects_are_an_error(codes):
    assert codes({"base_model": "m", "finetuning_type": "full"}) == ["FSDP-E064"]
    assert codes({"base_model": "m", "zero_optimization": {"stage": 3}}) == ["FSDP-E064"]
    assert codes({"base_model": "m", "distributed_type": "FSDP"}) == ["FSDP-E064"]


def test_version_1_of_llama_factory_has_its_defaults(assess, reading, tmp_path):
    read = reading("model: m\ndist_config:\n  name: fsdp2\n  offload_params: true\n  dcp_path: null\ncp_size: 2\n")
    assert read.dialect_of.name == "llama_factory" and found(read) == []
    spec = assess(tmp_path / "config.yaml").spec
    assert (spec.enabled, spec.fsdp.version, spec.offload.params, spec.mesh.context) == (True, 2, True, 2)
    assert (spec.precision.param, spec.activation.checkpointing) == ("bf16", "full")
    assert found(reading("model: m\ndist_config: {name: fsdp3}\n")) == ["FSDP-E101"]


def test_version_1_of_llama_factory_names_deepspeed_file(reading, tmp_path):
    (tmp_path / "zero3.json").write_text(json.dumps(ZERO3))
    text = "model: m\ndist_config: {name: deepspeed, config_file: zero3.json}\nmicro_batch_size: 1\nbf16: true\n"
    assert "zero_optimization.stage" in fates(reading(text))


def test_megatron_of_llama_factory_is_refused(reading):
    assert found(reading("finetuning_type: full\ntensor_model_parallel_size: 2\n")) == ["FSDP-E062"]
    assert found(reading("finetuning_type: full\ntensor_model_parallel_size: 1\n")) == []


def test_fsdp_preset_of_swift_is_its_file(assess, reading, tmp_path):
    preset = {
        "_note": "text",
        "fsdp": "full_shard auto_wrap",
        "fsdp_config": {
            "fsdp_version": 2,
            "reshard_after_forward": True,
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "cpu_ram_efficient_loading": True,
            "state_dict_type": "SHARDED_STATE_DICT",
            "activation_checkpointing": True,
        },
    }
    assert found(reading(json.dumps(preset), "preset.json")) == []
    specs = []
    for name in ("fsdp2", "preset.json"):
        read = reading(f"model: m\ntuner_type: full\nfsdp: {name}\n")
        assert read.dialect_of.name == "ms_swift" and found(read) == []
        specs.append(assess(tmp_path / "config.yaml").spec)
    specs.append(assess(tmp_path / "preset.json").spec)
    values = [{name: value for name, value, _ in spec.settings()} for spec in specs]
    assert values[0] == values[1] == values[2]
    assert specs[0].activation.checkpointing == "full" and specs[0].loading.ram_efficient


@pytest.mark.parametrize(
    ("preset", "strategy", "offloads"),
    [("zero1", "shard_grad_op", False), ("zero3", "full_shard", False), ("zero2_offload", "shard_grad_op", True)],
)
def test_deepspeed_preset_of_swift_is_converted(assess, preset, strategy, offloads):
    arguments = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 1, "max_grad_norm": 1.0}
    spec = assess({"tuner_type": "lora", "deepspeed": preset, "bf16": True, **arguments}).spec
    assert (spec.enabled, spec.sharding.strategy, spec.offload.optimizer) == (True, strategy, offloads)


def test_misspelled_preset_of_swift_has_suggestion(reading):
    read = reading("tuner_type: full\nfsdp: fsdp3\n")
    assert found(read) == ["FSDP-E001"] and read.problems[0].suggestion == "fsdp2"


def test_training_script_needs_fsdp(assess, codes):
    config = {"model_name_or_path": "m", "fsdp_config": {"fsdp_version": 1}, "my_own": 1}
    assert not assess(config).spec.enabled
    spec = assess({**config, "fsdp": "full_shard auto_wrap"}).spec
    assert spec.enabled and spec.fsdp.version == 1
    assert codes({**config, "fsdp": "full_shrd"}) == ["FSDP-E023"]


def test_fsdp_config_of_training_script_is_json_or_file(assess, tmp_path):
    text = '{"offload_params": true}'
    (tmp_path / "configs").mkdir()
    (tmp_path / "accelerate.yaml").write_text(f"distributed_type: FSDP\nfsdp_config: {text}\n")
    for value in (f"'{text}'", "accelerate.yaml"):
        path = tmp_path / "configs" / "train.yaml"
        path.write_text(f"output_dir: out\nfsdp: full_shard\nfsdp_config: {value}\n")
        assert assess(path).spec.offload.params


def test_configs_that_include_each_other_are_refused(codes, tmp_path):
    path = tmp_path / "axolotl.yaml"
    path.write_text("base_model: m\ndeepspeed: axolotl.yaml\n")
    assert codes(path) == ["FSDP-E004"]
