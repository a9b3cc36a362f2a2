"""``ProfilerCallback`` in Trainers on two ranks: results, resumed and short runs, full disks, and failures."""

from __future__ import annotations

import contextlib
import io
import resource
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from transformers.trainer_callback import TrainerCallback

import hf_fsdp_plugin as hfp
from hf_fsdp_plugin.backends.optimizers.parameters import after_each_step
from hf_fsdp_plugin.tools.profile.files import read_ranks
from hf_fsdp_plugin.tools.profile.run import Profiling, marks, profiling
from hf_fsdp_plugin.tools.profile.run_profile import merge_ranks
from tests.support.matrices import slow
from tests.support.ranks import Ranks
from tests.support.trainer_runs import losses, make_trainer

SHORT: dict[str, Any] = {"wait": 1, "warmup": 1, "active": 1, "after": 1}
"""Step 3 is analyzed, and step 4 is the last one."""


class _StepEnds(TrainerCallback):
    def __init__(self) -> None:
        self.times: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.times.append(time.perf_counter())


class _Block(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Let rank 1 not write its file of the profile beside the output folder."""
        blocked = Path(args.output_dir).parent / "profile" / "ranks" / "rank_1.json.part"
        blocked.mkdir(parents=True, exist_ok=True)


class _Fail(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2:
            raise ZeroDivisionError


@contextlib.contextmanager
def _full_disk(num_bytes: int | None) -> Any:
    """Limit the size of files while a profile is written. The store of the process group may write larger ones."""
    write = Profiling._write

    def limited(self: Profiling, *arguments: Any) -> None:
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes or before[0], before[1]))
        try:
            write(self, *arguments)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    with patch.object(Profiling, "_write", limited):
        yield


def _files(folder: Path) -> dict[str, Any]:
    ranks = read_ranks(folder)
    profiled = [rank for rank in ranks if rank.num_steps]
    run = merge_ranks(profiled) if profiled else {"total": {"seconds": None}, "phases": {}, "units": []}
    return {
        "files": sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()),
        "num_steps": max((rank.num_made for rank in ranks), default=0),
        "seconds": run["total"]["seconds"],
        "phases": sorted(run["phases"]),
        "units": {unit["name"]: (unit["gather_forward"]["calls"], unit["reduce"]["calls"]) for unit in run["units"]},
        "facts": dict(profiled[0].facts) if profiled else {},
    }


def profile(folder: str, *, num_bytes: int | None = None, short: dict[str, Any], **arguments: Any) -> dict[str, Any]:
    """Train with a callback, and return its files, what was printed, and two times around the end of each step.

    Args:
        num_bytes: largest size of a file that this process can write while it writes the trace, as on a full disk.
        short: steps of the profile.
    """
    before: list[float] = []
    after = _StepEnds()
    # Called before the function of the profiler, which is added later; the callback is called after both.
    end = after_each_step(lambda *_: before.append(time.perf_counter()))
    callbacks = [hfp.ProfilerCallback(f"{folder}/profile", **short), after, *arguments.pop("callbacks", ())]
    resume = arguments.pop("resume_from_checkpoint", None)
    trainer = make_trainer(f"{folder}/out", callbacks=callbacks, **arguments)
    with contextlib.redirect_stderr(io.StringIO()) as printed, _full_disk(num_bytes):
        trainer.train(resume_from_checkpoint=resume)
    end()
    torch.distributed.barrier()
    ends = {"before": before, "after": after.times}
    return {"printed": printed.getvalue(), "ends": ends, "losses": losses(trainer), **_files(Path(folder) / "profile")}


COMPLETE = ["profile.json", "ranks/rank_0.json", "ranks/rank_1.json", "traces/rank_0.json.gz", "traces/rank_1.json.gz"]


def settings(version: int) -> dict[str, Any]:
    return {"fsdp": "full_shard auto_wrap", "fsdp_config": {"version": version}}


def profile_parts(folder: str, **arguments: Any) -> dict[str, Any]:
    """Train and save with a profile, resume with one, and train fewer steps than a profile needs."""
    arguments["max_steps"] = 10
    whole = profile(folder, short=SHORT, **arguments, save_strategy="steps", save_steps=5)
    resumed = profile(folder, short=SHORT, **arguments, resume_from_checkpoint=f"{folder}/out/checkpoint-5")
    fewer = profile(folder, short=SHORT, **{**arguments, "max_steps": 2})
    none = profile(folder, short=SHORT, **{**arguments, "max_steps": 1})
    return {"whole": whole, "resumed": resumed, "fewer": fewer, "none": none}


@pytest.mark.parametrize("version", [slow(1), 2])
def test_profile_of_whole_resumed_and_short_runs(two_ranks: Ranks, tmp_path: Path, version: int) -> None:
    ranks = two_ranks.run(profile_parts, str(tmp_path), **settings(version))
    whole, resumed, fewer, none = (ranks[0][name] for name in ("whole", "resumed", "fewer", "none"))
    for run, each in (("whole", whole), ("resumed", resumed)):
        assert each["files"] == COMPLETE, each["printed"]
        # The profile's step ends inside both intervals, however late the machine lets a rank continue.
        ends = [rank[run]["ends"] for rank in ranks]
        shortest = sum(end["before"][2] - end["after"][1] for end in ends) / 2
        longest = sum(end["after"][2] - end["before"][1] for end in ends) / 2
        assert shortest < each["seconds"] < longest
        assert {"forward", "backward", "optimizer", "clipping"} <= set(each["phases"])
        layers = [calls for name, calls in each["units"].items() if "layers" in name]
        assert len(layers) == 3 and set(layers) == {(1, 1)}
        assert each["facts"]["plan"]["backend"] == f"fsdp{version}"
    assert f"profile: {tmp_path}/profile/profile.json" in whole["printed"]  # printed once for a folder
    assert (len(whole["losses"]), whole["num_steps"], resumed["num_steps"]) == (10, 4, 4)
    assert resumed["losses"] == whole["losses"]
    assert fewer["files"] == COMPLETE and fewer["num_steps"] == 2 and "[FSDP-W771]" in fewer["printed"]
    assert "no profile" in none["printed"] and "[FSDP-E770]" in none["printed"]
    assert "profile.json" not in none["files"]


def profile_with_failures(folder: str, **arguments: Any) -> dict[str, Any]:
    """Profile on a full disk, into a folder that rank 1 cannot write, and after a training that has failed."""
    arguments["max_steps"] = 6
    rank = torch.distributed.get_rank()
    plain = make_trainer(f"{folder}/plain", **arguments)
    plain.train()
    full = profile(f"{folder}/full", num_bytes=200_000, short=SHORT, **arguments)
    one = profile(f"{folder}/blocked", short=SHORT, callbacks=[_Block()], **arguments)
    with contextlib.suppress(ZeroDivisionError):
        failing = make_trainer(
            f"{folder}/out", callbacks=[hfp.ProfilerCallback(f"{folder}/again"), _Fail()], **arguments
        )
        failing.train()
    was_active = profiling().active
    after = profile(f"{folder}/after", short=SHORT, **arguments)
    return {
        "plain": losses(plain), "full": full, "one": one, "was_active": was_active, "after": after, "rank": rank,
        "failed": [rank.rank for rank in read_ranks(Path(folder) / "again")],
        "is_over": not (profiling().active or marks().enabled),
    }  # fmt: skip


def test_failed_profile_leaves_training_and_no_files(two_ranks: Ranks, tmp_path: Path) -> None:
    for rank in two_ranks.run(profile_with_failures, str(tmp_path), **settings(2)):
        for run in ("full", "one"):
            assert rank[run]["losses"] == rank["plain"], run
        assert rank["full"]["files"] == [] == rank["one"]["files"] == rank["failed"]
        assert rank["was_active"] and rank["is_over"]
        assert rank["after"]["files"] == COMPLETE
        if rank["rank"] == 0:
            assert "[FSDP-E772]" in rank["full"]["printed"] and "TMPDIR" in rank["full"]["printed"]
            assert "rank 1" in rank["one"]["printed"] and "[FSDP-E772]" in rank["one"]["printed"]
