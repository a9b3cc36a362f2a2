"""The features of docs/clusters.md under launchers of others: a PyTorchJob, Ray Train, `accelerate launch` and srun."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from hf_fsdp_plugin.cli.output import HANG
from tests.support.json_schema import assert_valid
from tests.support.launching import Done, environment, finish, free_port, wait_for, write

LOOP = r"""
    import os, signal, sys, threading, time

    def train(config):
        os.chdir(config["folder"])
        import hf_fsdp_plugin as hfp
        hfp.install("fsdp.yaml")
        import torch
        from accelerate import Accelerator

        what, thread = config["what"], threading.current_thread()
        torch.manual_seed(0)
        accelerator = Accelerator(gradient_accumulation_steps=2)
        rank, world_size = accelerator.process_index, accelerator.num_processes
        model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(3)))
        loader = torch.utils.data.DataLoader([torch.ones(8)] * 1000, batch_size=4)
        model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2), loader)
        step = 0
        checkpoint = hfp.newest_checkpoint("out", this_run=True)
        if checkpoint is not None:
            accelerator.load_state(checkpoint)
            step = int(checkpoint.name.removeprefix("step_"))
        is_first = checkpoint is None
        with open(f"starts_{rank}", "a") as file:
            file.write(f"{step} {world_size} {accelerator.gradient_accumulation_steps} {thread.name}\n")
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(batch).square().mean())
                optimizer.step()
                optimizer.zero_grad()
            if not accelerator.sync_gradients:
                continue
            step += 1
            if what == "kill" and is_first and (rank, step) == (1, 5):
                os.kill(os.getpid(), signal.SIGKILL)
            if what == "fail" and step == 5:
                raise RuntimeError("the sample of step 5 is damaged")
            if what == "sleep" and (rank, step) == (1, 2):
                time.sleep(600)
            if what == "joins" and (world_size, step) == (1, 4):
                open("ready", "w").write("x")
                time.sleep(120)
            if step % 3 == 0:
                accelerator.save_state(f"out/step_{step}")
            if step == 6:
                break
        accelerator.end_training()
        if what == "threads":
            threading.Thread(target=time.sleep, args=(8,), name="uploader").start()
"""
MAIN = """
    if __name__ == "__main__":
        train({"folder": os.getcwd(), "what": sys.argv[1]})
"""
THREAD = """
    import types
    context = types.SimpleNamespace(get_experiment_name=lambda: sys.argv[2])
    sys.modules["ray.train"] = types.SimpleNamespace(get_context=lambda: context)

    def run():
        try:
            train({"folder": os.getcwd(), "what": sys.argv[1]})
        except BaseException as error:  # Ray passes it to its controller
            print(repr(error), file=sys.stderr)

    thread = threading.Thread(target=run, name="training", daemon=True)
    thread.start()
    thread.join()
"""
RAY = """
    if __name__ == "__main__":
        import ray
        from ray.train import FailureConfig, RunConfig, ScalingConfig
        from ray.train.torch import TorchConfig, TorchTrainer

        ray.init(num_cpus=2, include_dashboard=False, object_store_memory=80 * 2**20)
        trainer = TorchTrainer(
            train,
            train_loop_config={"folder": os.getcwd(), "what": sys.argv[1]},
            torch_config=TorchConfig(backend="gloo"),
            scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(
                name=sys.argv[2],
                storage_path=os.path.abspath("results"),
                failure_config=FailureConfig(max_failures=1 if sys.argv[1] == "kill" else 0),
            ),
        )
        trainer.fit()
