"""The ranks of this machine: what they run, their environment, their processes and their output.

:func:`rank_env` returns the whole environment of a rank beside torch's variables. All ranks have the settings that
libraries read when they are imported, what the launcher hands over, and the variables that the user has given
(:func:`launch_env`). Each rank has its own files, run and attempt besides. torch's agent adds its own variables
(``RANK``, ``MASTER_ADDR``, …), and starts the processes (see ``torch_private.elastic``; the steps are in
``start_ranks.run_once``).

The states of the processes are read without reaping them, so that the launcher decides when a failed attempt ends:
torch stops all ranks as soon as it sees that one has exited.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import hf_fsdp_plugin.rank_variables as rank_variables
import hf_fsdp_plugin.time_limits as time_limits
from hf_fsdp_plugin.devices import get_device
from hf_fsdp_plugin.hangs.python_stacks import request_stack
from hf_fsdp_plugin.hangs.watch_files import RankFiles
from hf_fsdp_plugin.launcher.flags import LaunchArguments
from hf_fsdp_plugin.launcher.world import World, num_cores
from hf_fsdp_plugin.runs.attempts import Restarts
from hf_fsdp_plugin.runs.failures import RankExit, read_exit
from hf_fsdp_plugin.sources.handover import LaunchHandover
from hf_fsdp_plugin.spec.fsdp_spec import FsdpSpec
from hf_fsdp_plugin.spec.rules import mesh_variables


@dataclass(frozen=True, kw_only=True, slots=True)
class RankJob:
    """What all attempts have in common.

    Attributes:
        command: program and arguments of a rank.
        num_local: ranks on this machine.
        env: the variables that all ranks have (:func:`launch_env`).
        role: role name of the ranks, as in torchrun.
        grace: seconds that ranks have to exit after a signal to the launcher.
        notice: prints a message for the user.
        debug: whether the summary of a failure includes all tracebacks.
        shown: the ranks whose output is shown.
        log_dir: folder of the output of each rank; ``None`` for none.
        should_stop: returns why the ranks are stopped, as if one had failed on another machine.
        on_start: called when the machines have met, before ranks are started.
    """

    command: Sequence[str]
    num_local: int
    env: Mapping[str, str]
    notice: Callable[[object], None] = lambda notice: None
    role: str = "default"
    grace: float = time_limits.GRACE
    shown: Literal["none", "first", "all"] = "none"
    log_dir: Path | None = None
    debug: bool = False
    should_stop: Callable[[], str | None] = lambda: None
    on_start: Callable[[], None] = lambda: None


def launch_env(spec: FsdpSpec, world: World, handover: LaunchHandover, arguments: LaunchArguments) -> dict[str, str]:
    """Return the variables that all ranks have. Later ones override earlier ones."""
    options = {rank_variables.HANG_LIMIT_VARIABLE: "hang_timeout", rank_variables.LOG_VARIABLE: "log_dir"}
    return {
        **settings_env(spec, world, arguments),
        **{name: arguments.options[option] for name, option in options.items() if option in arguments.options},
        **handover.to_env(),
        **arguments.env,
    }


def rank_env(job: RankJob, files: RankFiles, restarts: Restarts, store: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of one rank in one attempt, over those of the launcher and of torch's agent.

    Args:
        store: where the ranks meet, if they do not use the store of torch's agent.
    """
    return {
        **store,
        **job.env,
        rank_variables.FILES_VARIABLE: str(files.stem),
        rank_variables.RUN_ID_VARIABLE: restarts.run_id,
        rank_variables.RESTART_VARIABLE: str(restarts.count),
        "TORCHELASTIC_RESTART_COUNT": str(restarts.count),
        "TORCHELASTIC_MAX_RESTARTS": str(restarts.max_restarts),
        rank_variables.ERROR_FILE_VARIABLE: str(files.stem.with_suffix(".error")),
    }


