"""Helpers of the launcher's tests: a config, scripts, and the launcher as a real process."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path

CONFIG = """\
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config:
  fsdp_version: 2
  fsdp_cpu_ram_efficient_loading: false
"""
LAUNCH = [sys.executable, "-m", "hf_fsdp_plugin.cli.main", "launch", "--config_file", "fsdp.yaml"]
Done = subprocess.CompletedProcess[str]
_SOURCES = ("FSDP_", "ACCELERATE_", "PARALLELISM_", "HF_FSDP_")
_RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "OMP_NUM_THREADS")


def environment(folder: Path, **more: str) -> dict[str, str]:
    """The environment of this process without variables for FSDP and ranks, and without a default config."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(_SOURCES) and k not in _RANK}
    return {**kept, "HF_HOME": str(folder / "hf_home"), "HF_HUB_OFFLINE": "1", "TMPDIR": str(folder), **more}


def write(folder: Path, text: str, *, name: str = "train.py") -> Path:
    """Write a script, and the config if there is none yet."""
    script = folder / name
    script.write_text(textwrap.dedent(text))
    if not (folder / "fsdp.yaml").exists():
        (folder / "fsdp.yaml").write_text(CONFIG)
    return script


def start(folder: Path, *words: str, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
    """Start `hf-fsdp launch --config_file fsdp.yaml WORDS` in the folder."""
    return subprocess.Popen(
        [*LAUNCH, *words],
        cwd=folder,
        env=environment(folder, **(env or {})),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def launch(folder: Path, *words: str, env: dict[str, str] | None = None) -> Done:
    """Start the launcher and wait for it."""
    return finish(start(folder, *words, env=env))


def launch_script(folder: Path, text: str, *flags: str, env: dict[str, str] | None = None) -> Done:
    """Write `train.py` and launch it."""
    write(folder, text)
    return launch(folder, *flags, "train.py", env=env)


def start_script(folder: Path, text: str, *flags: str) -> tuple[subprocess.Popen[str], list[int]]:
    """Start a script whose two ranks write their process ids to `ready_RANK`. Returns the launcher and these ids."""
    write(folder, text)
    process = start(folder, *flags, "train.py")
    return process, [int(wait_for(folder / f"ready_{rank}")) for rank in (0, 1)]


def finish(process: subprocess.Popen[str], *, timeout: float = 500) -> Done:
    """Wait for the launcher. Kills it if it does not end in time."""
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise
    return Done(process.args, process.returncode, out, err)


def run(folder: Path, words: Sequence[str | Path], **env: str) -> Done:
    """Run another program in the same folder and environment."""
    return subprocess.run(
        words, cwd=folder, env=environment(folder, **env), capture_output=True, text=True, timeout=500, check=False
    )


def wait_for(path: Path, *, seconds: float = 400) -> str:
    """Wait until a file has content, and return it."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if path.exists() and (text := path.read_text()):
            return text
        time.sleep(0.05)
    raise AssertionError(f"{path.name} was not written in {seconds} s")


def is_gone(pid: int, *, seconds: float = 10) -> bool:
    """Wait for a process to exit and return whether it has. Zombies count as exited."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            return True
        if stat.rpartition(")")[2].split()[0] == "Z":
            return True
        time.sleep(0.1)
    return False


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
