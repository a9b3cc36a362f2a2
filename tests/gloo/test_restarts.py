"""Runs that are killed and restarted train as an uninterrupted one: on one machine, on two, and under any launcher."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from scripts.bench.measure.restarts import STEPS, measure
from tests.support.json_schema import assert_valid
from tests.support.launching import Done, environment, finish, free_port, is_gone, launch, run, start, wait_for, write
from tests.support.matrices import slow

LOOP = r"""
    import os, signal, sys
    import torch
    from accelerate import Accelerator
    import hf_fsdp_plugin as hfp

    if "RANK" not in os.environ:  # a task of srun
        hfp.install("fsdp.yaml")
    torch.manual_seed(0)
    accelerator = Accelerator()
    attempts = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
    rank, attempt = accelerator.process_index, sum(int(os.environ.get(name, "0")) for name in attempts)
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(3)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    step = 0
    checkpoint = hfp.newest_checkpoint("out", this_run=True)
    if checkpoint is not None:
        accelerator.load_state(checkpoint)
        step = int(checkpoint.name.removeprefix("step_"))
    while step < 8:
        generator = torch.Generator().manual_seed(100 * step + rank)
        loss = model(torch.randn(4, 8, generator=generator)).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        with open(f"losses_{rank}", "a") as file:
            file.write(f"{step} {loss.item()!r}\n")
        if sys.argv[1:] == [f"{rank} {step} {attempt}"]:
            os.kill(os.getpid(), signal.SIGKILL)
        if sys.argv[1:] == ["fail"] and step == 5:
            raise RuntimeError("the sample of step 5 is damaged")
        if step % 3 == 0:
            accelerator.save_state(f"out/step_{step}")
        waits = len(sys.argv) == 1 and os.environ["GROUP_WORLD_SIZE"] == "2" and attempt == 0
        waits |= sys.argv[1:] == ["joins"] and os.environ["GROUP_WORLD_SIZE"] == "1"
        if waits and step == 4:
            open(f"ready_{rank}", "w").write(str(os.getpid()))
            if rank == 1 or sys.argv[1:] == ["joins"]:  # otherwise it waits for the other rank in the next step
                __import__("time").sleep(120)
    accelerator.end_training()
