"""Every file in configs/ loads, and has the settings that its name or its guide announces."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from hf_fsdp_plugin import load_spec
from hf_fsdp_plugin.strategies import STRATEGIES

CONFIGS = Path(__file__).parents[2] / "configs"
NAMES = sorted(path.name for path in CONFIGS.glob("*.yaml"))

# The part of a file name after the version -> its settings.
SETTINGS_OF_NAME: dict[str, dict[str, object]] = {
    **{strategy: {"sharding.strategy": strategy} for strategy in STRATEGIES},
    "wrap_size": {"wrap.policy": "size", "wrap.min_num_params": 20000},
    "wrap_size_guide_names": {"wrap.policy": "size", "wrap.min_num_params": 20000},
    "wrap_none": {"wrap.policy": "none"},
    "offload": {"offload.params": True},
    "activation_checkpointing": {"activation.checkpointing": "full", "activation.offload": False},
    "activation_checkpointing_offload": {"activation.checkpointing": "full", "activation.offload": True},
    "bf16": {"precision.param": "bf16", "precision.reduce": "fp32"},
    "bf16_per_field": {"precision.param": "bf16", "precision.reduce": "bf16", "precision.output": "fp32"},
    "fp16": {"precision.param": "fp16"},
    "state_dict_full": {"checkpoint.state_dict": "full"},
    "state_dict_sharded": {"checkpoint.state_dict": "sharded"},
    "state_dict_local": {"checkpoint.state_dict": "local"},
    "ram_efficient_loading": {"loading.ram_efficient": True},
    "prefetch": {"prefetch.backward": "pre", "prefetch.forward": True},
    "prefetch_post": {"prefetch.backward": "post"},
}


def test_every_name_has_config_for_both_versions() -> None:
    wanted = {f"fsdp{version}_{name_part}.yaml" for version in (1, 2) for name_part in SETTINGS_OF_NAME}
    wanted -= {"fsdp2_wrap_size_guide_names.yaml"}  # the guide is about version 1 only
    assert wanted == {name for name in NAMES if not name.startswith("seed_")}


@pytest.mark.parametrize("name", [name for name in NAMES if not name.startswith("seed_")])
def test_config_has_settings_of_its_name(name: str) -> None:
    version, _, name_part = name.removesuffix(".yaml").partition("_")
    spec = load_spec(CONFIGS / name, environ={})
    assert f"fsdp{spec.fsdp.version}" == version
    assert {setting: spec.get(setting) for setting in SETTINGS_OF_NAME[name_part]} == SETTINGS_OF_NAME[name_part]
    if name_part.startswith("hybrid"):
        assert (spec.mesh.replicate, spec.mesh.shard, spec.launch.num_processes) == (2, 2, 4)
    assert [str(problem) for problem in spec.problems if problem.severity == "warning"] == []


@pytest.mark.parametrize("name", NAMES)
def test_accelerate_loads_config(name: str) -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    config = load_config_from_file(str(CONFIGS / name))
    assert config.fsdp_config == yaml.safe_load((CONFIGS / name).read_text())["fsdp_config"]


def test_book_chapter_config_is_unchanged() -> None:
    assert yaml.safe_load((CONFIGS / "seed_book_chapter.yaml").read_text()) == {
        "compute_environment": "LOCAL_MACHINE",
        "debug": False,
        "distributed_type": "FSDP",
        "downcast_bf16": "no",
        "machine_rank": 0,
        "main_training_function": "main",
        "mixed_precision": "bf16",
        "num_machines": 1,
        "num_processes": 4,
        "fsdp_config": {
            "fsdp_sharding_strategy": 1,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer",
            "fsdp_cpu_ram_efficient_loading": True,
            "fsdp_offload_params": False,
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
            "fsdp_backward_prefetch": "BACKWARD_PRE",
            "fsdp_forward_prefetch": False,
            "fsdp_activation_checkpointing": False,
            "fsdp_sync_module_states": True,
            "fsdp_use_orig_params": True,
        },
    }
    spec = load_spec(CONFIGS / "seed_book_chapter.yaml", environ={})
    assert (spec.fsdp.version, spec.sharding.strategy, spec.wrap.classes) == (1, "full_shard", ("LlamaDecoderLayer",))
    assert (spec.precision.param, spec.prefetch.backward, spec.loading.ram_efficient) == ("bf16", "pre", True)


def test_hf_guide_config_is_unchanged() -> None:
    text = (CONFIGS / "seed_hf_guide.yaml").read_text()
    assert yaml.safe_load(text)["fsdp_config"] == {
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_backward_prefetch_policy": "BACKWARD_PRE",
        "fsdp_cpu_ram_efficient_loading": True,
        "fsdp_forward_prefetch": False,
        "fsdp_offload_params": True,
        "fsdp_sharding_strategy": 1,
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        "fsdp_sync_module_states": True,
        "fsdp_transformer_layer_cls_to_wrap": "BertLayer",
        "fsdp_use_orig_params": True,
    }
    spec = load_spec(CONFIGS / "seed_hf_guide.yaml", environ={})
    assert (spec.prefetch.backward, spec.offload.params, spec.wrap.classes) == ("pre", True, ("BertLayer",))
