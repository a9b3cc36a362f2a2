"""Figures of a run in its logs and in its file, and slow ranks, on gloo ranks."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

import hf_fsdp_plugin as hfp
from hf_fsdp_plugin.hangs.calls import record
from hf_fsdp_plugin.hangs.hang_queries import watch_store
from hf_fsdp_plugin.integrations.failure_watch import watch
from hf_fsdp_plugin.integrations.run_metrics import run_metrics
from hf_fsdp_plugin.metrics.figures import WINDOW_STEPS, StragglerSearch
from hf_fsdp_plugin.metrics.rows import JobRows, newest_rows
from hf_fsdp_plugin.metrics.run_file import RUN_FILE, RunFile
from tests.support.matrices import slow
from tests.support.ranks import Ranks
from tests.support.storage_runs import messages
from tests.support.tiny import LENGTH, global_batch, parallel_config, tiny_llama
from tests.support.trainer_runs import make_trainer

FIGURES = {
    "step_seconds", "tokens_per_second", "tokens_per_second_per_rank", "tflops_per_rank", "communication_exposed",
    "data_wait", "slowest_rank", "slowest_rank_by", "memory_peak_gib", "memory_share",
}  # fmt: skip


def events_in(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / RUN_FILE).read_text().splitlines()]


def train(folder: str, **settings: Any) -> list[dict[str, Any]]:
    """The log history of a Trainer that saves a checkpoint after its third step."""
    config = {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"], **settings}
    trainer = make_trainer(
        folder, fsdp="full_shard auto_wrap", fsdp_config=config, logging_steps=2, save_strategy="steps", save_steps=3,
        eval_strategy="steps", eval_steps=3,
    )  # fmt: skip
    trainer.train()
    return trainer.state.log_history


def test_trainer_logs_figures(two_ranks: Ranks, tmp_path: Path) -> None:
    history = two_ranks.run(train, str(tmp_path), metrics=True)[0]
    logs = [each for each in history if "loss" in each]
    assert [each["step"] for each in logs] == [2, 4, 6]
    assert all(each.keys() >= FIGURES for each in logs)
    assert [each["steps_left"] for each in logs] == [4, 2, 0]
    assert not [each for each in history if "eval_loss" in each and "step_seconds" in each]
    last = logs[-1]
    assert last["tokens_per_second"] == pytest.approx(8 * LENGTH / last["step_seconds"])
    assert 0 < last["communication_exposed"] < 1
    assert 0 < last["last_save_stall_seconds"] <= last["last_save_seconds"]
    assert last["seconds_left"] == 0


def test_run_file_has_the_events_of_a_run(two_ranks: Ranks, tmp_path: Path) -> None:
    history = two_ranks.run(train, str(tmp_path))[0]
    assert not [each for each in history if "step_seconds" in each]
    events = events_in(tmp_path)
    order = "start log log save log log log save log end"
    assert [each["event"] for each in events] == order.split()
    assert events[0]["max_steps"] == 6
    assert events[0]["world_size"] == 2
    logs = [each for each in events if "loss" in each]
    assert all({*FIGURES, "epoch", "learning_rate"} <= each.keys() for each in logs)
    # 29,408 parameters of 4 bytes on two ranks, with two states of AdamW and a step count for each of 30 parameters
    kinds = {name: round(logs[-1][f"memory_{name}_gib"] * 2**30) for name in ("params", "grads", "optimizer", "other")}
    assert kinds["params"] == kinds["grads"] == 29_408 * 2 == (kinds["optimizer"] - 30 * 4) / 2
    assert kinds["other"] > 2**26  # the libraries
    assert [each["checkpoint"] for each in events if each["event"] == "save"] == ["checkpoint-3", "checkpoint-6"]
    assert events[-1]["result"] == "finished"


def test_run_without_metrics_writes_no_file(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks.run(train, str(tmp_path), metrics="none", straggler_percent=0)
    assert not (tmp_path / RUN_FILE).exists()


class Loop:
    """A training whose rank can be made slow in a phase."""

    def __init__(self, folder: str, *, version: int = 2, use_cpu: bool = True, **settings: Any) -> None:
        self.delays = dict.fromkeys(("data", "forward", "optimizer"), 0.0)
        size = torch.distributed.get_world_size()
        config = parallel_config("full_shard", version, size, use_cpu=use_cpu, **settings)
        self.accelerator = hfp.accelerator(hfp.load_spec(config, environ={}), project_dir=folder)
        model = tiny_llama(layers=1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        self.model.register_forward_pre_hook(lambda *_: time.sleep(self.delays["forward"]))
        self.optimizer.optimizer.register_step_pre_hook(lambda *_: time.sleep(self.delays["optimizer"]))
        self.loader = self.accelerator.prepare(torch.utils.data.DataLoader(self, batch_size=2))  # type: ignore[arg-type]

    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        time.sleep(self.delays["data"] / 2)
        return {key: value[0] for key, value in global_batch(0).items()}

    def steps(self, number: int) -> Iterator[float]:
        for _, batch in zip(range(number), self.loader, strict=False):
            loss = self.model(**batch).loss
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.optimizer.zero_grad()
            yield loss.item()


def train_with_slow_rank(folder: str, kind: str, rank: int, *, share: float = 0.2) -> tuple[list[str], list[float]]:
    """The warnings of this rank, and the losses."""
    loop = Loop(folder)
    if torch.distributed.get_rank() == rank:
        loop.delays[kind] = 0.06
    if run_metrics().search is not None:
        run_metrics().search = StragglerSearch(share, seconds=0.0)
    with messages() as printed:
        losses = list(loop.steps(2 + 4 * WINDOW_STEPS))
    run_metrics().end("finished")
    return printed, losses


@pytest.mark.parametrize(("kind", "rank"), [("data", 2), slow("optimizer", 0), slow("forward", 1)])
def test_slow_rank_is_reported_with_its_phase(three_ranks: Ranks, tmp_path: Path, kind: str, rank: int) -> None:
    printed = [each for each, _ in three_ranks.run(train_with_slow_rank, str(tmp_path), kind, rank)]
    assert [sum("FSDP-W521" in line for line in lines) for lines in printed] == [1, 0, 0]
    [report] = [each for each in events_in(tmp_path) if each["event"] == "straggler"]
    assert (report["rank"], report["phase"], report["machine"]) == (rank, kind, socket.gethostname())
    assert report["slower_by"] > 0.2
    assert report["text"] in "".join(printed[0])


def test_rank_within_the_set_share_is_not_reported(three_ranks: Ranks, tmp_path: Path) -> None:
    printed, _ = three_ranks.run(train_with_slow_rank, str(tmp_path), "data", 1, share=1000.0)[0]
    assert not [line for line in printed if "FSDP-W521" in line]
    assert "straggler" not in {each["event"] for each in events_in(tmp_path)}


def log_on_one_rank(folder: str) -> tuple[list[str], list[dict[str, Any]], int]:
    """The warnings, what a tracker gets, and the steps before, of a loop that logs on the main process only."""
    loop, logged, before = Loop(folder, fsdp_metrics=True), list[dict[str, Any]](), record().counts.total
    tracker = SimpleNamespace(name="list", log=lambda values, step=None: logged.append({**values, "at": step}))
    with messages() as printed:
        for number, loss in enumerate(loop.steps(6), start=1):
            if number % 3 == 0 and loop.accelerator.is_main_process:
                loop.accelerator.trackers = [tracker] if number == 3 else []
                loop.accelerator.log({"train_loss": loss, "step_seconds": -1.0}, step=number)
    watch().failed(RuntimeError("out of\nluck"))
    return printed, logged, before


def test_accelerator_log_on_one_rank_has_figures(two_ranks: Ranks, tmp_path: Path) -> None:
    (printed, logged, before), (_, others, _) = two_ranks.run(log_on_one_rank, str(tmp_path))
    assert not others
    [log] = logged
    assert log.keys() >= FIGURES
    assert (log["at"], log["step_seconds"]) == (3, -1.0)  # an entry of the script is kept
    assert sum("FSDP-N522" in line for line in printed) == 1
    events = events_in(tmp_path)  # of logs without a tracker, too
    assert [(each["event"], each.get("step")) for each in events] == [
        ("start", None),
        ("log", 3),
        ("log", 6),
        ("end", before + 6),
    ]
    assert events[-1]["result"] == "failed: RuntimeError: out of"


def train_twice(folder: str) -> tuple[list[dict[str, Any]], list[str]]:
    """The figures of two trainings with a pause between, the second of which ends the figures by an error."""
    loop, figures = Loop(folder, fsdp_metrics=True), list[Any]()
    with messages() as printed:
        for _ in range(2):
            list(loop.steps(4))
            figures.append(run_metrics().figures({}))
            run_metrics().end("finished")
            time.sleep(1.0)
        with patch.object(RunFile, "write", side_effect=ZeroDivisionError("broken")):
            list(loop.steps(2))
    assert (run_metrics().clock is None) == (torch.distributed.get_rank() == 0)  # which has the file
    return figures, printed


def test_trainings_have_their_own_figures(two_ranks: Ranks, tmp_path: Path) -> None:
    (first, second), printed = two_ranks.run(train_twice, str(tmp_path))[0]
    for figures in (first, second):
        assert figures["tokens_per_second"] == pytest.approx(2 * 2 * LENGTH / figures["step_seconds"])
        assert 0 < figures["communication_exposed"] < 1
    assert [line for line in printed if "ZeroDivisionError: broken" in line]


def count_flops(folder: str) -> tuple[float, int]:
    """FLOPs per token that were counted, and the elements of the weights of matrix products."""
    loop = Loop(folder)
    sizes = [module.weight.numel() for module in tiny_llama(layers=1).modules() if isinstance(module, torch.nn.Linear)]
    list(loop.steps(2))
    return run_metrics().flops, sum(sizes)


def test_flops_are_those_of_products_and_attention(two_ranks: Ranks, tmp_path: Path) -> None:
    counted, weights = two_ranks.run(count_flops, str(tmp_path))[0]
    attention = 4 * LENGTH * 32  # two products of LENGTH × hidden size per token, in one layer
    assert counted == pytest.approx(3 * (2 * weights + attention))


def train_on_two_machines(folder: str) -> list[str]:
    """The warnings, if two of four ranks are on another machine, and one of these is slow."""
    rank = torch.distributed.get_rank()
    with patch.object(socket, "gethostname", lambda: f"host-{rank // 2}"):
        loop, metrics = Loop(folder), run_metrics()
    loop.delays["data"] = 0.06 * (rank == 3)
    assert sorted(metrics.rows) == ([rank] if rank % 2 else [rank, rank + 1])
    if metrics.job is not None:
        metrics.job = JobRows(rank, metrics.rows, metrics.machines, watch_store, 0.2)
    if metrics.search is not None:
        metrics.search = StragglerSearch(0.2, seconds=0.0)
    with messages() as printed:
        list(loop.steps(100))
    return printed


@pytest.mark.slow
def test_slow_rank_of_another_machine_is_reported(four_ranks: Ranks, tmp_path: Path) -> None:
    printed = four_ranks.run(train_on_two_machines, str(tmp_path))
    assert ["rank 3 on host-1" in "".join(lines) for lines in printed] == [True, False, False, False]
    [start] = [each for each in events_in(tmp_path) if each["event"] == "start"]
    assert start["machines"] == ["host-0", "host-1"]


def train_on_device(folder: str, version: int) -> tuple[dict[str, float], dict[str, float], list[str]]:
    """What rank 0 and another rank, which is slow, have measured, and the warnings."""
    loop = Loop(folder, version=version, use_cpu=False)
    loop.delays["data"] = 0.1 * torch.distributed.get_rank()
    if (search := run_metrics().search) is not None:
        run_metrics().search = StragglerSearch(0.2, seconds=0.0)
    with messages() as printed:
        list(loop.steps(4 * WINDOW_STEPS))
    run_metrics().figures({})
    by_kind = run_metrics()._memory_by_kind()
    assert 0 < by_kind["memory_params_gib"] == by_kind["memory_grads_gib"] < by_kind["memory_activations_gib"]
    newest = newest_rows(run_metrics().rows)
    return (newest[0]._asdict(), newest[1]._asdict(), printed) if search is not None else ({}, {}, [])


def test_device_clock_measures_some_steps(two_accelerator_ranks: Ranks, tmp_path: Path) -> None:
    own, other, printed = two_accelerator_ranks.run(train_on_device, str(tmp_path), 2)[0]
    assert own["step"] == other["step"] == 4 * own["measured"] > 2 * WINDOW_STEPS
    assert other["data"] > 0.1 * other["measured"]
    # The collectives of the simulated device block the host, so most of a wait is outside of what the events measure.
    assert min(own["waiting"], other["waiting"]) > 0
    assert min(own["forward"], own["backward"], own["optimizer"]) > 0
    assert not [line for line in printed if "no longer observes" in line]
