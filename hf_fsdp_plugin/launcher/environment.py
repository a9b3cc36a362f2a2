"""The environment of a rank beside torch's variables: settings that libraries read when they are imported."""

from __future__ import annotations

import os

from hf_fsdp_plugin.devices import get_device
from hf_fsdp_plugin.launcher.flags import LaunchArguments
from hf_fsdp_plugin.launcher.world import World, num_threads
from hf_fsdp_plugin.spec.model import FsdpSpec


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