"""


TRAINER = r"""
    import os, signal, sys
    import torch
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = torch.nn.Linear(8, 8)

        def forward(self, x, labels=None):
            return {"loss": (self.inner(x) - labels).square().mean()}

    class Kill(TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            print(f"rank {args.process_index} begins after step {state.global_step}", flush=True)

        def on_step_end(self, args, state, control, **kwargs):
            attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
            if sys.argv[1:] == [f"{args.process_index} {state.global_step} {attempt}"]:
                os.kill(os.getpid(), signal.SIGKILL)

    samples = [{"x": torch.randn(8), "labels": torch.randn(8)} for _ in range(64)]
    arguments = TrainingArguments(
        "out", max_steps=8, per_device_train_batch_size=2, save_steps=2, report_to="none", use_cpu=True, seed=3
    )
    Trainer(Model(), arguments, train_dataset=samples, callbacks=[Kill()]).train()
"""


def torchrun(folder: Path, max_restarts: int, *words: str, **env: str) -> Done:
    """Run a script with torch's launcher. Its restarts fail often if all attempts share one store."""
    flags = ["--standalone", "--nproc_per_node", "2", "--max_restarts", str(max_restarts), "-m", "hf_fsdp_plugin"]
    command = [sys.executable, "-m", "torch.distributed.run", *flags, "--config_file", "fsdp.yaml", *words]
    return run(folder, command, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1", **env)


def srun(folder: Path, *words: str, **env: str) -> list[Done]:
    """Start two tasks as srun does, and wait for them."""
    job = {"SLURM_JOB_ID": "71", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "SLURM_TASKS_PER_NODE": "2", **env}
    job |= {"SLURM_STEP_NODELIST": "localhost", "SLURM_NODEID": "0", "MASTER_PORT": str(free_port())}
    tasks = [
        subprocess.Popen(
            [sys.executable, "train.py", *words],
            cwd=folder,
            env=environment(folder, **job, SLURM_PROCID=str(rank), SLURM_LOCALID=str(rank)),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    return [finish(task, timeout=300) for task in tasks]


def losses(folder: Path, rank: int = 0) -> dict[int, float]:
    """The loss of each step; a step that was trained again has the same loss each time."""
    found: dict[int, float] = {}
    for line in (folder / f"losses_{rank}").read_text().splitlines():
        step, loss = line.split()
        assert found.setdefault(int(step), float(loss)) == float(loss), step
    return found


def report(folder: Path) -> dict:
    tree = json.loads((folder / "fsdp_report.json").read_text())
    assert_valid("report", tree)
    return tree["restarts"]


@pytest.mark.parametrize("version", [slow(1), slow(2)])
def test_killed_run_has_the_losses_of_an_uninterrupted_one(tmp_path: Path, version: int) -> None:
    runs = {}
    for name, words in {"whole": (), "killed": ("--max_restarts", "2")}.items():
        folder = tmp_path / name
        folder.mkdir()
        script = write(folder, LOOP)
        (folder / "fsdp.yaml").write_text(f"distributed_type: FSDP\nfsdp_config:\n  fsdp_version: {version}\n")
        process = start(folder, "--cpu", *words, script.name, *(["1 5 0"] if words else []))
        runs[name] = finish(process, timeout=300)
        assert runs[name].returncode == 0, runs[name].stderr
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")
    assert "restart 1 of 2: rank 1: killed by SIGKILL after step 5 of the run" in runs["killed"].stderr
    found = report(tmp_path / "killed")
    assert (found["count"], found["lost_steps"]) == (1, 2)
    assert report(tmp_path / "whole")["failures"] == []


@pytest.mark.slow
@pytest.mark.parametrize(("launcher", "version"), [("hf-fsdp", 1), ("hf-fsdp", 2), ("torchrun", 1), ("torchrun", 2)])
def test_loop_killed_at_random_has_the_same_losses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launcher: str, version: int
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # torchrun leaves a folder
    found = measure(launcher, version, "loop", 3, 7, tmp_path)
    assert (found["exit_code"], found["restarts"]) == (0, len(found["kills"])), found["log"]
    assert found["bitwise_equal"] == found["losses"] >= found["steps"] == STEPS
    # A rank can be killed between a step and its line in the log.
    assert 0 <= found["lost_steps"] - (found["losses"] - STEPS) <= len(found["kills"])


@pytest.mark.slow
def test_failure_at_the_same_step_ends_the_run(tmp_path: Path) -> None:
    write(tmp_path, LOOP)
    done = finish(start(tmp_path, "--cpu", "--max_restarts", "5", "train.py", "fail"), timeout=300)
    assert done.returncode == 1
    assert done.stderr.count("restart 1 of 5") >= 1 and "restart 2 of 5" not in done.stderr
    assert "[FSDP-E714]" in done.stderr and "two attempts have failed in the same way after step 5" in done.stderr
    assert list(losses(tmp_path)) == [1, 2, 3, 4, 5]


def test_import_error_and_signal_end_the_run(tmp_path: Path) -> None:
    write(tmp_path, "import no_such_package", name="broken.py")
    done = launch(tmp_path, "--cpu", "--num_processes", "1", "--max_restarts", "5", "broken.py")
    assert done.returncode == 1 and "restart 1 of 5" in done.stderr and "restart 2 of 5" not in done.stderr
    assert "[FSDP-E714]" in done.stderr and "ModuleNotFoundError" in done.stderr
    text = "import os, time\nopen('ready', 'w').write(str(os.getpid()))\ntime.sleep(60)"
    write(tmp_path, text)
    process = start(tmp_path, "--cpu", "--num_processes", "1", "--max_restarts", "5", "train.py")
    rank = int(wait_for(tmp_path / "ready"))
    process.send_signal(signal.SIGTERM)
    done = finish(process)
    assert done.returncode == 143 and "restart 1 of" not in done.stderr
    assert "[FSDP-E714]" in done.stderr and is_gone(rank)


@pytest.mark.slow
def test_torchrun_resumes_its_own_run_only(tmp_path: Path) -> None:
    write(tmp_path, TRAINER)
    done = torchrun(tmp_path, 1, "train.py", "1 5 0")
    assert done.returncode == 0, done.stderr
    assert re.search(r"restart 1 of 1: rank \d: ended without an error record after step 5 of the run", done.stderr)
    assert "rank 0 begins after step 4" in done.stdout and "out/checkpoint-4" in done.stderr
    tree = json.loads((tmp_path / "out" / "fsdp_report.json").read_text())["restarts"]
    assert (tree["count"], tree["max"], tree["lost_steps"]) == (1, 1, 1)
    done = torchrun(tmp_path, 1, "train.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("begins after step 0") == 2 and "restart" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("version", [1, 2])
def test_loop_under_torchrun_has_the_uninterrupted_losses(tmp_path: Path, version: int) -> None:
    for name, words in {"whole": ("never",), "killed": ("1 5 0",)}.items():
        folder = tmp_path / name
        folder.mkdir()
        write(folder, LOOP)
        (folder / "fsdp.yaml").write_text(f"distributed_type: FSDP\nfsdp_config:\n  fsdp_version: {version}\n")
        done = torchrun(folder, 2, "train.py", *words)
        assert done.returncode == 0, done.stderr
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")
    found = report(tmp_path / "killed")
    assert (found["count"], found["max"], found["lost_steps"]) == (1, 2, 2)
    assert report(tmp_path / "whole")["failures"] == []


@pytest.mark.slow
def test_requeued_job_of_srun_resumes(tmp_path: Path) -> None:
    write(tmp_path, LOOP)
    first = srun(tmp_path, "1 5 0")
    assert [each.returncode for each in first] == [1, -signal.SIGKILL], first
    other = srun(tmp_path, "1 5 0", SLURM_JOB_ID="72")  # kills itself at step 5, too
    assert list(losses(tmp_path)) == [1, 2, 3, 4, 5] and [each.returncode for each in other] == [1, -signal.SIGKILL]
    again = srun(tmp_path, "1 5 0", SLURM_RESTART_COUNT="1", SLURM_JOB_ID="72")
    assert [each.returncode for each in again] == [0, 0], again
    assert list(losses(tmp_path)) == list(range(1, 9))
    counts = [line.split()[0] for line in (tmp_path / "losses_0").read_text().splitlines()]
    assert counts == [*"12345", *"12345", *"45678"], "another job begins at the first step, the requeued one does not"
    found = report(tmp_path)
    assert (found["count"], found["max"], found["lost_steps"]) == (1, 0, 2)


def start_agent(folder: Path, port: int, *words: str) -> subprocess.Popen[str]:
    """Start torchrun as on one of one to two machines with one rank each."""
    flags = ["--nnodes", "1:2", "--nproc_per_node", "1", "--rdzv_backend", "c10d", "--rdzv_id", "none"]
    flags += ["--max_restarts", "1", "--rdzv_conf", "last_call_timeout=5", "--rdzv_endpoint", f"127.0.0.1:{port}"]
    script = ["-m", "hf_fsdp_plugin", "--config_file", "fsdp.yaml", "train.py", *words]
    command = [sys.executable, "-m", "torch.distributed.run", *flags, *script]
    env = environment(folder, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=folder, env=env, text=True, stdout=pipe, stderr=pipe)


@pytest.mark.slow
def test_torchrun_goes_on_with_fewer_machines(tmp_path: Path) -> None:
    write(tmp_path, LOOP)
    port = free_port()
    agents = [start_agent(tmp_path, port)]
    wait_for_port(port)
    agents.append(start_agent(tmp_path, port))
    pids = [int(wait_for(tmp_path / f"ready_{rank}", seconds=200)) for rank in (0, 1)]
    lost = next(number for number, agent in enumerate(agents) if pids[1] in children(agent))
    lose(agents[lost], pids[1])
    done = finish(agents[1 - lost], timeout=300)
    assert done.returncode == 0, done
    assert list(losses(tmp_path)) == list(range(1, 9))
    assert report(tmp_path)["lost_steps"] == 1 and report(tmp_path)["count"] == 1


def children(process: subprocess.Popen[str]) -> list[int]:
    return [child.pid for child in psutil.Process(process.pid).children(recursive=True)]


@pytest.mark.slow
def test_machine_that_joins_torchrun_resumes_the_run(tmp_path: Path) -> None:
    """Torch starts the ranks again with the same number of the attempt. The new machine may get rank 0."""
    write(tmp_path, LOOP)
    port = free_port()
    agents = [start_agent(tmp_path, port, "joins")]
    wait_for(tmp_path / "ready_0", seconds=200)
    agents.append(start_agent(tmp_path, port, "joins"))
    done = [finish(agent, timeout=300) for agent in agents]
    assert [each.returncode for each in done] == [0, 0], done
    counts = [line.split()[0] for line in (tmp_path / "losses_0").read_text().splitlines()]
    assert counts == [*"1234", *"45678"]
    found = report(tmp_path)
    assert (found["count"], found["lost_steps"]) == (1, 1)


@pytest.mark.slow
def test_given_run_id_resumes_whatever_starts_it(tmp_path: Path) -> None:
    write(tmp_path, LOOP)
    assert torchrun(tmp_path, 0, "train.py", "1 5 0", HF_FSDP_RUN_ID="mine").returncode == 1
    done = torchrun(tmp_path, 0, "train.py", "never", HF_FSDP_RUN_ID="mine")
    assert done.returncode == 0, done.stderr
    counts = [line.split()[0] for line in (tmp_path / "losses_0").read_text().splitlines()]
    assert counts == [*"12345", *"45678"] and report(tmp_path)["lost_steps"] == 2


def start_two_machines(folder: Path, *flags: str) -> tuple[list[subprocess.Popen[str]], list[int], list[str]]:
    """Two launchers, of which the first hosts the rendezvous, their ranks, and the words of the second one."""
    write(folder, LOOP)
    port = free_port()
    words = ["--num_machines", "2", "--main_process_ip", "127.0.0.1", "--main_process_port", str(port), "--cpu"]
    words += ["--num_processes", "2", "--max_restarts", "2", *flags]
    machines = [start(folder, *words, "--machine_rank", "0", "train.py")]
    wait_for_port(port)
    second = [*words, "--machine_rank", "1", "train.py"]
    machines.append(start(folder, *second))
    pids = [int(wait_for(folder / f"ready_{rank}", seconds=200)) for rank in (0, 1)]
    return machines, pids, second


def lose(launcher: subprocess.Popen[str], rank: int) -> None:
    """Kill a launcher and its rank, as if their machine were gone."""
    launcher.kill()
    os.kill(rank, signal.SIGKILL)
    launcher.communicate()


@pytest.mark.slow
def test_lost_machine_comes_back(tmp_path: Path) -> None:
    machines, pids, words = start_two_machines(tmp_path, "--rdzv_backend", "c10d")
    lose(machines[1], pids[1])
    assert is_gone(pids[0], seconds=200), "the rank of the other machine has lost the connection"
    machines[1] = start(tmp_path, *words)
    done: list[Done] = [finish(machine, timeout=300) for machine in machines]
    assert [each.returncode for each in done] == [0, 0], done
    assert "restart 1 of 2: rank 0: " in done[0].stderr
    assert list(losses(tmp_path)) == list(range(1, 9))
    assert report(tmp_path)["lost_steps"] == 1


@pytest.mark.slow
def test_loss_of_the_launcher_with_the_rendezvous_ends_the_run(tmp_path: Path) -> None:
    machines, pids, _ = start_two_machines(tmp_path, "--rdzv_backend", "c10d")
    lose(machines[0], pids[0])
    done = finish(machines[1], timeout=200)
    assert done.returncode == 1 and is_gone(pids[1], seconds=1)
    assert "the launcher that hosts the rendezvous is gone" in done.stderr and "[FSDP-E714]" in done.stderr


def wait_for_port(port: int) -> None:
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.2)
    raise AssertionError(f"nothing listens on port {port}")


@pytest.mark.slow
def test_machine_that_never_comes_back_ends_the_run(tmp_path: Path) -> None:
    machines, pids, _ = start_two_machines(tmp_path, "--rdzv_conf", "timeout=60")
    lose(machines[1], pids[1])
    done = finish(machines[0], timeout=200)
    assert done.returncode == 1
    assert "[FSDP-E717]" in done.stderr and "did not meet again" in done.stderr
