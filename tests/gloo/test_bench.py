"""``hf-fsdp bench`` on real ranks: measured cases, failures, signals, and the systems that are compared."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.json_schema import assert_valid
from tests.support.launching import environment, finish

BENCH = [sys.executable, "-m", "hf_fsdp_plugin.cli.main", "bench", "--cpu", "--model", "model"]
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2, "vocab_size": 256,
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(LLAMA))
    return tmp_path


def start(folder: Path, words: str) -> subprocess.Popen[str]:
    command = [*BENCH, "--seq-len", "32", "--steps", "1", "--json", *words.split()]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=folder, env=environment(folder), stdout=pipe, stderr=pipe, text=True)


def result(done: Any) -> dict[str, Any]:
    tree: dict[str, Any] = json.loads(done.stdout)
    assert_valid("bench", tree)
    return tree


def test_bench_measures_two_cases_on_real_ranks(folder):
    done = finish(start(folder, "--strategies ddp,full_shard --blocks 1 --warm-up 1"), timeout=400)
    assert done.returncode == 0, done.stderr
    ddp, sharded = result(done)["cases"]
    assert [row["status"] for row in (ddp, sharded)] == ["measured", "measured"]
    for row in (ddp, sharded):
        assert 0 < row["step_seconds"] < 10 and row["peak_bytes"] is None
        assert row["samples_per_second"] == pytest.approx(2 / row["step_seconds"])
        assert row["tokens_per_second"] == pytest.approx(32 * row["samples_per_second"])
    assert sharded["loss"] == pytest.approx(ddp["loss"], rel=1e-5)  # the same weights, batches and steps


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_systems_train_the_same_way(folder, precision):
    words = "--strategies shard_grad_op,full_shard,offload --versions 1,2 --vs stock --blocks 4"
    done = finish(start(folder, f"{words} --mixed_precision {precision}"), timeout=400)
    assert done.returncode == 0, done.stderr
    tree = result(done)
    found = tree["comparisons"]
    # Stock Accelerate cannot offload under FSDP2 on the CPU.
    assert len(found) == 5 and all(row["pairs"] == 4 and row["relative_loss_difference"] < 1e-6 for row in found)
    assert "not compared in FSDP2 offload" in tree["problems"][0]["message"]


@pytest.mark.slow
def test_hybrid_of_the_product_runs(folder):
    words = "--world-sizes 4,2 --strategies hybrid_shard --versions 1,2 --blocks 1"
    done = finish(start(folder, words), timeout=500)
    assert done.returncode == 0, done.stderr
    statuses = {(row["world_size"], row["status"]) for row in result(done)["cases"]}
    assert statuses == {(2, "left out"), (4, "measured")}


def ranks_of(process: subprocess.Popen[str]) -> list[int]:
    """Return the ids of the ranks of a benchmark."""
    found = []
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            parent = int(re.search(r"PPid:\t(\d+)", status.read_text()).group(1))  # type: ignore[union-attr]
            command = (status.parent / "cmdline").read_text()
        except OSError:
            continue
        if parent == process.pid and "bench.rank" in command:
            found.append(int(status.parent.name))
    return found


def wait_for_case(folder: Path, process: subprocess.Popen[str], name: str) -> None:
    assert process.stderr is not None
    for line in process.stderr:
        if name in line:
            return
    raise AssertionError(f"{name} did not begin")


@pytest.mark.slow
def test_killed_rank_fails_its_case_only(folder):
    process = start(folder, "--strategies ddp,full_shard --blocks 1 --steps 4000")
    wait_for_case(folder, process, "2 ranks, DDP")
    while not (ranks := ranks_of(process)):
        time.sleep(0.1)
    os.kill(ranks[0], signal.SIGKILL)
    wait_for_case(folder, process, "full_shard")
    process.send_signal(signal.SIGINT)
    done = finish(process)
    assert done.returncode == 130
    first, second = result(done)["cases"]
    assert first["status"] == "failed" and "SIGKILL" in first["reason"] and second["status"] == "pending"


@pytest.mark.slow
def test_interrupt_keeps_measured_cases(folder):
    process = start(folder, "--strategies ddp,full_shard,shard_grad_op --blocks 40")
    wait_for_case(folder, process, "shard_grad_op")
    process.send_signal(signal.SIGINT)
    done = finish(process)
    assert done.returncode == 130
    assert [len(row["seconds"]) for row in result(done)["cases"]] == [40, 40, 0]
