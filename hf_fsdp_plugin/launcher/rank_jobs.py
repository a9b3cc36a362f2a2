"""What the ranks of a launch run, and their environment beside torch's variables.

All ranks have the settings that libraries read when they are imported, what the launcher hands over, and the variables
that the user has given (:func:`launch_env`). Each rank has its own files, run and attempt besides (:func:`rank_env`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from hf_fsdp_plugin.devices import get_device
from hf_fsdp_plugin.hangs.calls import HANG_LIMIT_VARIABLE
from hf_fsdp_plugin.hangs.rank_exit import ERROR_FILE_VARIABLE
from hf_fsdp_plugin.hangs.rank_files import FILES_VARIABLE, LAUNCHER_VARIABLE, LOG_VARIABLE, RUN_ID_VARIABLE, RankFiles
from hf_fsdp_plugin.launcher.flags import LaunchArguments
from hf_fsdp_plugin.launcher.orphan_processes import RUN_VARIABLE
from hf_fsdp_plugin.launcher.world import World, num_threads
from hf_fsdp_plugin.runs.restart_policy import RESTART_VARIABLE, Restarts
from hf_fsdp_plugin.sources.launchers import LaunchHandover
from hf_fsdp_plugin.spec.fsdp_spec import FsdpSpec

if TYPE_CHECKING:
    from hf_fsdp_plugin.runs.exits import RunResult

_JOB_GRACE: Final = 3.0
"""Seconds between SIGTERM and SIGKILL for the ranks of :func:`run_job`."""


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
        should_stop: returns why the ranks are stopped, as if one had failed on another machine.
    """

    command: Sequence[str]
    num_local: int
    env: Mapping[str, str]
    notice: Callable[[object], None] = lambda notice: None
    role: str = "default"
    grace: float = 30.0
    show_all: bool = False
    show_first: bool = False
    log_dir: Path | None = None
    debug: bool = False
    should_stop: Callable[[], str | None] = lambda: None


def launch_env(
    spec: FsdpSpec, world: World, handover: LaunchHandover, arguments: LaunchArguments | None = None
) -> dict[str, str]:
    """Return the variables that all ranks have. Later ones override earlier ones.

    Args:
        arguments: those of the launcher; by default none.
    """
    arguments = arguments or LaunchArguments()
    options = {HANG_LIMIT_VARIABLE: "hang_timeout", LOG_VARIABLE: "log_dir"}
    return {
        **settings_env(spec, world, arguments),
        **{name: arguments.options[option] for name, option in options.items() if option in arguments.options},
        **handover.to_env(),
        **arguments.env,
    }


def rank_env(files: RankFiles, run: str, restarts: Restarts) -> dict[str, str]:
    """Return the variables of one rank in one attempt.

    Args:
        run: name with which the processes of the run are found (``orphan_processes.run_name``).
    """
    return {
        LAUNCHER_VARIABLE: str(os.getpid()),
        FILES_VARIABLE: str(files.stem),
        RUN_VARIABLE: run,
        RUN_ID_VARIABLE: restarts.run_id,
        RESTART_VARIABLE: str(restarts.count),
        "TORCHELASTIC_RESTART_COUNT": str(restarts.count),
        "TORCHELASTIC_MAX_RESTARTS": str(restarts.max_restarts),
        ERROR_FILE_VARIABLE: str(files.stem.with_suffix(".error")),
    }


def settings_env(spec: FsdpSpec, world: World, arguments: LaunchArguments) -> dict[str, str]:
    """Return the environment variables that must be set before a script imports Accelerate or Transformers."""
    env = {}
    threads = arguments.options.get("num_cpu_threads_per_process")
    if threads is not None or "OMP_NUM_THREADS" not in os.environ:
        env["OMP_NUM_THREADS"] = threads or str(num_threads(world.num_local))
    if world.device == "cpu":
        env["ACCELERATE_USE_CPU"] = "true"
    if spec.asked("launch.mixed_precision"):
        env["ACCELERATE_MIXED_PRECISION"] = spec.launch.mixed_precision
    if spec.loading.ram_efficient:  # from_pretrained reads both
        env |= {"ACCELERATE_USE_FSDP": "true", "FSDP_CPU_RAM_EFFICIENT_LOADING": "true"}
    if world.gpu_ids:
        env[get_device(world.device).visible_variable] = world.gpu_ids
    if world.device == "cuda" and "TORCH_NCCL_ASYNC_ERROR_HANDLING" not in os.environ:
        env["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "1"  # as torchrun does
    if spec.launch.debug:
        env["ACCELERATE_DEBUG_MODE"] = "true"
    if spec.launch.enable_cpu_affinity:
        env["ACCELERATE_CPU_AFFINITY"] = "1"
    if spec.launch.downcast_bf16:
        env["ACCELERATE_DOWNCAST_BF16"] = "true"
    for key, value in spec.launch.dynamo_config.items():
        text = str(value).upper() if key == "backend" else str(value)
        env[f"ACCELERATE_DYNAMO_{key.removeprefix('dynamo_').upper()}"] = text
    return env


def rank_command(words: Sequence[str]) -> list[str]:
    """Return the command of a rank for SCRIPT ARGS or ``-m`` MODULE ARGS."""
    return [sys.executable, "-u", "-m", "hf_fsdp_plugin.launcher.run_script", *words]


def run_job(
    words: Sequence[str],
    spec: FsdpSpec,
    world: World,
    handover: LaunchHandover,
    *,
    env: Mapping[str, str],
    should_stop: Callable[[], str | None],
) -> RunResult:
    """Run a script or a module once on ranks of this machine, with hidden output, and return how they exited.

    Args:
        words: SCRIPT ARGS or ``-m`` MODULE ARGS.
        env: variables of the ranks in addition to those of the spec.
        should_stop: called again and again while the ranks run. Returns why they are stopped; ``None`` if they are not.
    """
    from hf_fsdp_plugin.launcher.attempts import run_locally  # lazy: imports torch

    env = {**launch_env(spec, world, handover), **env}
    job = RankJob(command=rank_command(words), num_local=world.size, env=env, grace=_JOB_GRACE, should_stop=should_stop)
    return run_locally(job)
