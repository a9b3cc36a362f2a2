"""Training resumes from converted checkpoints of DeepSpeed, with the losses of the uninterrupted run."""

from __future__ import annotations

import contextlib
import io
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hf_fsdp_plugin.checkpoint.formats.known_formats import read_stored_model, read_stored_optimizer
from hf_fsdp_plugin.integrations.saving import manager
from hf_fsdp_plugin.problems import CheckpointError, Problem
from hf_fsdp_plugin.tools.convert.checkpoint import convert_checkpoint
from tests.support.assembled import assembled
from tests.support.checkpoint_accelerate_runs import Loop, trained_loop
from tests.support.deepspeed_files import STATES, STEP, Zero
from tests.support.matrices import slow
from tests.support.ranks import Ranks
from tests.support.tiny import parallel_config
from tests.support.trainer_runs import gathered, losses, make_trainer
from tests.support.training import assert_same_weights

NUM_RANKS = 3
"""Number of ranks that have written a checkpoint of DeepSpeed; another one than those that resume."""


def arguments(version: int) -> dict[str, Any]:
    config = parallel_config("full_shard", version, 2)
    return {"fsdp": True, "fsdp_config": {key.removeprefix("fsdp_"): v for key, v in config["fsdp_config"].items()}}


def assert_continued(found: dict[str, Any], num_steps: int) -> None:
    whole, resumed = found["losses"]
    assert resumed[-num_steps:] == pytest.approx(whole[-num_steps:], rel=1e-5)
    assert_same_weights(*found["weights"])


def converted(folder: Path) -> tuple[Path, list[Problem]]:
    """Convert a checkpoint of DeepSpeed on rank 0. Return the new folder and the problems."""
    out, problems = folder.with_name(f"{folder.name}-fsdp"), list[Problem]()
    if dist.get_rank() == 0:
        problems += convert_checkpoint(folder, out, force=False, progress=lambda *_: None).problems
    dist.barrier()
    return out, problems


def write_deepspeed(source: Path, folder: Path, stage: int, schedule: Any = None) -> None:
    """Write model and optimizer of a checkpoint of this package as DeepSpeed does, on rank 0; stage 4 is universal."""
    manager().wait()
    dist.barrier()
    if dist.get_rank() == 0:
        model, optimizer = read_stored_model(source), read_stored_optimizer(source)
        assert optimizer is not None
        options = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.groups]
        zero = Zero(
            weights={name: torch.from_numpy(assembled(source, tensor)) for name, tensor in model.tensors.items()},
            groups=[group["params"] for group in optimizer.groups],
            states={
                name: {key: torch.from_numpy(assembled(source, state[key])) for key in STATES}
                for name, state in optimizer.state.items()
            },
            options=options,
            dtype=torch.float32,
            schedule=schedule,
        )
        zero.write_universal(folder, 3) if stage == 4 else zero.write(folder, stage, NUM_RANKS if stage else 1)
    dist.barrier()


def resume_trainer(output_dir: str, stage: int, *, has_schedule_file: bool, **arguments: Any) -> dict[str, Any]:
    """Train six steps, and resume from the third one, saved as DeepSpeed does inside of the Trainer's checkpoint."""
    run, other = Path(output_dir), Path(output_dir) / "other"
    whole = make_trainer(output_dir, save_strategy="steps", save_steps=STEP, **arguments)
    whole.train()
    source, folder = run / f"checkpoint-{STEP}", other / f"checkpoint-{STEP}"
    schedule = torch.load(source / "scheduler.pt")
    write_deepspeed(source, folder, stage, None if has_schedule_file else schedule)
    names = (
        "trainer_state.json",
        "rng_state_0.pth",
        "rng_state_1.pth",
        *(["scheduler.pt"] if has_schedule_file else []),
    )
    for name in names if dist.get_rank() == 0 else ():
        shutil.copy(source / name, folder)
    dist.barrier()
    refused = make_trainer(str(other), **arguments)
    with pytest.raises(CheckpointError) as caught:
        refused.train(resume_from_checkpoint=True)
    out, problems = converted(folder)
    resumed = make_trainer(str(other), **arguments)
    with contextlib.redirect_stderr(io.StringIO()) as printed:
        resumed.train(resume_from_checkpoint=str(out))
    return {
        "refusal": str(caught.value),
        "command": f"hf-fsdp convert {folder} --out {out}",
        "problems": [problem.message for problem in problems],
        "losses": (losses(whole), losses(resumed)),
        "rates": [[e["learning_rate"] for e in t.state.log_history if "loss" in e] for t in (whole, resumed)],
        "weights": (gathered(whole), gathered(resumed)),
        "printed": printed.getvalue(),
    }


