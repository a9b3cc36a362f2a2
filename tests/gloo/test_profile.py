"""``hf-fsdp profile`` on real gloo ranks: totals against the wall clock, units, bytes, and a slow rank."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import hf_fsdp_plugin as hfp
from hf_fsdp_plugin.tools.plan.estimate.time import estimate_communication
from hf_fsdp_plugin.tools.plan.estimate.types import Workload
from tests.support.json_schema import assert_valid
from tests.support.launching import environment, finish, write
from tests.support.matrices import slow

PROFILE = [sys.executable, "-m", "hf_fsdp_plugin.cli.main", "profile", "--config_file", "fsdp.yaml", "--json"]
SCRIPT = """
    import os, time, torch
    from accelerate import Accelerator
    from accelerate.utils import GradientAccumulationPlugin
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=4,
        vocab_size=256,
    )
    accumulation = GradientAccumulationPlugin(num_steps=2, sync_each_batch=SYNC)
    accelerator = Accelerator(gradient_accumulation_plugin=accumulation)
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ends = []

    def record(*_):  # before the profiler's own hook, which is one of all optimizers
        ends.append(time.perf_counter())
        open(f"ends_{os.environ['RANK']}", "w").write(" ".join(map(str, ends)))

    optimizer.register_step_post_hook(record)
    model, optimizer = accelerator.prepare(model, optimizer)
    for step in range(STEPS):
        for _ in range(2):
            with accelerator.accumulate(model):
                if os.environ["RANK"] == "1" and SLOW:
                    time.sleep(SLOW)
                tokens = torch.randint(256, (2, 16))
                accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
    print("the end")
"""


def start(
    folder: Path, version: int, *flags: str, steps: int = 12, slow: float = 0.0, sync: bool = False
) -> subprocess.Popen[str]:
    write(folder, f"STEPS, SLOW, SYNC = {steps}, {slow}, {sync}\n" + SCRIPT.replace("\n    ", "\n"))
    text = (folder / "fsdp.yaml").read_text()
    text = re.sub("fsdp_version: .", f"fsdp_version: {version}", text)
    (folder / "fsdp.yaml").write_text(f"{text}  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n")
    return subprocess.Popen(
        [*PROFILE, *flags, "--cpu", "train.py"], cwd=folder, env=environment(folder), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


@pytest.fixture(scope="module", params=[slow(1), 2])
def profiled(request, tmp_path_factory) -> tuple[Path, dict[str, Any]]:
    """A profile of FSDP1 without and of FSDP2 with a reduction of the gradients after each micro-batch."""
    folder, sync = tmp_path_factory.mktemp(f"profile_{request.param}"), request.param == 2
    done = finish(start(folder, request.param, "--active", "2", "--to_end", steps=10, slow=0.4, sync=sync), timeout=300)
    assert done.returncode == 0, done.stderr
    tree = json.loads(done.stdout)
    assert_valid("profile", tree)
    assert "the end" in done.stderr and tree["problems"] == []
    return folder, tree


def test_phases_add_up_to_the_wall_clock(profiled):
    """The script has measured its steps; wait is 1, warm-up 2, active 2."""
    folder, tree = profiled
    walls = []
    for rank in (0, 1):
        ends = [float(time) for time in (folder / f"ends_{rank}").read_text().split()]
        walls.append((ends[4] - ends[2]) / 2)
    total = tree["total"]["seconds"]
    assert total == pytest.approx(sum(walls) / 2, rel=0.03)
    assert sum(phase["seconds"] for phase in tree["phases"].values()) == pytest.approx(total)
    assert tree["overhead"]["profiled_seconds"] == pytest.approx(total, rel=0.03)
    assert tree["overhead"]["unprofiled_seconds"] > 0


def test_collectives_equal_the_estimate(profiled):
    folder, tree = profiled
    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=4,
        vocab_size=256,
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    sync = "profile_2" in folder.name
    workload = Workload(micro_batch=2, seq_len=16, accumulation=2, sync_each_batch=sync, update_loop="for_loop")
    plan = hfp.resolve(hfp.load_spec(str(folder / "fsdp.yaml"), environ={}), model, world_size=2, device_type="cpu")
    estimated = estimate_communication(plan, model, workload)
    measured = tree["collectives"]
    assert sum(sums["calls"] for sums in measured.values()) == sum(call.calls for call in estimated)
    sizes = [4 * unit.num_params for unit in plan.units if unit.num_params]
    assert sorted(unit["bytes"] for unit in tree["units"]) == sorted(sizes)


def test_units_have_their_collectives(profiled):
    folder, tree = profiled
    num_reductions = 2 if "profile_2" in folder.name else 1
    units = {unit["name"]: unit for unit in tree["units"]}
    for index in range(3):
        unit = units[f"model.layers.{index}"]
        assert unit["gather_forward"]["calls"] == 2 and unit["reduce"]["calls"] == num_reductions
        assert unit["forward_seconds"] > 0 and unit["recomputed_seconds"] == 0
        assert 0 < unit["gather_forward"]["transfer"] <= unit["gather_forward"]["exposed"]


def test_rank_that_sleeps_is_the_straggler(profiled):
    _, tree = profiled
    late = {rank["rank"]: rank["late_seconds"] for rank in tree["ranks"]}
    assert late[1] > 0.7 and late[1] > late[0]  # it sleeps for 0.4 s in each of two micro-batches


def test_traces_are_written(profiled):
    folder, tree = profiled
    assert [Path(path).name for path in tree["files"]["traces"]] == ["rank_0.json.gz", "rank_1.json.gz"]
    assert not list(folder.rglob("*.part"))


@pytest.mark.slow
def test_script_of_two_steps_is_profiled_and_ends(tmp_path):
    done = finish(start(tmp_path, 2, steps=2), timeout=300)
    assert done.returncode == 0, done.stderr
    tree = json.loads(done.stdout)
    assert (tree["num_steps"], [problem["code"] for problem in tree["problems"]]) == (1, ["FSDP-W771"])


@pytest.mark.slow
def test_interrupt_in_the_middle_leaves_nothing(tmp_path):
    process = start(tmp_path, 2, "--active", "500", steps=1000, slow=0.05)
    while not (tmp_path / "ends_0").exists() or len((tmp_path / "ends_0").read_text().split()) < 5:
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    done = finish(process, timeout=120)
    assert done.returncode == 130
    assert [problem["code"] for problem in json.loads(done.stdout)["problems"]] == ["FSDP-E775"]
    assert list((tmp_path / "fsdp_profile").iterdir()) == []
