"""Every file in configs/ loads, and sets the settings that its name describes."""

from __future__ import annotations

import hashlib
import json
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


@pytest.mark.parametrize(
    ("name", "digest", "layer", "offload"),
    [
        ("seed_hf_guide.yaml", "0e5e9a36f026e011", "BertLayer", True),
        ("seed_book_chapter.yaml", "3f405221c2b80e49", "LlamaDecoderLayer", False),
    ],
)
def test_config_of_guide_is_verbatim(name: str, digest: str, layer: str, offload: bool) -> None:
    content = json.dumps(yaml.safe_load((CONFIGS / name).read_text()), sort_keys=True)
    assert hashlib.sha256(content.encode()).hexdigest()[:16] == digest, "this file is a copy from a guide; restore it"
    spec = load_spec(CONFIGS / name, environ={})
    assert (spec.fsdp.version, spec.sharding.strategy, spec.wrap.policy) == (1, "full_shard", "transformer")
    assert (spec.wrap.classes, spec.offload.params, spec.loading.ram_efficient) == ((layer,), offload, True)
    assert (spec.checkpoint.state_dict, spec.prefetch.backward) == ("sharded", "pre")
    assert (spec.precision.param, spec.precision.reduce) == ("bf16", "fp32")