"""
_AGENT = [sys.executable, "-m", "torch.distributed.run"]
_ACCELERATE = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", "fsdp.yaml"]


def pod(port: int, *, ranks: int = 2, **more: str) -> dict[str, str]:
    """The variables that the training operator of Kubernetes sets in a pod of an elastic PyTorchJob."""
    job = {"PET_NNODES": "1", "PET_NPROC_PER_NODE": str(ranks), "PET_RDZV_BACKEND": "c10d", "PET_RDZV_ID": "job"}
    return {**job, "PET_RDZV_ENDPOINT": f"127.0.0.1:{port}", "PET_MAX_RESTARTS": "0", "RANK": "0", **more}


def starts_of(launcher: str, what: str, restarts: int, ranks: int = 2) -> list[tuple[list[str], dict[str, str]]]:
    """The commands that start the ranks, and their variables."""
    script = ["train.py", what]
    if launcher == "accelerate launch":
        # With the static rendezvous, the ranks of a restart wait for addresses of those before.
        flags = ["--num_processes", str(ranks), "--rdzv_backend", "c10d", "--max_restarts", str(restarts)]
        own = {"PET_RDZV_ENDPOINT": "localhost:0", "ACCELERATE_USE_CPU": "true"}
        return [([*_ACCELERATE, *flags, *script], own)]
    if launcher == "hf-fsdp launch":
        command = [sys.executable, "-m", "hf_fsdp_plugin.cli.main", "launch", "--config_file", "fsdp.yaml", "--cpu"]
        return [([*command, "--num_processes", str(ranks), *script], {})]
    if launcher == "torchrun":
        return [([*_AGENT, "--standalone", "--nproc_per_node", "2", "--max_restarts", str(restarts), *script], {})]
    if launcher == "PyTorchJob":
        return [([*_AGENT, *script], pod(free_port(), PET_MAX_RESTARTS=str(restarts)))]
    own = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    if launcher == "Ray Train":
        own |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
        names, script = ("RANK", "LOCAL_RANK"), [*script, "experiment"]
    else:
        own |= {"SLURM_JOB_ID": "71", "SLURM_STEP_ID": "0", "SLURM_NTASKS": str(ranks), "SLURM_NODEID": "0"}
        own |= {"SLURM_STEP_NODELIST": "localhost", "SLURM_TASKS_PER_NODE": str(ranks)}
        names = ("SLURM_PROCID", "SLURM_LOCALID")
    return [([sys.executable, *script], {**own, **dict.fromkeys(names, str(rank))}) for rank in range(ranks)]


def start(folder: Path, command: list[str], variables: Mapping[str, str]) -> subprocess.Popen[str]:
    env = environment(folder, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1", **variables)
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=folder, env=env, stdout=pipe, stderr=pipe, text=True)


def run(folder: Path, launcher: str, what: str, *, restarts: int = 0, ranks: int = 2, **variables: str) -> list[Done]:
    """Run the loop on two ranks or more, in a thread as Ray Train does."""
    write(folder, LOOP + (THREAD if launcher == "Ray Train" else MAIN))
    commands = starts_of(launcher, what, restarts, ranks)
    started = [start(folder, command, {**own, **variables}) for command, own in commands]
    if launcher == "Ray Train" and what == "kill" and ranks == 2:  # its controller kills the other ranks
        started[1].wait(timeout=300)
        started[0].kill()
    return [finish(process, timeout=300) for process in started]


def starts(folder: Path, rank: int = 0) -> list[list[str]]:
    """The first step, the world size and the accumulation of each attempt."""
    return [line.split()[:3] for line in (folder / f"starts_{rank}").read_text().splitlines()]


def report(folder: Path) -> dict[str, Any]:
    tree: dict[str, Any] = json.loads((folder / "fsdp_report.json").read_text())
    assert_valid("report", tree)
    assert [row for row in tree["settings"] if row["status"] == "differs"] == []
    return tree


def errors(done: list[Done]) -> str:
    return "".join(each.stderr for each in done)


@pytest.mark.parametrize(
    "launcher",
    [
        pytest.param("accelerate launch", marks=pytest.mark.slow),
        pytest.param("PyTorchJob", marks=pytest.mark.slow),
        "Ray Train",
    ],
)
def test_killed_run_resumes_and_reports_lost_steps(tmp_path: Path, launcher: str) -> None:
    done = run(tmp_path, launcher, "kill", restarts=1)
    if launcher == "Ray Train":
        done = run(tmp_path, launcher, "again")
    assert {each.returncode for each in done} == {0}, errors(done)
    assert [first for first, *_ in starts(tmp_path)] == ["0", "3"]
    tree = report(tmp_path)
    assert (tree["backend"], tree["world_size"]) == ("fsdp2", 2)
    assert (tree["restarts"]["count"], tree["restarts"]["lost_steps"]) == (1, 2)


@pytest.mark.parametrize("launcher", [pytest.param("PyTorchJob", marks=pytest.mark.slow), "Ray Train"])
def test_hang_is_named(tmp_path: Path, launcher: str) -> None:
    done = run(tmp_path, launcher, "sleep", HF_FSDP_HANG_TIMEOUT="4")
    text = errors(done)
    assert re.search(r"rank 1 is late: rank 0 has waited .*time\.sleep\(600\).*after 2 optimizer steps", text), text
    assert text.count("hf-fsdp: hang:") == 1 and "FSDP-E728" in text and list(tmp_path.glob("fsdp_hang_*.json"))
    if launcher == "PyTorchJob":
        assert "FSDP-E728" in text.partition("Root Cause")[2] and f"exitcode  : {HANG}" in text, text
    else:
        assert {each.returncode for each in done} == {HANG}, text


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["accelerate launch", "PyTorchJob", "srun"])
def test_failure_is_recorded_with_its_place(tmp_path: Path, launcher: str) -> None:
    done = run(tmp_path, launcher, "fail")
    assert all(each.returncode for each in done)
    if launcher == "srun":
        (folder,) = tmp_path.glob("hf_fsdp_*/*/0-*")
        failures = [json.loads(path.read_text()) for path in folder.glob("rank_*.json")]
        assert any(each["message"].endswith("step 5 is damaged") and each["frames"] for each in failures), failures
        return
    cause = done[0].stderr.partition("Root Cause")[2]
    assert "the sample of step 5 is damaged" in cause and re.search(r"train\.py:\d+, in train", cause), errors(done)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torchrun", "accelerate launch", "PyTorchJob", "srun"])
def test_lost_connection_names_the_rank_that_ended(tmp_path: Path, launcher: str) -> None:
    text = errors(run(tmp_path, launcher, "kill"))
    assert re.search(r"rank 1 exited without an exception .* after 5 optimizer steps.*FSDP-E734", text), text


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["accelerate launch", "PyTorchJob", "srun"])
def test_threads_after_the_script_are_named(tmp_path: Path, launcher: str) -> None:
    done = run(tmp_path, launcher, "threads", HF_FSDP_EXIT_TIMEOUT="7")
    assert "FSDP-W741" in errors(done) and "uploader" in errors(done), errors(done)
    assert report(tmp_path)["world_size"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torchrun", "PyTorchJob"])
def test_machine_joins_and_samples_stay_the_same(tmp_path: Path, launcher: str) -> None:
    write(tmp_path, LOOP + MAIN)
    port = free_port()
    flags: list[str] = []
    variables = pod(port, ranks=1, PET_NNODES="1:2", PET_MAX_RESTARTS="1")
    command = [*_AGENT]
    if launcher == "torchrun":
        flags = ["--nnodes", "1:2", "--nproc_per_node", "1", "--rdzv_backend", "c10d", "--max_restarts", "1"]
        flags += ["--rdzv_endpoint", variables["PET_RDZV_ENDPOINT"]]
        variables = {}
    agents = [start(tmp_path, [*command, *flags, "train.py", "joins"], variables)]
    wait_for(tmp_path / "ready", seconds=200)
    agents.append(start(tmp_path, [*command, *flags, "train.py", "joins"], variables))
    done = [finish(agent, timeout=300) for agent in agents]
    assert [each.returncode for each in done] == [0, 0], errors(done)
    assert starts(tmp_path) == [["0", "1", "2"], ["3", "2", "1"]], errors(done)


@pytest.mark.slow
def test_hf_fsdp_launch_reads_the_variables_of_a_pod(tmp_path: Path) -> None:
    """Two launchers with one rank each; the id of the job names the run."""
    write(tmp_path, LOOP + MAIN)
    static = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_MASTER_ADDR": "127.0.0.1", "PET_RDZV_ID": "job"}
    static["PET_MASTER_PORT"] = str(free_port())
    command = [sys.executable, "-m", "hf_fsdp_plugin.cli.main", "launch", "--config_file", "fsdp.yaml", "--cpu"]
    pods = [start(tmp_path, [*command, "train.py", "no"], {**static, "PET_NODE_RANK": rank}) for rank in "01"]
    done = [finish(each, timeout=300) for each in pods]
    assert [each.returncode for each in done] == [0, 0], errors(done)
    assert "rendezvous: 2 machines, 2 ranks, machine 1 runs rank 1" in done[1].stderr
    assert starts(tmp_path, 1) == [["0", "2", "2"]] and report(tmp_path)["world_size"] == 2
    (manifest, *_) = [json.loads(path.read_text()) for path in (tmp_path / "out" / "step_6").glob("*manifest*.json")]
    assert manifest["run"]["id"] == "job"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "ranks"), [("hf-fsdp launch", 4), ("accelerate launch", 4), ("srun", 4), ("Ray Train", 1)]
)
def test_start_on_other_ranks_keeps_samples_per_step(tmp_path: Path, launcher: str, ranks: int) -> None:
    is_named = launcher in ("hf-fsdp launch", "accelerate launch")
    run(tmp_path, launcher, "kill", HF_FSDP_RUN_ID="mine" if is_named else "")
    # With srun, script and arguments are a part of the id.
    more = {"HF_FSDP_RUN_ID": "mine"} if is_named else {"SLURM_RESTART_COUNT": "1"}
    done = run(tmp_path, launcher, "kill", ranks=ranks, **more)
    assert {each.returncode for each in done} == {0}, errors(done)
    assert starts(tmp_path) == [["0", "2", "2"], ["3", str(ranks), str(4 // ranks)]]


@pytest.mark.slow
@pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")
@pytest.mark.parametrize("what", ["kill", "sleep"])
def test_job_of_ray_train(tmp_path: Path, what: str) -> None:
    """With Ray itself, whose start takes a minute; the tests above imitate it."""
    write(tmp_path, LOOP + RAY)
    short = {"TMPDIR": "/tmp", "HF_FSDP_HANG_TIMEOUT": "5" if what == "sleep" else "60"}
    process = start(tmp_path, [sys.executable, "train.py", what, f"ray_{os.getpid()}_{what}"], short)
    out, err = process.communicate(timeout=590)
    if what == "sleep":
        assert process.returncode == 1 and "FSDP-E728" in err + out and "time.sleep(600)" in err + out, err
        return
    assert process.returncode == 0, err
    assert [first for first, *_ in starts(tmp_path)] == ["0", "3"]
    assert report(tmp_path)["restarts"]["lost_steps"] == 2
    names = [line.split()[3] for line in (tmp_path / "starts_0").read_text().splitlines()]
    assert "MainThread" not in names
