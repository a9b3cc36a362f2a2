"""How runs end: children of ranks, threads that outlive the script, closed pipes, full disks, a shared port."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.support.launching import (
    LAUNCH,
    environment,
    finish,
    free_port,
    is_gone,
    launch,
    launch_script,
    start_script,
    wait_for,
    write,
)

FORKS = """
    import os, time
    rank = os.environ["RANK"]
    forked = os.fork()
    if not forked:
        time.sleep(60)
        os._exit(0)
    open(f"child_{rank}", "w").write(str(forked))
    open(f"ready_{rank}", "w").write(str(os.getpid()))
"""


def children(folder: Path) -> list[int]:
    return [int(wait_for(folder / f"child_{rank}")) for rank in (0, 1)]


@pytest.mark.slow
def test_children_of_a_failed_run_are_ended(tmp_path: Path) -> None:
    done = launch_script(tmp_path, FORKS + "    raise KeyError('the cause')\n")
    assert done.returncode == 1
    assert all(is_gone(pid, seconds=1) for pid in children(tmp_path))


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_ranks_and_children_end_with_the_launcher(tmp_path: Path, number: int) -> None:
    process, pids = start_script(tmp_path, FORKS + "    time.sleep(60)\n")
    process.send_signal(number)
    done = finish(process)
    assert done.returncode == 128 + number
    assert all(is_gone(pid, seconds=1) for pid in [*pids, *children(tmp_path)])
    assert not list(tmp_path.glob("hf_fsdp_*"))


THREAD = """
    import os, threading, time
    def upload():
        time.sleep(60)
    threading.Thread(target=upload, name="uploader").start()
"""


@pytest.mark.slow
def test_thread_that_never_ends_fails_the_run(tmp_path: Path) -> None:
    done = launch_script(tmp_path, THREAD, env={"HF_FSDP_EXIT_TIMEOUT": "1"})
    assert done.returncode == 1
    assert "FSDP-W741" in done.stderr and "FSDP-E742" in done.stderr
    assert "uploader (" in done.stderr and "train.py:4, in upload" in done.stderr


@pytest.mark.slow
def test_thread_that_ends_late_is_reported_only(tmp_path: Path) -> None:
    done = launch_script(tmp_path, THREAD.replace("60", "9"), "--num_processes", "1")
    assert done.returncode == 0, done.stderr
    assert "FSDP-W741" in done.stderr and "FSDP-E742" not in done.stderr


@pytest.mark.slow
def test_idle_executor_does_not_hold_the_exit(tmp_path: Path) -> None:
    text = """
        from concurrent.futures import ThreadPoolExecutor
        ThreadPoolExecutor().submit(print, "done")
    """
    done = launch_script(tmp_path, text, "--num_processes", "1", env={"HF_FSDP_EXIT_TIMEOUT": "1"})
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


def test_invalid_exit_limit_is_refused(tmp_path: Path) -> None:
    done = launch_script(tmp_path, THREAD, env={"HF_FSDP_EXIT_TIMEOUT": "long"})
    assert done.returncode == 2
    assert "HF_FSDP_EXIT_TIMEOUT is 'long'" in done.stderr


STUBBORN = """
    import os, time
    open("ready_" + os.environ["RANK"], "w").write(str(os.getpid()))
    while True:
        try:
            time.sleep(60)
        except KeyboardInterrupt:
            open("interrupted_" + os.environ["RANK"], "w").write("once")
"""


@pytest.mark.slow
@pytest.mark.parametrize("flags", [(), ("--show_ranks", "all")])
def test_second_interrupt_ends_at_once(tmp_path: Path, flags: tuple[str, ...]) -> None:
    process, pids = start_script(tmp_path, STUBBORN, *flags, "--grace", "1000")
    process.send_signal(signal.SIGINT)
    for rank in (0, 1):
        wait_for(tmp_path / f"interrupted_{rank}")
    process.send_signal(signal.SIGINT)
    done = finish(process, timeout=60)
    assert done.returncode == 128 + signal.SIGINT
    assert all(is_gone(pid, seconds=1) for pid in pids)


TALKS = """
    import os, time
    open("ready_" + os.environ["RANK"], "w").write(str(os.getpid()))
    while not all(os.path.exists(f"ready_{rank}") for rank in (0, 1)):
        time.sleep(0.05)
    while True:
        print("x" * 1000)
        time.sleep(0.001)
