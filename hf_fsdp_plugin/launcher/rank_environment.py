"""What the ranks of this machine run, and their environment beside torch's variables.

:func:`rank_env` returns all of it. All ranks have the settings that libraries read when they are imported, what the
launcher hands over, and the variables that the user has given (:func:`launch_env`). Each rank has its own files, run
and attempt besides. torch's agent adds its own variables (``RANK``, ``MASTER_ADDR``, …), and starts the processes.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import hf_fsdp_plugin.rank_variables as rank_variables
import hf_fsdp_plugin.time_limits as time_limits
from hf_fsdp_plugin.devices import get_device
from hf_fsdp_plugin.hangs.watch_files import RankFiles
from hf_fsdp_plugin.launcher.flags import LaunchArguments
from hf_fsdp_plugin.launcher.world import World, num_threads
from hf_fsdp_plugin.runs.restart_policy import Restarts
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
        show_all, show_first: whether the output of all ranks, or of the first one, is shown.
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
    show_all: bool = False
    show_first: bool = False
    log_dir: Path | None = None
    debug: bool = False
    should_stop: Callable[[], str | None] = lambda: None
    on_start: Callable[[], None] = lambda: None


def launch_env(
    spec: FsdpSpec, world: World, handover: LaunchHandover, arguments: LaunchArguments | None = None
) -> dict[str, str]:
    """Return the variables that all ranks have. Later ones override earlier ones.

    Args:
        arguments: the arguments of the launcher; by default none.
    """
    arguments = arguments or LaunchArguments()
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
    given, launch, is_cuda = os.environ, spec.launch, world.device == "cuda"
    rows = (
        (threads or "OMP_NUM_THREADS" not in given, "OMP_NUM_THREADS", threads or str(num_threads(world.num_local))),
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
