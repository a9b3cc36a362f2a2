"""Training resumes from a checkpoint in other world sizes, strategies, versions and state dict types."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
from transformers import TrainerCallback, get_scheduler

import hf_fsdp_plugin as hfp
from hf_fsdp_plugin.hangs.calls import record
from hf_fsdp_plugin.integrations.session import current_run
from hf_fsdp_plugin.messages import printer
from hf_fsdp_plugin.problems import CheckpointError
from hf_fsdp_plugin.runs.attempts import FailedAttempt, Restarts
from hf_fsdp_plugin.tools.verify.verification import verify
from tests.support.matrices import slow
from tests.support.ranks import Ranks
from tests.support.resume_runs import NUM_STEPS, StopAt, train
from tests.support.tiny import MODELS
from tests.support.trainer_runs import Batches, make_trainer


class OwnCheckpoints(hfp.FsdpTrainer):
    """Writes checkpoints with the body of Transformers' method, shortened, to paths that it computes itself."""

    fails = False

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        folder = f"{self.args.output_dir}/checkpoint-{self.state.global_step}"
        self.save_model(folder, _internal_call=True)
        if self.fails:
            raise ValueError("no space in my store")
        self._save_optimizer_and_scheduler(folder)
        self._save_rng_state(folder)
        if self.args.should_save:
            self.state.save_to_json(f"{folder}/trainer_state.json")
            Path(folder, "notes.txt").write_text("mine")
            Path(self.args.output_dir, "saves.txt").write_text(folder)


class SometimesOwn(hfp.FsdpTrainer):
    """Calls the method of its base class, if it is not the second step."""

    fails = False

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        if self.state.global_step == 2:
            OwnCheckpoints._save_checkpoint(self, model, trial)  # type: ignore[arg-type]
        else:
            super()._save_checkpoint(model, trial)


class Preempted(TrainerCallback):
    """Is asked for a checkpoint after the third step: both ranks at different moments, or the last one only."""

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        time.sleep(0.1)
        if state.global_step == 3 and dist.get_rank() in self.ranks:
            time.sleep(0.3 * dist.get_rank())
            os.kill(os.getpid(), signal.SIGTERM)


EXACT, REORDERED = 1e-6, 1e-4
"""Relative difference of losses: the same sums in the same order, and the same sums in another one."""


def config(version: int, kind: str, strategy: str = "full_shard", **more: Any) -> dict[str, Any]:
    settings = {"fsdp_version": version, "state_dict_type": kind, "sharding_strategy": strategy, **more}
    return {"fsdp": "auto_wrap", "fsdp_config": settings}


def assert_continues(found: dict[str, Any], whole: dict[str, Any], start: int, tolerance: float) -> None:
    """The next ten losses equal those of the uninterrupted run."""
    steps = range(start + 1, min(start + 10, NUM_STEPS) + 1)
    for step in steps:
        assert found["losses"][step] == pytest.approx(whole["losses"][step], rel=tolerance), step