def settings_env(spec: FsdpSpec, world: World, arguments: LaunchArguments) -> dict[str, str]:
    """Return the environment variables that must be set before a script imports Accelerate or Transformers."""
    threads = arguments.options.get("num_cpu_threads_per_process")
    share = str(max(1, num_cores() // world.num_local))
    given, launch, is_cuda = os.environ, spec.launch, world.device == "cuda"
    rows = (
        (threads or "OMP_NUM_THREADS" not in given, "OMP_NUM_THREADS", threads or share),
        (world.device == "cpu", "ACCELERATE_USE_CPU", "true"),
        (spec.asked("launch.mixed_precision"), "ACCELERATE_MIXED_PRECISION", launch.mixed_precision),
        (spec.loading.ram_efficient, "ACCELERATE_USE_FSDP", "true"),  # from_pretrained reads this and the next one
        (spec.loading.ram_efficient, "FSDP_CPU_RAM_EFFICIENT_LOADING", "true"),
        (world.gpu_ids, get_device(world.device).visible_variable, world.gpu_ids),
        # ROCm prefers its own variable, which a job may have set.
        (world.gpu_ids and is_cuda and "HIP_VISIBLE_DEVICES" in given, "HIP_VISIBLE_DEVICES", world.gpu_ids),
        # as torchrun does
        (is_cuda and "TORCH_NCCL_ASYNC_ERROR_HANDLING" not in given, "TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        (launch.debug, "ACCELERATE_DEBUG_MODE", "true"),
        (launch.enable_cpu_affinity, "ACCELERATE_CPU_AFFINITY", "1"),
        (launch.downcast_bf16, "ACCELERATE_DOWNCAST_BF16", "true"),
    )
    env = {name: value for is_set, name, value in rows if is_set}
    env |= mesh_variables(spec, world.size)
    for key, value in spec.launch.dynamo_config.items():
        text = str(value).upper() if key == "backend" else str(value)
        env[f"ACCELERATE_DYNAMO_{key.removeprefix('dynamo_').upper()}"] = text
    return env


def rank_command(words: Sequence[str]) -> list[str]:
    """Return the command of a rank for SCRIPT ARGS or ``-m`` MODULE ARGS."""
    return [sys.executable, "-u", "-m", "hf_fsdp_plugin.launcher.run_script", *words]


@dataclass(kw_only=True)
class RankProcess:
    """A rank of this machine. Its process has its own session.

    Attributes:
        stderr: the file of its stderr; ``None`` if that is shown only.
        code: exit code, or minus the number of the signal; ``None`` while it runs.
        stopped: whether the launcher has stopped it.
    """

    rank: int
    pid: int
    files: RankFiles
    stderr: Path | None = None
    code: int | None = None
    exit_time: float = 0.0
    stopped: bool = False
    _term_sent: float | None = None

    @property
    def is_running(self) -> bool:
        if self.code is None:
            try:
                state = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:  # torch's agent has reaped it while a signal to the launcher was handled
                self.code, self.exit_time = -signal.SIGKILL if self.stopped else 1, time.time()
                return False
            if state is not None:
                exited = state.si_code == os.CLD_EXITED
                self.code, self.exit_time = state.si_status if exited else -state.si_status, time.time()
        return self.code is None

    @property
    def has_failed(self) -> bool:
        return (not self.is_running and self.code != 0) or self.files.failure.exists()

    def send(self, number: int) -> None:
        """Send a signal to the rank only. The rank is responsible for its children."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill the rank and its process group."""
        self.stopped |= self.is_running
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def request_stacks(self) -> None:
        """Make the rank record its stacks. Does nothing if it cannot yet, or has recorded where it failed."""
        if not self.files.failure.exists():
            request_stack(self.files.stacks, self.pid)

    def stop(self, seconds: float) -> None:
        """Send SIGTERM, later SIGKILL, to a rank that still runs `seconds` after a failure."""
        allowed = time_limits.TEARDOWN if self.files.failure.exists() else time_limits.SETTLE
        if self._term_sent is None and seconds > allowed:
            self._term_sent, self.stopped = seconds, True
            self.send(signal.SIGTERM)
        elif self._term_sent is not None:
            patience = time_limits.SAVE if self.files.saving.exists() else time_limits.TERM
            if seconds > self._term_sent + patience:
                self.kill()

    def result(self) -> RankExit:
        """Return how the rank exited."""
        known = {"pid": self.pid, "stopped": self.stopped, "tail": _last_lines(self.stderr)}
        return read_exit(self.rank, self.files, code=self.code or 0, time=self.exit_time or time.time(), **known)


_NUM_TAIL_LINES = 15
_TAIL_BYTES = 65536


class RankOutput:
    """The output of the ranks of this machine, which torch's agent redirects to files.

    The output of the first rank is shown, or that of all ranks, or none. Without a log, a rank that is shown alone
    writes to the streams of the launcher itself.

    Args:
        scratch: temporary folder for the files, if there is no folder of logs.

    Attributes:
        reader_exited: whether the process that reads this process's stdout or stderr (head, less) has exited.
    """

    def __init__(self, job: RankJob, scratch: Path) -> None:
        self._job, self._folder = job, job.log_dir or scratch
        self._readers: list[threading.Thread] = []
        self._has_ended = threading.Event()
        self.reader_exited = False

    def open(self, rank: int, *, is_first: bool, attempt: int = 0) -> tuple[str, str]:
        """Return the files of the stdout and stderr of a rank, before it is started; empty for those of the launcher.

        Args:
            attempt: number of the attempt; the files of earlier attempts are kept.
        """
        job = self._job
        is_shown = job.shown == "all" or (is_first and job.shown == "first")
        if is_shown and job.shown == "first" and job.log_dir is None:
            return "", ""
        name = f"rank_{rank}" + (f".attempt_{attempt}" if attempt else "")
        paths = [self._folder / f"{name}.{stream}.log" for stream in ("stdout", "stderr")]
        if not is_shown and job.log_dir is None:
            paths[0] = Path(os.devnull)
        prefix = f"[rank {rank}] ".encode() if job.shown == "all" else b""
        for path, stream in zip(paths, (sys.stdout, sys.stderr), strict=True) if is_shown else ():
            path.write_bytes(b"")
            self._readers.append(threading.Thread(target=self._show, args=(path, stream, prefix), daemon=True))
            self._readers[-1].start()
        return str(paths[0]), str(paths[1])

    def finish(self) -> None:
        """Show the rest of the output of the ranks, which have exited."""
        self._has_ended.set()
        for reader in self._readers:
            reader.join()

    def _show(self, path: Path, stream: Any, prefix: bytes) -> None:
        """Show what is written to a file, until the ranks have exited; with a prefix, only whole lines."""
        with path.open("rb") as file:
            rest, has_ended = b"", False
            while not has_ended and not self.reader_exited:
                has_ended = self._has_ended.wait(time_limits.OUTPUT)
                text = rest + file.read()
                if prefix:
                    text += b"\n" * (has_ended and bool(text) and not text.endswith(b"\n"))
                    *lines, rest = text.split(b"\n")
                    text = b"".join(prefix + line + b"\n" for line in lines)
                try:
                    stream.buffer.write(text)
                    stream.buffer.flush()
                except OSError:  # the reader has exited, or a disk is full
                    self.reader_exited = True
                    null = os.open(os.devnull, os.O_WRONLY)
                    os.dup2(null, stream.fileno())  # discards what the stream has buffered
                    os.close(null)


def _last_lines(path: Path | None) -> tuple[str, ...]:
    """Return the last non-empty lines of a file. For each progress bar, only its last state is returned."""
    if path is None or not path.is_file():
        return ()
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
        text = file.read().decode(errors="replace")
    lines = [line.rstrip("\r").rpartition("\r")[2].rstrip() for line in text.split("\n")]
    return tuple(line for line in lines if line)[-_NUM_TAIL_LINES:]