"""


@pytest.mark.parametrize(
    "flags", [("--show_ranks", "all"), pytest.param(("--log_dir", "logs"), marks=pytest.mark.slow)]
)
def test_run_ends_when_nobody_reads_its_output(tmp_path: Path, flags: tuple[str, ...]) -> None:
    write(tmp_path, TALKS)
    with (tmp_path / "stderr").open("w") as stderr:
        process = subprocess.Popen(
            [*LAUNCH, *flags, "train.py"],
            cwd=tmp_path,
            env=environment(tmp_path),
            stdout=subprocess.PIPE,
            stderr=stderr,
        )
    assert process.stdout is not None
    pids = [int(wait_for(tmp_path / f"ready_{rank}")) for rank in (0, 1)]
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(60) == 128 + signal.SIGPIPE
    assert all(is_gone(pid, seconds=1) for pid in pids)
    message = (tmp_path / "stderr").read_text()
    assert "stopped by SIGPIPE" in message and "Traceback" not in message


@pytest.mark.slow
def test_two_launches_with_one_port_both_run(tmp_path: Path) -> None:
    port = str(free_port())
    text = """
        import os, time
        from pathlib import Path
        Path(f"{os.environ['FSDP_NAME']}_{os.environ['RANK']}").touch()
        while len(list(Path(".").glob("run*_?"))) < 4:
            time.sleep(0.05)
        import torch.distributed as dist
        dist.init_process_group("gloo")
        dist.barrier()
        print("port", os.environ["MASTER_PORT"])
    """
    write(tmp_path, text)
    words = ["--main_process_port", port, "train.py"]
    runs = [
        subprocess.Popen(
            [*LAUNCH, *words],
            cwd=tmp_path,
            env=environment(tmp_path, FSDP_NAME=name),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for name in ("run1", "run2")
    ]
    done = [finish(run) for run in runs]
    assert [each.returncode for each in done] == [0, 0], done
    warned = [f"port {port} is in use" in each.stderr for each in done]
    assert sorted(warned) == [False, True]
    assert sorted(each.stdout == f"port {port}\n" for each in done) == [False, True]


TRAINED = """
    import os, resource, sys, torch
    from accelerate import Accelerator
    accelerator = Accelerator(project_dir="taken" if sys.argv[1] == "folder" else None)
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.backward(model(torch.randn(2, 8)).sum())
    optimizer.step()
    if sys.argv[1] == "file size":
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
    if sys.argv[1] == "exit code":
        accelerator.end_training()
        os._exit(7)
"""
FULL = ("--report", "report.json")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
@pytest.mark.parametrize(
    ("what", "flags", "code", "reason"),
    [
        ("disk", FULL, 0, "report.json: No space left on device"),
        pytest.param("exit code", FULL, 7, "report.json: No space left on device", marks=pytest.mark.slow),
        pytest.param("file size", (), 0, "fsdp_report.json: File too large", marks=pytest.mark.slow),
        pytest.param("folder", (), 0, "taken/fsdp_report.json: File exists", marks=pytest.mark.slow),
    ],
)
def test_report_on_a_full_disk_keeps_the_exit_code(
    tmp_path: Path, what: str, flags: tuple[str, ...], code: int, reason: str
) -> None:
    (tmp_path / "report.json").symlink_to("/dev/full")
    (tmp_path / "taken").touch()
    write(tmp_path, TRAINED)
    done = launch(tmp_path, "--num_processes", "2", *flags, "train.py", what)
    assert done.returncode == code, done.stderr
    assert f"cannot write the report to {reason}" in done.stderr.replace(f"{tmp_path}/", ""), done.stderr
    assert "Traceback" not in done.stderr
    assert {path.name for path in tmp_path.glob("*report*")} == {"report.json"}, "nothing is left behind"