@pytest.fixture(scope="session")
def whole(two_ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The uninterrupted run, on two ranks."""
    folder = tmp_path_factory.mktemp("whole")
    return two_ranks.run(train, str(folder), until=NUM_STEPS, **config(2, "SHARDED"))[0]


SAME_WORLD: list[Any] = [
    ((2, "SHARDED", "full_shard"), (2, "SHARDED", "full_shard"), EXACT),
    ((1, "SHARDED", "full_shard"), (2, "FULL", "full_shard"), REORDERED),
    ((1, "FULL", "shard_grad_op"), (1, "LOCAL", "no_shard"), REORDERED),
    *(
        slow(*case)
        for case in [
            ((2, "SHARDED", "full_shard"), (1, "SHARDED", "full_shard"), REORDERED),
            ((2, "FULL", "full_shard"), (2, "LOCAL", "shard_grad_op"), EXACT),
            ((2, "LOCAL", "no_shard"), (1, "SHARDED", "full_shard"), REORDERED),
            ((1, "LOCAL", "full_shard"), (2, "SHARDED", "no_shard"), REORDERED),
        ]
    ),
]


@pytest.mark.parametrize(("before", "after", "tolerance"), SAME_WORLD, ids=str)
def test_resume_with_other_version_strategy_or_type(
    two_ranks: Ranks, tmp_path: Path, whole: dict[str, Any], before: Any, after: Any, tolerance: float
) -> None:
    two_ranks.run(train, str(tmp_path), until=4, **config(*before))
    resumed = two_ranks.run(train, str(tmp_path), until=NUM_STEPS, resume=True, **config(*after))[0]
    assert min(resumed["losses"]) <= 5 and resumed["step"] == NUM_STEPS
    assert_continues(resumed, whole, 4, tolerance)


WORLDS: list[Any] = [(2, "SHARDED", False)]

WORLDS += [
    slow(version, kind, asynchronous)
    for version, kind, asynchronous in itertools.product((1, 2), ("SHARDED", "FULL", "LOCAL"), (False, True))
    if (version, kind, asynchronous) not in WORLDS
]


@pytest.mark.parametrize(("version", "kind", "asynchronous"), WORLDS)
def test_resume_in_worlds_of_two_four_one_and_three(
    one_rank: Ranks,
    two_ranks: Ranks,
    three_ranks: Ranks,
    four_ranks: Ranks,
    tmp_path: Path,
    whole: dict[str, Any],
    version: int,
    kind: str,
    asynchronous: bool,
) -> None:
    settings = config(version, kind, async_save=asynchronous)
    steps = (2, 3, 4, NUM_STEPS)
    for number, (world, until) in enumerate(zip((two_ranks, four_ranks, one_rank, three_ranks), steps, strict=True)):
        run = world.run(train, str(tmp_path), until=until, resume=number > 0, **settings)[0]
        assert run["step"] == until
    assert_continues(run, whole, 4, REORDERED)


@pytest.mark.slow
@pytest.mark.parametrize("version", [1, 2])
def test_resume_with_other_meshes(four_ranks: Ranks, tmp_path: Path, whole: dict[str, Any], version: int) -> None:
    for until, strategy, resume in [
        (2, "full_shard", False), (3, "hybrid_shard", True), (4, "no_shard", True),
        (5, "hybrid_shard_zero2", True), (NUM_STEPS, "full_shard", True),
    ]:  # fmt: skip
        mesh = {"dp_shard_size": 2} if "hybrid" in strategy else {}
        settings = config(version, "SHARDED", strategy, **mesh)
        run = four_ranks.run(train, str(tmp_path), until=until, resume=resume, **settings)[0]
    assert_continues(run, whole, 5, REORDERED)


@contextlib.contextmanager
def restarted(run_id: str, num_restarts: int) -> Iterator[list[str]]:
    """Be a rank of a run that has been restarted. Gives the messages of this rank."""
    failures = tuple(FailedAttempt(failure="rank 1: killed by SIGKILL", began=0, steps=6) for _ in range(num_restarts))
    current_run().restarts, current_run().num_trainings = Restarts(run_id=run_id, max_restarts=3, failures=failures), 0
    printed: list[str] = []
    printer().listener = lambda message: printed.append(str(message))
    try:
        yield printed
    finally:
        printer().listener = None
        current_run().restarts, current_run().num_trainings, current_run().first_samples_per_step = Restarts(), 0, None
        record().resume_at(0)


def train_in_run(output_dir: str, run_id: str, num_restarts: int, **arguments: Any) -> dict[str, Any]:
    """Train as in a run of the launcher that has been restarted."""
    with restarted(run_id, num_restarts):
        return train(output_dir, **arguments)


@pytest.mark.parametrize("version", [slow(1), 2])
def test_restarted_run_resumes_from_its_own_checkpoint(
    two_ranks: Ranks, tmp_path: Path, whole: dict[str, Any], version: int
) -> None:
    settings = config(version, "SHARDED")
    two_ranks.run(train_in_run, str(tmp_path), "other", 0, until=8, **settings)
    begun = two_ranks.run(train_in_run, str(tmp_path), "mine", 0, until=4, **settings)[0]
    assert begun["start"] == 0, "at the first start the script does not resume"
    resumed = two_ranks.run(train_in_run, str(tmp_path), "mine", 1, until=NUM_STEPS, **settings)[0]
    assert resumed["start"] == 4, "checkpoint-8 is of another run"
    assert_continues(resumed, whole, 4, EXACT if version == 2 else REORDERED)
    again = two_ranks.run(train_in_run, str(tmp_path / "none"), "mine", 1, until=4, **settings)[0]
    assert again["start"] == 0, "without a checkpoint it begins as at the first start"


def in_changing_worlds(four_ranks: Ranks, two_ranks: Ranks, folder: Path, case: Any, stops: Any) -> list[Any]:
    """Run a case on 4, 2 and 4 ranks, each time until the next of the steps."""
    worlds = zip((four_ranks, two_ranks, four_ranks), stops, strict=True)
    return [case(world, str(folder), number, until) for number, (world, until) in enumerate(worlds)]


@pytest.mark.parametrize("version", [slow(1), 2])
def test_restart_with_fewer_ranks_keeps_samples_per_step(
    two_ranks: Ranks, four_ranks: Ranks, tmp_path: Path, version: int
) -> None:
    """Epochs have two steps: the first restart is in the middle of one, the second between two."""
    arguments = {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 2, **config(version, "SHARDED")}
    arguments |= {"max_steps": -1, "num_train_epochs": 7}

    def case(world: Ranks, folder: str, number: int, until: int) -> dict[str, Any]:
        return world.run(train_in_run, folder, "mine", number, until=until, **arguments)[0]

    whole = case(four_ranks, str(tmp_path / "whole"), 0, NUM_STEPS)
    runs = in_changing_worlds(four_ranks, two_ranks, tmp_path / "run", case, (3, 6, NUM_STEPS))
    assert [(run["accumulation"], run["samples"], run["start"]) for run in runs] == [(2, 24, 0), (4, 24, 3), (2, 24, 6)]
    assert (runs[-1]["step"], runs[-1]["epoch"]) == (whole["step"], whole["epoch"]) == (14, 7.0)
    for step in range(1, NUM_STEPS + 1):
        run = next(run for run in runs if step in run["losses"])
        assert run["losses"][step] == pytest.approx(whole["losses"][step], rel=REORDERED), step
        assert run["rates"][step] == pytest.approx(whole["rates"][step], rel=EXACT), step


def _loop(folder: Path, until: int, length: str, accumulation: int, version: int, uses_accumulate: bool = True) -> Any:
    torch.manual_seed(0)
    accelerator = hfp.accelerator(
        hfp.load_spec(fsdp="auto_wrap", fsdp_config={"fsdp_version": version}),
        gradient_accumulation_steps=accumulation,
    )
    model = MODELS["llama"]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(Batches(6), batch_size=1)
    num_steps = NUM_STEPS * (4 if length == "batches" else dist.get_world_size())
    if length == "torch":
        scheduler: Any = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num_steps)
    else:
        scheduler = get_scheduler("cosine", optimizer, num_steps // 7, num_steps)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    step, losses, rates = 0, {}, {}
    if (checkpoint := hfp.newest_checkpoint(folder, this_run=True)) is not None:
        accelerator.load_state(checkpoint)
        step = int(checkpoint.name.removeprefix("step-"))
    num_micro = accelerator.gradient_accumulation_steps
    steps_per_epoch = len(loader) // num_micro
    while step < until:
        done = step % steps_per_epoch * num_micro
        micro_losses = []
        for batch in accelerator.skip_first_batches(loader, done) if done else loader:
            with accelerator.accumulate(model) if uses_accumulate else contextlib.nullcontext():
                loss = model(**batch).loss
                micro_losses.append(loss.detach())
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if not accelerator.sync_gradients:
                continue
            step += 1
            losses[step] = accelerator.reduce(torch.stack(micro_losses).mean(), reduction="mean").item()
            rates[step] = scheduler.get_last_lr()[0]
            micro_losses.clear()
            if step == until:
                break
    accelerator.save_state(folder / f"step-{step}")
    samples = hfp.report(accelerator).effective_batch_size
    return {"losses": losses, "rates": rates, "accumulation": num_micro, "samples": samples}


def train_loop(folder: str, num_restarts: int, until: int, length: str, accumulation: int, **loop: Any) -> Any:
    """Train in an Accelerate loop with ``accumulate`` to step ``until`` of ``NUM_STEPS``, and save there.

    Args:
        length: how the script computes the length of the schedule: from the ``ranks``, the ``batches`` of all ranks, or
            as ``T_max`` of a scheduler of torch.
    """
    with restarted("loop", num_restarts) as printed:
        return {**_loop(Path(folder), until, length, accumulation, **loop), "printed": printed}


@pytest.mark.parametrize(
    ("length", "accumulation", "version"),
    [("ranks", 1, 2), slow("batches", 2, 2), ("torch", 1, 2), slow("ranks", 1, 1), slow("batches", 2, 1)],
)
def test_loop_with_fewer_ranks_keeps_samples_and_schedule(
    two_ranks: Ranks, four_ranks: Ranks, tmp_path: Path, length: str, accumulation: int, version: int
) -> None:
    def case(world: Ranks, folder: str, number: int, until: int) -> dict[str, Any]:
        return world.run(train_loop, folder, number, until, length, accumulation, version=version)[0]

    whole = case(four_ranks, str(tmp_path / "whole"), 0, NUM_STEPS)
    runs = in_changing_worlds(four_ranks, two_ranks, tmp_path / "run", case, (5, 7, NUM_STEPS))
    samples = 4 * accumulation
    assert [(run["accumulation"], run["samples"]) for run in runs] == [
        (accumulation, samples), (2 * accumulation, samples), (accumulation, samples)
    ]  # fmt: skip
    assert not [line for run in runs for line in run["printed"] if "W434" in line]
    losses = {step: loss for run in runs for step, loss in run["losses"].items()}
    rates = {step: rate for run in runs for step, rate in run["rates"].items()}
    assert losses == pytest.approx(whole["losses"], rel=REORDERED)
    assert rates == pytest.approx(whole["rates"], rel=EXACT, abs=1e-12)
    assert len(losses) == NUM_STEPS


def test_samples_per_step_that_cannot_be_kept_are_reported(
    two_ranks: Ranks, three_ranks: Ranks, four_ranks: Ranks, tmp_path: Path
) -> None:
    """Three ranks cannot have 8 samples per step, and a loop without ``accumulate`` makes a step after each batch."""
    runs = [
        world.run(train_loop, str(tmp_path / "three"), number, number + 1, "batches", 2, version=2)[0]
        for number, world in enumerate((four_ranks, three_ranks, four_ranks))
    ]
    assert [(run["accumulation"], run["samples"]) for run in runs] == [(2, 8), (3, 9), (2, 8)]
    assert [any("FSDP-W434" in line for line in run["printed"]) for run in runs] == [False, True, True]
    assert [runs[step - 1]["rates"][step] for step in (1, 2)] == pytest.approx([5e-4, 1e-3]), "8 steps of warm-up"
    runs = [
        world.run(train_loop, str(tmp_path / "two"), number, number + 1, "ranks", 1, version=2, uses_accumulate=False)[
            0
        ]
        for number, world in enumerate((four_ranks, two_ranks))
    ]
    assert [(run["accumulation"], run["samples"]) for run in runs] == [(1, 4), (1, 2)]
    assert [any("FSDP-W434" in line for line in run["printed"]) for run in runs] == [False, True]
    assert runs[1]["rates"][2] == pytest.approx(runs[0]["rates"][1] * 2), "the third part of the warm-up, twice"


LOST = {
    "a model only": ((), (True, False), True, ("FSDP-E424", "optimizer state, learning rate schedule, random state")),
    "no optimizer": (("optimizer_0",), (False, False), False, ("FSDP-E424", "has no optimizer state,")),
    "no schedule": (("scheduler.pt",), (False, True), False, ("FSDP-E424", "has no learning rate schedule,")),
    "no random state": (("rng_state*",), (False, False), False, ("FSDP-E424", "has no random state,")),
}


def _resumed(trainer: Any, checkpoint: str | bool) -> dict[str, Any]:
    """Resume. Returns losses, messages and the error."""
    printed: list[str] = []
    printer().listener, error = lambda message: printed.append(str(message)), ""
    try:
        trainer.train(resume_from_checkpoint=checkpoint)
    except CheckpointError as refusal:
        error = str(refusal)
    finally:
        printer().listener = None
    losses = {entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry}
    return {"losses": losses, "printed": "\n".join(printed), "error": error}


def resume_without(
    output_dir: str, lost: tuple[str, ...], only_model: tuple[bool, bool], *, manifest: bool = True, **arguments: Any
) -> dict[str, Any]:
    """Train to step 2, remove files of its checkpoint, and resume. Returns losses, messages and the error."""
    first, second = ({"save_only_model": each, "save_strategy": "steps", "save_steps": 2} for each in only_model)
    make_trainer(output_dir, max_steps=2, **first, **arguments).train()
    checkpoint = Path(output_dir) / "checkpoint-2"
    if dist.get_rank() == 0:
        for path in [path for pattern in lost for path in checkpoint.glob(pattern)]:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        if not manifest:
            (checkpoint / "fsdp_manifest.json").unlink()
    dist.barrier()
    return _resumed(make_trainer(output_dir, max_steps=3, **second, **arguments), str(checkpoint))


@pytest.mark.parametrize("version", [slow(1), 2])
@pytest.mark.parametrize("case", LOST)
def test_trainer_refuses_checkpoint_without_state(two_ranks: Ranks, tmp_path: Path, version: int, case: str) -> None:
    lost, only_model, manifest, texts = LOST[case]
    arguments = config(version, "SHARDED")
    for found in two_ranks.run(resume_without, str(tmp_path), lost, only_model, manifest=manifest, **arguments):
        assert all(text in found["error"] for text in texts)
        assert not found["losses"]


@pytest.mark.parametrize("version", [1, slow(2)])
def test_run_of_models_only_resumes_with_warning(two_ranks: Ranks, tmp_path: Path, version: int) -> None:
    found = two_ranks.run(resume_without, str(tmp_path), (), (True, True), **config(version, "SHARDED"))[0]
    assert found["error"] == "" and "FSDP-W408" in found["printed"] and 3 in found["losses"]


def test_lost_random_state_of_a_rank_is_a_warning(two_ranks: Ranks, tmp_path: Path) -> None:
    arguments = {"manifest": False, **config(2, "SHARDED")}
    found = two_ranks.run(resume_without, str(tmp_path), ("rng_state_1.pth",), (False, False), **arguments)[0]
    assert found["error"] == "" and "FSDP-W433" in found["printed"] and "random state of 1 rank," in found["printed"]
    found = two_ranks.run(resume_without, str(tmp_path / "all"), (), (False, False), **arguments)[0]
    assert found["error"] == "" and "FSDP-W" not in found["printed"] and 3 in found["losses"]


def resume_from_unsharded(output_dir: str, **arguments: Any) -> dict[str, Any]:
    """Train to step 3 without FSDP, and resume with it."""
    saving = {"save_strategy": "steps", "save_steps": 3}
    make_trainer(output_dir, **saving).train()
    found = _resumed(make_trainer(output_dir, **arguments), f"{output_dir}/checkpoint-3")
    whole = make_trainer(f"{output_dir}/whole", **arguments)
    whole.train()
    files = sorted(path.name for path in Path(output_dir, "checkpoint-3").iterdir())
    return found | {"whole": [entry["loss"] for entry in whole.state.log_history if "loss" in entry], "files": files}


@pytest.mark.parametrize("version", [1, 2])
def test_optimizer_of_run_without_fsdp_is_read(two_ranks: Ranks, tmp_path: Path, version: int) -> None:
    found = two_ranks.run(resume_from_unsharded, str(tmp_path), **config(version, "SHARDED"))[0]
    assert "optimizer.pt" in found["files"] and found["error"] == "" and "FSDP-W" not in found["printed"]
    resumed = [found["losses"][step] for step in range(1, 7)]
    assert resumed == pytest.approx(found["whole"], rel=REORDERED)


OWN_FILES = {"notes.txt", "optimizer_0", "rng_state_0.pth", "rng_state_1.pth", "scheduler.pt", "trainer_state.json"}


def own_checkpoints(output_dir: str, kind: str = "OwnCheckpoints", **arguments: Any) -> dict[str, Any]:
    """Train to step 4 with checkpoints that the class writes, resume to step 6, and fail in the save of step 6."""
    cls = {"OwnCheckpoints": OwnCheckpoints, "SometimesOwn": SometimesOwn}[kind]
    arguments["lr_scheduler_type"] = "constant"

    def trainer(max_steps: int) -> Any:
        made = make_trainer(output_dir, max_steps=max_steps, save_strategy="steps", save_steps=2, **arguments)
        made.__class__ = cls
        return made

    printed: list[str] = []
    printer().listener = lambda message: printed.append(str(message))
    try:
        trainer(4).train()
    finally:
        printer().listener = None
    dist.barrier()
    found = sorted(Path(output_dir).glob("checkpoint-*"))
    problems = {path.name: [str(each) for each in verify(path).problems] for path in found}
    resumed, failure = trainer(6), ""
    resumed.fails = True
    try:
        resumed.train(resume_from_checkpoint=True)
    except Exception as error:
        failure = str(error)
    losses = {entry["step"]: entry["loss"] for entry in resumed.state.log_history if "loss" in entry}
    whole = make_trainer(f"{output_dir}/whole", **arguments)
    whole.train()
    dist.barrier()
    return {
        "losses": losses, "failure": failure, "printed": "\n".join(printed), "problems": problems,
        "left": sorted(os.listdir(output_dir)),
        "whole": {entry["step"]: entry["loss"] for entry in whole.state.log_history if "loss" in entry},
        "files": sorted(os.listdir(Path(output_dir, "checkpoint-4"))),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("version", "kind", "asynchronous"), [(1, "FULL", False), (2, "SHARDED", True), slow(2, "SHARDED", False)]
)
def test_checkpoint_method_of_a_class_is_atomic(
    two_ranks: Ranks, tmp_path: Path, version: int, kind: str, asynchronous: bool
) -> None:
    """The method does not call that of Transformers, and computes its paths itself."""
    arguments = config(version, kind, async_save=asynchronous)
    found = two_ranks.run(own_checkpoints, str(tmp_path), **arguments)[0]
    assert set(found["problems"]) == {"checkpoint-2", "checkpoint-4"} and not any(found["problems"].values())
    assert set(found["files"]) >= OWN_FILES
    assert "no space in my store" in found["failure"] and found["losses"][5] == pytest.approx(found["whole"][5])
    assert [name for name in found["left"] if "checkpoint" in name] == ["checkpoint-2", "checkpoint-4"]
    assert "saves.txt" in found["left"] and "FSDP-W" not in found["printed"]


def test_own_checkpoint_outside_of_a_save_has_no_manifest(two_ranks: Ranks, tmp_path: Path) -> None:
    """Such a folder can be resumed from: the manifest would list the model only."""
    found = two_ranks.run(own_checkpoints, str(tmp_path), "SometimesOwn", **config(2, "SHARDED"))[0]
    assert found["printed"].count("FSDP-W409") == 1
    assert "FSDP-N474" in str(found["problems"]["checkpoint-2"]) and not found["problems"]["checkpoint-4"]
    assert found["losses"][5] == pytest.approx(found["whole"][5])


def _position(trainer: Any) -> int:
    names = [type(each).__name__ for each in trainer.callback_handler.callbacks]
    return names.index("JITCheckpointCallback")


def preempt(output_dir: str, ranks: tuple[int, ...], **arguments: Any) -> dict[str, Any]:
    """Train with ``enable_jit_checkpoint``, and send SIGTERM to some ranks. Then train to the end."""
    before = signal.getsignal(signal.SIGTERM)
    arguments |= {"max_steps": 60, "enable_jit_checkpoint": True}
    trainer = make_trainer(output_dir, callbacks=[Preempted(ranks)], **arguments)
    trainer.callback_handler.callbacks[_position(trainer)].jit_manager.kill_wait = 0.5
    trainer.train()
    step = trainer.state.global_step
    found = [path.name for path in Path(output_dir).glob("checkpoint-*")]
    resumed = make_trainer(output_dir, callbacks=[StopAt(step + 1)], **arguments)
    resumed.train(resume_from_checkpoint=True)
    return {
        "step": step, "checkpoints": found, "problems": verify(Path(output_dir, found[0])).problems,
        "resumed": resumed.state.global_step, "is_restored": signal.getsignal(signal.SIGTERM) == before,
        "threads": [thread.name for thread in threading.enumerate() if "agreed" in thread.name],
    }  # fmt: skip


@pytest.mark.parametrize(("version", "ranks"), [(1, (0, 1)), (2, (1,)), slow(2, (0, 1))])
def test_checkpoint_at_sigterm_is_of_one_step(
    two_ranks: Ranks, tmp_path: Path, version: int, ranks: tuple[int, ...]
) -> None:
    """The signals arrive at different moments, or at one rank only. Then the run is resumed, without a signal."""
    found = two_ranks.run(preempt, str(tmp_path), ranks, **config(version, "SHARDED"))
    assert 3 < found[0]["step"] == found[1]["step"] < 60
    for each in found:
        assert each["checkpoints"] == [f"checkpoint-{each['step']}"] and each["problems"] == ()
        assert each["resumed"] == each["step"] + 1
        assert each["is_restored"] and not each["threads"]


def rotate_after_copy(output_dir: str, **arguments: Any) -> list[str]:
    """Train to step 3, give the newest checkpoints the oldest dates, and resume to step 4. Returns what is left."""
    arguments |= {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 3}
    make_trainer(output_dir, max_steps=3, **arguments).train()
    if dist.get_rank() == 0:
        for path in Path(output_dir).glob("checkpoint-*"):
            os.utime(path, (10**9 - int(path.name[-1]), 10**9 - int(path.name[-1])))
    dist.barrier()
    make_trainer(output_dir, max_steps=5, **arguments).train(resume_from_checkpoint=True)
    return sorted(path.name for path in Path(output_dir).glob("checkpoint-*"))


def test_oldest_checkpoints_are_removed_by_time_of_save(two_ranks: Ranks, tmp_path: Path) -> None:
    """The dates of the folders are those of a copy. Saves within a second are ordered by their steps."""
    left = two_ranks.run(rotate_after_copy, str(tmp_path), **config(2, "SHARDED"))[0]
    assert left == ["checkpoint-3", "checkpoint-4", "checkpoint-5"]
