"""A world of one CPU rank: launchers start it, and a Trainer trains, saves and resumes in it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from tests.support.launching import CONFIG, run, write
from tests.support.matrices import alternating, slow
from tests.support.ranks import Ranks
from tests.support.trainer_runs import train_and_resume

SCRIPT = """
    import torch, hf_fsdp_plugin as hfp
    hfp.install(CONFIG)
    from accelerate import Accelerator
    accelerator = Accelerator()
    model = accelerator.prepare(torch.nn.Linear(4, 2))
    print("CREATED", type(model.weight).__name__, accelerator.num_processes, torch.distributed.get_backend())
"""
TORCHRUN = ["torch.distributed.run", "--standalone", "--nproc_per_node", "1"]
WITH_CONFIG = ["--config_file", "fsdp.yaml", "--num_processes", "1", "--cpu"]


@pytest.mark.parametrize(
    ("launcher", "script"),
    [
        (["hf_fsdp_plugin.cli.main", "launch", *WITH_CONFIG], SCRIPT.replace("CONFIG", "")),
        slow(["accelerate.commands.launch", *WITH_CONFIG], SCRIPT.replace("CONFIG", "")),
        slow(TORCHRUN, SCRIPT.replace("CONFIG", "'fsdp.yaml'")),
        slow(TORCHRUN, SCRIPT.replace("Accelerator()", "hfp.accelerator(hfp.load_spec('fsdp.yaml'))")
                             .replace("hfp.install(CONFIG)", "")),
    ],
    ids=["hf-fsdp", "accelerate", "torchrun", "torchrun-spec"],
)  # fmt: skip
def test_launcher_starts_one_rank(tmp_path: Path, launcher: list[str], script: str) -> None:
    write(tmp_path, script)
    done = run(tmp_path, [sys.executable, "-m", *launcher, "train.py"])
    assert "CREATED DTensor 1 gloo" in done.stdout, done.stderr


def test_script_without_launcher_is_refused(tmp_path: Path) -> None:
    write(tmp_path, SCRIPT.replace("CONFIG", "'fsdp.yaml'"))
    (tmp_path / "fsdp.yaml").write_text(CONFIG + "num_processes: 1\n")
    done = run(tmp_path, [sys.executable, "train.py"])
    assert done.returncode == 1
    assert "[FSDP-E601]" in done.stderr


@pytest.mark.parametrize(("kind", "version"), alternating(["SHARDED", "FULL", "LOCAL"]))
def test_trainer_on_one_rank_saves_and_resumes(one_rank: Ranks, tmp_path: Path, version: int, kind: str) -> None:
    config = {"fsdp_version": version, "fsdp_state_dict_type": f"{kind}_STATE_DICT"}
    [run] = one_rank.run(train_and_resume, str(tmp_path), fsdp="full_shard auto_wrap", fsdp_config=config)
    assert run["resumed"] == run["whole"]
    whole, resumed = run["weights"]
    assert whole and all(torch.equal(whole[name], resumed[name]) for name in whole)
    assert {row["status"] for row in run["report"]["settings"]} <= {"applied", "unobservable"}
    assert run["report"]["world_size"] == 1


@pytest.mark.parametrize(
    ("strategy", "version"), alternating(["shard_grad_op", "no_shard", "hybrid_shard", "hybrid_shard_zero2"])
)
def test_every_strategy_trains_on_one_rank(one_rank: Ranks, tmp_path: Path, version: int, strategy: str) -> None:
    config = {"fsdp_version": version, "fsdp_sharding_strategy": strategy}
    [run] = one_rank.run(train_and_resume, str(tmp_path), fsdp=f"{strategy} auto_wrap", fsdp_config=config)
    assert run["resumed"] == run["whole"]
