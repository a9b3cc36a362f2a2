"""The environment of a rank: torchrun's variables, and settings that libraries read when they are imported."""

from __future__ import annotations

import os

from hf_fsdp_plugin.devices import get_device
from hf_fsdp_plugin.hangs.rank_files import LAUNCHER_VARIABLE
from hf_fsdp_plugin.launcher.flags import LaunchArguments
from hf_fsdp_plugin.launcher.rendezvous import Rendezvous
from hf_fsdp_plugin.launcher.world import World, num_threads
from hf_fsdp_plugin.runs.restarts import RESTART_VARIABLE, Restarts
from hf_fsdp_plugin.spec.model import FsdpSpec


def settings_env(spec: FsdpSpec, world: World, arguments: LaunchArguments) -> dict[str, str]:
    """Return the environment variables that must be set before a script imports Accelerate or Transformers."""
    env = {LAUNCHER_VARIABLE: str(os.getpid())}
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


def restart_env(restarts: Restarts) -> dict[str, str]:
    """Return the variables that are the same for all ranks of an attempt: those of torchrun, and the plugin's own."""
    return {
        RESTART_VARIABLE: str(restarts.count),
        "TORCHELASTIC_RUN_ID": restarts.run_id,
        "TORCHELASTIC_RESTART_COUNT": str(restarts.count),
        "TORCHELASTIC_MAX_RESTARTS": str(restarts.max_restarts),
    }


def rank_env(world: World, rendezvous: Rendezvous, local_rank: int, *, role: str) -> dict[str, str]:
    """Return the variables that torchrun sets, so that scripts written for torchrun run unchanged."""
    rank = rendezvous.first_rank + local_rank
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(world.size),
        "LOCAL_WORLD_SIZE": str(world.num_local),
        "GROUP_RANK": str(rendezvous.machine),
        "GROUP_WORLD_SIZE": str(world.num_machines),
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": str(world.size),
        "ROLE_NAME": role,
        "MASTER_ADDR": rendezvous.address,
        "MASTER_PORT": str(rendezvous.port),
        "TORCHELASTIC_USE_AGENT_STORE": str(rendezvous.hosted),
    }
