"""The table of settings that can be read from a live model, with the function that reads each of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from hf_fsdp_plugin.observe import readers_sharding as sharding
from hf_fsdp_plugin.observe import readers_training as training
from hf_fsdp_plugin.observe.live_run import LiveRun, ObservedValue, unobservable


@dataclass(frozen=True, slots=True)
class SettingReader:
    """Describes how one setting is read.

    Attributes:
        read: function that reads the value from the live model.
        default_shown: whether the report contains the setting even if no source sets it, because it determines the
            memory, the speed or the numerics of the run.
    """

    read: Callable[[LiveRun], ObservedValue]
    default_shown: bool = False


READERS: Final[Mapping[str, SettingReader]] = MappingProxyType(
    {
        "fsdp.version": SettingReader(sharding.read_version, default_shown=True),
        "sharding.strategy": SettingReader(sharding.read_strategy, default_shown=True),
        "mesh.shard": SettingReader(sharding.read_mesh_shard, default_shown=True),
        "mesh.replicate": SettingReader(sharding.read_mesh_replicate, default_shown=True),
        "wrap.policy": SettingReader(sharding.read_wrap_policy, default_shown=True),
        "wrap.classes": SettingReader(sharding.read_wrap_classes),
        "wrap.min_num_params": SettingReader(sharding.read_min_num_params),
        "wrap.ignored_modules": SettingReader(sharding.read_ignored_modules),
        "offload.params": SettingReader(sharding.read_offload, default_shown=True),
        "offload.pin_memory": SettingReader(sharding.read_pin_memory),
        "precision.param": SettingReader(sharding.read_param_dtype, default_shown=True),
        "precision.reduce": SettingReader(sharding.read_reduce_dtype, default_shown=True),
        "precision.fp32_modules": SettingReader(sharding.read_fp32_modules),
        "precision.output": SettingReader(sharding.read_output_dtype),
        "precision.buffer": SettingReader(sharding.read_buffer_dtype),
        "prefetch.backward": SettingReader(sharding.read_backward_prefetch, default_shown=True),
        "prefetch.forward": SettingReader(sharding.read_forward_prefetch, default_shown=True),
        "prefetch.limit_all_gathers": SettingReader(sharding.read_limit_all_gathers),
        "params.use_orig": SettingReader(sharding.read_use_orig),
        "checkpoint.state_dict": SettingReader(training.read_state_dict),
        "checkpoint.asynchronous": SettingReader(training.read_asynchronous),
        "checkpoint.verify": SettingReader(training.read_verify),
        "activation.checkpointing": SettingReader(training.read_checkpointing, default_shown=True),
        "activation.native": SettingReader(training.read_native),
        "activation.offload": SettingReader(training.read_activation_offload),
        "loading.ram_efficient": SettingReader(training.read_ram_efficient),
        "loading.sync_module_states": SettingReader(training.read_sync_module_states),
        "launch.num_processes": SettingReader(training.read_num_processes),
        "launch.num_machines": SettingReader(training.read_num_machines),
        "launch.mixed_precision": SettingReader(training.read_mixed_precision),
        "launch.use_cpu": SettingReader(training.read_use_cpu),
        "launch.distributed_type": SettingReader(training.read_distributed_type),
        "launch.dynamo_config": SettingReader(training.read_dynamo),
    }
)


def read_setting(name: str, run: LiveRun) -> ObservedValue:
    """Read one setting from the live model, by canonical name."""
    if name in READERS:
        return READERS[name].read(run)
    if name.startswith("xla."):
        asked = run.plan.spec.get(name)
        value = False if asked else asked
        return ObservedValue(value=value, reason="the model is not on an XLA device", matches=not asked)
    return unobservable("only the launcher uses this setting; the model does not record it")
