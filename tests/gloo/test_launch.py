"""`hf-fsdp launch` on one machine: the environment of a script, exit codes, signals and the failure summary."""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from hf_fsdp_plugin.sources.config_tree import ConfigFile
from hf_fsdp_plugin.sources.interface import Sources
from hf_fsdp_plugin.spec.load import assess
from tests.support.launching import finish, is_gone, launch, launch_script, start_script, write
from tests.support.matrices import slow

SHOW = """
    import gc, json, os, sys
    seen = {name: os.environ.get(name) for name in (
        "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "ACCELERATE_USE_CPU", "OMP_NUM_THREADS",
        "HF_FSDP_LAUNCH")}
    seen |= {"argv": sys.argv, "path": sys.path[0], "file": __file__, "name": __name__}
    seen["main"] = sys.modules["__main__"].__file__
    seen["collects_garbage"], seen["num_frozen"] = gc.isenabled(), gc.get_freeze_count()
    with open(f"seen_{seen['RANK']}.json", "w") as file:
        json.dump(seen, file)
    print("shown by rank", seen["RANK"])
"""


def seen(folder: Path) -> list[dict[str, object]]:
    return [json.loads(file.read_text()) for file in sorted(folder.glob("seen_*.json"))]


def test_script_runs_on_every_rank_as_under_python(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    script = write(tmp_path, SHOW, name="scripts/train.py")
    arguments = ["scripts/train.py", "--lr", "1e-3", "two words", "--config_file", "x"]
    flags = ("--cpu", "--set", "prefetch.forward=true", "--report", "r.json", "--fsdp_offload_params", "false")
    done = launch(tmp_path, *flags, *arguments, env={"FSDP_FORWARD_PREFETCH": "true"})
    assert done.returncode == 0, done.stderr
    ranks = seen(tmp_path)
    assert len(ranks) == 2
    for number, rank in enumerate(ranks):
        assert (rank["RANK"], rank["LOCAL_RANK"]) == (str(number), str(number))
        assert (rank["WORLD_SIZE"], rank["LOCAL_WORLD_SIZE"]) == ("2", "2")
        assert rank["argv"] == arguments
        assert rank["path"] == str(script.parent)
        assert rank["file"] == rank["main"] == str(script)
        assert rank["name"] == "__main__"
        assert rank["collects_garbage"] and rank["num_frozen"] > 100_000  # the objects of the imported libraries
        assert rank["ACCELERATE_USE_CPU"] == "true"
        content = json.loads(str(rank["HF_FSDP_LAUNCH"]))
        given = content.pop("given")
        assert content == {"quiet": False, "report": str(tmp_path / "r.json"), "report_table": False}
        assert [source["source"] for source in given] == ["--set", "command line", "fsdp.yaml", "environment"]
        lines = {setting["name"]: setting["origin"]["line"] for setting in given[2]["settings"]}
        assert lines["fsdp.version"] == 4
        # Of all variables, only those of the user are settings: the launcher sets others for libraries.
        assert [setting["origin"]["spelling"] for setting in given[3]["settings"]] == ["FSDP_FORWARD_PREFETCH"]
    # Only the output of rank 0 is shown; notices are on stderr.
    assert done.stdout == "shown by rank 0\n"
    assert "rendezvous: 1 machine, 2 ranks, 127.0.0.1:" in done.stderr


RECORDED = """
    import os, sys
    if "RANK" in os.environ:
        def record(event, arguments):
            if event == "open" and "fsdp.yaml" in str(arguments[0]):
                os.write(2, b"opened the config\\n")
        sys.addaudithook(record)
        open("fsdp.yaml").close()
"""
WITH_ARGUMENTS = """
    import json, os
    from transformers import TrainingArguments
    from hf_fsdp_plugin.integrations.session import session
    arguments = TrainingArguments("out", use_cpu=True, fsdp=True, fsdp_config={"offload_params": True})
    specs = [session().ambient, session().spec_of_arguments(arguments)]
    rows = [[[name, value, str(origin)] for name, value, origin in spec.settings()] for spec in specs]
    with open(f"specs_{os.environ['RANK']}.json", "w") as file:
        json.dump(rows, file, default=dict)
"""


def test_rank_opens_no_config_and_gets_every_origin(tmp_path: Path) -> None:
    write(tmp_path, RECORDED, name="sitecustomize.py")
    write(tmp_path, WITH_ARGUMENTS)
    flags = ("--cpu", "--num_processes", "2", "--show_ranks", "all", "--set", "mesh.shard=2", "--fsdp_version", "2")
    python_path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = launch(tmp_path, *flags, "train.py", env={"PYTHONPATH": python_path, "FSDP_FORWARD_PREFETCH": "true"})
    assert done.returncode == 0, done.stderr
    assert (done.stdout + done.stderr).count("opened the config") == 2  # by `sitecustomize.py` itself, once in a rank
    sources = Sources(
        config=replace(ConfigFile.at(tmp_path / "fsdp.yaml"), shown="fsdp.yaml"),
        command_line=("--cpu", "--num_processes=2", "--fsdp_version=2"),
        overrides=("mesh.shard=2",),
        environ={"FSDP_FORWARD_PREFETCH": "true"},
    )
    of_script = replace(sources, training_arguments={"fsdp": True, "fsdp_config": {"offload_params": True}})
    specs = [assess(given).checked_spec() for given in (sources, of_script)]
    rows = [[[name, value, str(origin)] for name, value, origin in spec.settings()] for spec in specs]
    expected = json.loads(json.dumps(rows, default=dict))
    offloads = [origin for name, value, origin in expected[1] if name == "offload.params" and value]
    assert offloads == ["TrainingArguments offload_params=True"]
    for rank in (0, 1):
        assert json.loads((tmp_path / f"specs_{rank}.json").read_text()) == expected


@pytest.mark.slow
def test_module_runs_with_the_working_directory_on_path(tmp_path: Path) -> None:
    write(tmp_path, "")
    (tmp_path / "pack").mkdir()
    write(tmp_path, "import sys; print(__name__, __package__, sys.argv[1:], sys.path[0])", name="pack/train.py")
    done = launch(tmp_path, "-m", "pack.train", "--epochs", "3")
    assert (done.returncode, done.stdout) == (0, f"__main__ pack ['--epochs', '3'] {tmp_path}\n"), done.stderr


@pytest.mark.slow
def test_globals_of_script_exist_in_exit_handlers(tmp_path: Path) -> None:
    text = "import atexit, pickle\nclass A: pass\natexit.register(lambda: print(pickle.loads(pickle.dumps(A()))))"
    done = launch_script(tmp_path, text, "--num_processes", "1")
    assert "__main__.A object" in done.stdout, done.stderr


@pytest.mark.slow
def test_show_ranks_all_prefixes_each_line(tmp_path: Path) -> None:
    done = launch_script(tmp_path, SHOW, "--show-ranks", "all", "--log-dir", "logs")
    assert sorted(done.stdout.splitlines()) == ["[rank 0] shown by rank 0", "[rank 1] shown by rank 1"]
    assert (tmp_path / "logs" / "rank_1.stdout.log").read_text() == "shown by rank 1\n"


@pytest.mark.slow
def test_threads_are_divided_among_ranks_unless_set(tmp_path: Path) -> None:
    launch_script(tmp_path, SHOW, "--num_processes", "2")
    assert {rank["OMP_NUM_THREADS"] for rank in seen(tmp_path)} == {str(max(1, len(os.sched_getaffinity(0)) // 2))}
    launch(tmp_path, "train.py", env={"OMP_NUM_THREADS": "7"})
    assert {rank["OMP_NUM_THREADS"] for rank in seen(tmp_path)} == {"7"}


@pytest.mark.parametrize(("rank", "code"), [slow(0, 3), (1, 42)])
def test_launcher_returns_exit_code_of_failed_rank(tmp_path: Path, rank: int, code: int) -> None:
    done = launch_script(tmp_path, f"import os, sys\nsys.exit({code} if os.environ['RANK'] == '{rank}' else 0)")
    assert done.returncode == code
    assert f"rank {rank} failed" in done.stderr
    assert f"exit code {code}" in done.stderr


def test_exception_is_shown_once_with_user_frames(tmp_path: Path) -> None:
    text = """
        import os, sys, time
        def deep():
            raise ValueError("no such column: labels")
        if os.environ["RANK"] == "1":
            print("reading data", file=sys.stderr)
            deep()
        time.sleep(3600)
    """
    done = launch_script(tmp_path, text)
    assert done.returncode == 1
    assert "rank 1 failed (pid " in done.stderr
    assert done.stderr.count("ValueError: no such column: labels") == 1
    assert "train.py:4, in deep" in done.stderr
    assert "| reading data" in done.stderr
    assert "rank 0 stopped by the launcher" in done.stderr
    assert "Traceback" not in done.stderr
    assert "run_script" not in done.stderr


@pytest.mark.slow
def test_debug_shows_the_full_traceback(tmp_path: Path) -> None:
    done = launch_script(tmp_path, "raise RuntimeError('here')", "--debug", "--num_processes", "1")
    assert "Traceback (most recent call last)" in done.stderr


def test_same_exception_on_all_ranks_is_shown_once(tmp_path: Path) -> None:
    # Ranks that the launcher stops have not failed: all start together, and none reacts to SIGTERM.
    text = """
        import os, signal, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        open("ready_" + os.environ["RANK"], "w").close()
        while not all(os.path.exists(f"ready_{rank}") for rank in range(3)):
            time.sleep(0.05)
        raise RuntimeError("the same everywhere")
    """
    done = launch_script(tmp_path, text, "--num_processes", "3")
    assert done.stderr.count("the same everywhere") == 2  # the message, and the line that raised it
    assert "ranks 1, 2 failed the same way" in done.stderr


def test_syntax_error_shows_file_and_line(tmp_path: Path) -> None:
    done = launch_script(tmp_path, "def f(:\n    pass\n")
    assert done.returncode == 1
    assert "rank 0 failed" in done.stderr and "SyntaxError: " in done.stderr
    assert 'train.py", line 1' in done.stderr


@pytest.mark.slow
def test_lost_connection_is_reported_in_one_line(tmp_path: Path) -> None:
    text = """
        import torch
        import torch.distributed as dist
        dist.init_process_group("gloo")
        total = torch.ones(1)
        dist.all_reduce(total)
        if dist.get_rank() == 1:
            raise KeyError("the cause")
        dist.all_reduce(total)
        dist.all_reduce(total)
    """
    done = launch_script(tmp_path, text)
    assert done.returncode == 1
    assert "rank 1 failed" in done.stderr and "KeyError: 'the cause'" in done.stderr
    assert done.stderr.count("\nhf-fsdp: rank 0 lost the connection afterwards") == 1


def test_killed_rank_stops_other_ranks_and_children(tmp_path: Path) -> None:
    text = """
        import os, signal, subprocess, sys, time
        rank = os.environ["RANK"]
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
        open(f"pids_{rank}", "w").write(f"{os.getpid()} {child.pid}")
        while not os.path.exists(f"pids_{1 - int(rank)}"):
            time.sleep(0.05)
        if rank == "1":
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(3600)
    """
    done = launch_script(tmp_path, text)
    assert done.returncode == 128 + signal.SIGKILL
    assert "rank 1 failed" in done.stderr and "killed by SIGKILL" in done.stderr
    for pid in [int(pid) for rank in (0, 1) for pid in (tmp_path / f"pids_{rank}").read_text().split()]:
        assert is_gone(pid)


@pytest.mark.slow
def test_rank_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    text = """
        import os, signal, sys, time
        if os.environ["RANK"] == "1":
            while not os.path.exists("ignores"):
                time.sleep(0.05)
            sys.exit(5)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        open("ignores", "w").close()
        time.sleep(3600)
    """
    done = launch_script(tmp_path, text)
    assert done.returncode == 5


HANDLES = """
    import os, signal, sys, time
    rank = os.environ["RANK"]
    def stop(number, frame):
        open(f"signal_{rank}", "w").write(signal.Signals(number).name)
        sys.exit(0)
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    open(f"ready_{rank}", "w").write(str(os.getpid()))
    time.sleep(120)
"""


@pytest.mark.parametrize("number", [slow(signal.SIGTERM), signal.SIGINT])
def test_handled_signal_reaches_every_rank(tmp_path: Path, number: signal.Signals) -> None:
    process, _ = start_script(tmp_path, HANDLES)
    process.send_signal(number)
    done = finish(process)
    assert done.returncode == 0, done.stderr
    assert [(tmp_path / f"signal_{rank}").read_text() for rank in (0, 1)] == [number.name] * 2


@pytest.mark.parametrize("number", [signal.SIGTERM, slow(signal.SIGINT)])
def test_unhandled_signal_stops_the_ranks(tmp_path: Path, number: signal.Signals) -> None:
    text = "import os, time\nopen('ready_' + os.environ['RANK'], 'w').write(str(os.getpid()))\ntime.sleep(3600)"
    process, _ = start_script(tmp_path, text)
    process.send_signal(number)
    done = finish(process)
    assert done.returncode == 128 + number
    assert f"stopped by {number.name}; ranks 0, 1 exited" in done.stderr
    assert f"hf-fsdp: {number.name}: stopping 2 ranks; they have 30 s, and the next" in done.stderr
    assert "Traceback" not in done.stderr


def test_ignored_signal_kills_after_the_grace_time(tmp_path: Path) -> None:
    text = HANDLES.replace("sys.exit(0)", "pass").replace("time.sleep(120)", "[time.sleep(1) for _ in range(3600)]")
    process, pids = start_script(tmp_path, text, "--grace", "1")
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    done = finish(process)
    assert time.monotonic() - began >= 1
    assert done.returncode == 128 + signal.SIGTERM
    assert all(is_gone(pid) for pid in pids)


def test_config_problem_in_a_rank_is_shown_once(tmp_path: Path) -> None:
    text = """
        from hf_fsdp_plugin import Problem, SpecError
        raise SpecError([Problem(code="FSDP-E201", setting="wrap.classes", message="no such class.", fix="Name it.")])
    """
    done = launch_script(tmp_path, text, "--quiet")
    assert (done.returncode, done.stderr) == (1, "wrap.classes: no such class. Name it. [FSDP-E201]\n")