@pytest.mark.parametrize(
    ("stage", "version", "has_schedule_file"), [(2, 2, True), slow(3, 1, False), slow(1, 1, True), slow(4, 2, False)]
)
def test_trainer_resumes(two_ranks: Ranks, tmp_path: Path, stage: int, version: int, has_schedule_file: bool) -> None:
    found = two_ranks.run(
        resume_trainer, str(tmp_path), stage, has_schedule_file=has_schedule_file, **arguments(version)
    )
    assert_continued(found[0], 3)
    whole, resumed = found[0]["rates"]
    assert resumed == pytest.approx(whole)
    ranks = "1 rank" if stage == 4 else f"{NUM_RANKS} ranks"
    (problem,) = found[0]["problems"]
    assert problem.startswith(f"has the random states of 2 ranks, but {ranks} wrote it: dropout")
    assert "FSDP-W433" in found[0]["printed"]  # the ranks of the manifest are others
    for rank in found:
        assert "FSDP-E417" in rank["refusal"] and rank["command"] in rank["refusal"]


def resume_loop(folder: str, stage: int, version: int, *, schedule: str, **settings: Any) -> dict[str, Any]:
    """Train three steps of a loop and two more, and the two again from what DeepSpeed saves after three."""
    first = trained_loop(version, STEP)
    source = Path(first.accelerator.save_state(f"{folder}/source"))
    saved = {"torch": first.scheduler.scheduler.state_dict(), "other": {"last_batch_iteration": 2}}[schedule]
    place = Path(folder) / "deepspeed"
    write_deepspeed(source, place, stage, saved)
    with pytest.raises(CheckpointError, match="FSDP-E417"):
        first.accelerator.load_state(str(place))
    place, problems = converted(place)
    whole = [first.step(number) for number in (STEP, STEP + 1)]
    second = Loop(version, **settings)
    with contextlib.redirect_stderr(io.StringIO()) as printed:
        second.accelerator.load_state(str(place))
    rate = second.optimizer.param_groups[0]["lr"]
    steps = second.scheduler.scheduler.last_epoch
    resumed = [second.step(number) for number in (STEP, STEP + 1)]
    return {
        "losses": (whole, resumed),
        "weights": (first.weights(), second.weights()),
        "rate": rate,
        "steps": steps,
        "printed": printed.getvalue(),
        "problems": [problem.message for problem in problems],
    }


@pytest.mark.parametrize(
    ("stage", "version", "schedule"), [(0, 2, "torch"), (3, 1, "torch"), slow(4, 2, "torch"), slow(1, 1, "torch")]
)
def test_accelerate_loads_state(two_ranks: Ranks, tmp_path: Path, stage: int, version: int, schedule: str) -> None:
    found = two_ranks.run(resume_loop, str(tmp_path), stage, version, schedule=schedule)[0]
    assert_continued(found, 2)
    assert len(found["problems"]) == 1 and "no random states" in found["problems"][0]


@pytest.mark.slow
def test_schedule_of_deepspeed_is_replaced_by_steps(two_ranks: Ranks, tmp_path: Path) -> None:
    found = two_ranks.run(resume_loop, str(tmp_path), 2, 2, schedule="other")[0]
    assert found["steps"] == 3 and "continues after 3 steps" in found["problems"][0]
    assert found["losses"][0][0] == pytest.approx(found["losses"][1][0], rel=1e-5)


def resume_trainer_without_its_state(output_dir: str, **arguments: Any) -> str:
    """Resume from what DeepSpeed's engine saves without a Trainer. Return the error."""
    source = Path(trained_loop(2, STEP).accelerator.save_state(f"{output_dir}/source"))
    write_deepspeed(source, Path(output_dir) / "deepspeed", 1)
    out, _ = converted(Path(output_dir) / "deepspeed")
    with pytest.raises(CheckpointError) as caught:
        make_trainer(output_dir, **arguments).train(resume_from_checkpoint=str(out))
    return str(caught.value)


def test_trainer_refuses_checkpoint_without_its_state(two_ranks: Ranks, tmp_path: Path) -> None:
    for text in two_ranks.run(resume_trainer_without_its_state, str(tmp_path), **arguments(2)):
        assert "FSDP-E424" in text and "trainer_state.json" in text
