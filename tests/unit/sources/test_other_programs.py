"""Configs of other programs: a training process refuses them, and gets their settings from the launcher."""

import json

import pytest

from hf_fsdp_plugin.sources.config_tree import ConfigFile
from hf_fsdp_plugin.sources.handover import LaunchHandover
from hf_fsdp_plugin.sources.interface import Sources
from hf_fsdp_plugin.spec import load
from hf_fsdp_plugin.tools.convert.conversion import with_converted_config
from hf_fsdp_plugin.vocabulary import PROGRAM_KEYS

ACCELERATE = {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 3}, "num_processes": 2}
DEEPSPEED = {
    "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}},
    "bf16": {"enabled": True},
    "gradient_clipping": 0.5,
    "train_micro_batch_size_per_gpu": "auto",
}
PROGRAMS = {
    "DeepSpeed": DEEPSPEED,
    "axolotl": {"base_model": "m", "fsdp_config": {"fsdp_version": 2}},
    "LLaMA-Factory": {"finetuning_type": "full", "fsdp": "full_shard"},
    "ms-swift": {"tuner_type": "full", "fsdp": "fsdp2"},
    "DistributedConfig": {"fsdp_size": 2, "tp_plan": None},
    "a training script": {"output_dir": "out", "fsdp": "full_shard"},
    "Accelerate for DeepSpeed": ACCELERATE,
}


def test_every_program_is_tested():
    assert PROGRAM_KEYS.keys() <= PROGRAMS.keys()


@pytest.fixture(params=PROGRAMS)
def file(request, tmp_path):
    path = tmp_path / "other.json"
    path.write_text(json.dumps(PROGRAMS[request.param], indent=1))
    return request.param, ConfigFile.at(path)


def test_config_of_another_program_is_refused(problems, file):
    program, config = file
    for given in ({"config": config}, {"config": PROGRAMS[program]}, {"fsdp": True, "fsdp_config": PROGRAMS[program]}):
        (problem,) = problems(**given)
        assert problem.code == "FSDP-E060" and program in problem.message and "hf-fsdp convert" in problem.fix
    assert f"hf-fsdp convert {config.shown} " in problems(config)[0].fix


@pytest.mark.parametrize("name", ["train.sh", "train.py", "job.slurm"])
def test_script_as_config_is_refused(codes, tmp_path, name):
    (tmp_path / name).write_text("torchrun train.py --fsdp full_shard\n")
    assert codes(tmp_path / name) == ["FSDP-E060"]
    converted = with_converted_config(Sources(config=ConfigFile.at(tmp_path / name), environ={}))
    (problem,) = load.assess(converted).problems
    assert problem.code == "FSDP-E060" and "hf-fsdp launch" in problem.fix


def test_config_of_accelerate_with_other_keys_is_its_own(codes):
    assert codes({"distributed_type": "FSDP", "fsdp_config": {}, "output_dir": "out"}) == ["FSDP-E020"]
    assert codes({**ACCELERATE, "deepspeed_config": {}}) == ["FSDP-E120"]


def test_deepspeed_that_runs_itself_is_left_alone(codes):
    running = {"ACCELERATE_USE_DEEPSPEED": "true"}
    assert codes(ACCELERATE, environ=running) == ["FSDP-E120"]
    assert codes(DEEPSPEED, environ=running) == ["FSDP-E060"]
    assert codes(ACCELERATE, environ={"ACCELERATE_USE_DEEPSPEED": "false"}) == ["FSDP-E060"]


def test_ranks_get_the_converted_settings_with_their_origins(file):
    _, config = file
    sources = with_converted_config(Sources(config=config, overrides=("launch.num_processes=2",), environ={}))
    given = load.read_settings(sources)
    handed = LaunchHandover.from_env(LaunchHandover(given=tuple(given)).to_env())
    assert handed is not None
    config.path.unlink()  # a rank does not read it
    launcher, rank = load.combine(given), load.combine(handed.given)
    assert launcher.ok and rank == launcher, (launcher.problems, rank.problems)
    assert rank.spec.enabled


def test_rank_gets_the_problems_of_the_conversion(tmp_path):
    (tmp_path / "ds.json").write_text(json.dumps(DEEPSPEED))
    sources = with_converted_config(Sources(config=ConfigFile.at(tmp_path / "ds.json"), environ={}))
    given = load.read_settings(sources)
    handed = LaunchHandover.from_env(LaunchHandover(given=tuple(given)).to_env())
    assert handed is not None and load.combine(handed.given).problems == load.combine(given).problems
    assert {"FSDP-N067", "FSDP-W068"} <= {problem.code for problem in load.combine(handed.given).problems}
