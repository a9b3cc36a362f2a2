"""What ``hf-fsdp launch`` hands over to its ranks: the settings of all sources, with origins and problems."""

from __future__ import annotations

from pathlib import Path

import pytest

from hf_fsdp_plugin.problems import UsageError
from hf_fsdp_plugin.sources.config_tree import ConfigFile
from hf_fsdp_plugin.sources.handover import LAUNCH_VARIABLE, LaunchHandover
from hf_fsdp_plugin.sources.interface import Sources
from hf_fsdp_plugin.spec.load import combine, read_settings

CONFIGS = Path(__file__).resolve().parents[3] / "configs"


def test_handover_round_trips_values_origins_and_problems() -> None:
    config = {
        "distributed_type": "FSDP",
        "mixed_precision": "fp8",
        "dynamo_config": {"dynamo_backend": "inductor", "dynamo_mode": None},
        "fp8_config": {"backend": "TE", "interval": 1, "amax_history_len": 16},
        "fsdp_config": {
            "fsdp_version": 1,
            "fsdp_sharding_strategy": "FULL_SHARD",
            "fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer,MistralDecoderLayer",
            "fsdp_backward_prefetch": "None",
            "fsdp_min_num_params": 1e8,
        },
        "megatron_lm_config": {},
        "commands": ["ü", 1, 0.5, None, True],
    }
    sources = Sources(
        config=config,
        command_line=("--cpu", "--fsdp_config", '{"offload_params": true}', "--fsdp_offload_params", "false"),
        overrides=("mesh.shard=2",),
        environ={"FSDP_VERSION": "1", "FSDP_BACKWARD_PREFETCH": "BACKWARD_PRE", "FSDP_ODD": "1"},
    )
    given = tuple(read_settings(sources))
    written = LaunchHandover(given=given, quiet=True, report="/a/report.json", report_table=True)
    read = LaunchHandover.from_env(written.to_env())
    assert read == written and read is not None
    launcher, rank = combine(given), combine(read.given)
    assert launcher == rank and {problem.severity for problem in rank.problems} == {"error", "warning", "note"}
    assert LaunchHandover.from_env({}) is None


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_rank_gets_every_setting_of_shipped_config(path: Path) -> None:
    given = read_settings(Sources(config=ConfigFile.at(path), environ={}))
    read = LaunchHandover.from_env(LaunchHandover(given=tuple(given)).to_env())
    assert read is not None and combine(read.given) == combine(given) and combine(given).spec.origins


def test_settings_too_long_for_a_variable_are_refused() -> None:
    names = [f"model.layers.{number}.mlp" for number in range(9000)]
    config = {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2, "fsdp_ignored_modules": "|".join(names)}}
    given = tuple(read_settings(Sources(config=config, environ={})))
    with pytest.raises(UsageError, match=r"need [\d,]+ bytes.* longest is fsdp_ignored_modules: shorten it"):
        LaunchHandover(given=given).to_env()


def test_handover_with_invalid_text_is_refused() -> None:
    with pytest.raises(ValueError, match=f"{LAUNCH_VARIABLE} does not"):
        LaunchHandover.from_env({LAUNCH_VARIABLE: '{"given": null}'})
