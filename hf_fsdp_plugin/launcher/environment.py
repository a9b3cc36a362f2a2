"""The environment of a rank beside torch's variables.

All ranks of a launch have the settings that libraries read when they are imported, what the launcher hands over, and
the variables that the user has given (:func:`launch_env`). Each rank has its own files, run and attempt besides
(:func:`rank_env`).
"""

from __future__ import annotations

import os

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
