"""Constructor arguments of ``FullyShardedDataParallelPlugin`` as settings."""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable
from typing import Any

import pytest

from hf_fsdp_plugin.problems import Problem

Assess = Callable[..., Any]


class ShardingStrategy(enum.Enum):
    FULL_SHARD = enum.auto()
    SHARD_GRAD_OP = enum.auto()
    NO_SHARD = enum.auto()
    HYBRID_SHARD = enum.auto()
    _HYBRID_SHARD_ZERO2 = enum.auto()


class BackwardPrefetch(enum.Enum):
    BACKWARD_PRE = enum.auto()
    BACKWARD_POST = enum.auto()


class StateDictType(enum.Enum):
    FULL_STATE_DICT = enum.auto()
    LOCAL_STATE_DICT = enum.auto()
    SHARDED_STATE_DICT = enum.auto()


class CPUOffload:
    def __init__(self, offload_params: bool) -> None:
        self.offload_params = offload_params


class OffloadPolicy:
    pass


class CPUOffloadPolicy(OffloadPolicy):
    pin_memory = False


class MixedPrecision:
    param_dtype, reduce_dtype, buffer_dtype = "torch.bfloat16", "torch.float32", None


class FullStateDictConfig:
    pass


class Layer:
    pass


class Other:
    pass


class ModuleWrapPolicy:
    def __init__(self, classes: set[type]) -> None:
        self._module_classes = classes


def transformer_auto_wrap_policy() -> None: ...


def size_based_auto_wrap_policy() -> None: ...


@pytest.mark.parametrize(
    ("given", "name", "value"),
    [
        ({}, "fsdp.version", 1),
        ({"fsdp_version": 2}, "fsdp.version", 2),
        ({"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP}, "sharding.strategy", "shard_grad_op"),
        ({"sharding_strategy": ShardingStrategy._HYBRID_SHARD_ZERO2}, "sharding.strategy", "hybrid_shard_zero2"),
        ({"sharding_strategy": "NO_SHARD"}, "sharding.strategy", "no_shard"),
        ({"sharding_strategy": 2}, "sharding.strategy", "shard_grad_op"),
        ({"fsdp_version": 2, "reshard_after_forward": False}, "sharding.strategy", "shard_grad_op"),
        ({"reshard_after_forward": ShardingStrategy.NO_SHARD}, "sharding.strategy", "no_shard"),
        ({"backward_prefetch": BackwardPrefetch.BACKWARD_POST}, "prefetch.backward", "post"),
        ({"backward_prefetch": "NO_PREFETCH"}, "prefetch.backward", "none"),
        ({"forward_prefetch": True}, "prefetch.forward", True),
        ({"limit_all_gathers": False}, "prefetch.limit_all_gathers", False),
        ({"cpu_offload": True}, "offload.params", True),
        ({"cpu_offload": CPUOffload(True)}, "offload.params", True),
        ({"cpu_offload": CPUOffload(False)}, "offload.params", False),
        ({"cpu_offload": CPUOffloadPolicy()}, "offload.params", True),
        ({"cpu_offload": CPUOffloadPolicy()}, "offload.pin_memory", False),
        ({"cpu_offload": OffloadPolicy()}, "offload.params", False),
        ({"mixed_precision_policy": "bf16"}, "precision.param", "bf16"),
        ({"mixed_precision_policy": {"param_dtype": "torch.float16"}}, "precision.param", "fp16"),
        ({"mixed_precision_policy": MixedPrecision()}, "precision.param", "bf16"),
        ({"mixed_precision_policy": MixedPrecision()}, "precision.reduce", "fp32"),
        ({"mixed_precision_policy": MixedPrecision()}, "precision.buffer", "auto"),
        ({"auto_wrap_policy": "transformer_based_wrap"}, "wrap.policy", "transformer"),
        ({"auto_wrap_policy": "no_wrap"}, "wrap.policy", "none"),
        ({"auto_wrap_policy": transformer_auto_wrap_policy}, "wrap.policy", "transformer"),
        (
            {"auto_wrap_policy": functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Layer, Other})},
            "wrap.classes",
            ("Layer", "Other"),
        ),
        ({"auto_wrap_policy": ModuleWrapPolicy({Layer})}, "wrap.classes", ("Layer",)),
        ({"auto_wrap_policy": size_based_auto_wrap_policy}, "wrap.min_num_params", 100_000_000),
        (
            {"auto_wrap_policy": functools.partial(size_based_auto_wrap_policy, min_num_params=7)},
            "wrap.min_num_params",
            7,
        ),
        ({"transformer_cls_names_to_wrap": ["Layer"]}, "wrap.classes", ("Layer",)),
        ({"ignored_modules": ".*head"}, "wrap.ignored_modules", ".*head"),
        ({"state_dict_type": StateDictType.SHARDED_STATE_DICT}, "checkpoint.state_dict", "sharded"),
        ({"state_dict_config": FullStateDictConfig()}, "checkpoint.state_dict", "full"),
        (
            {"state_dict_type": "sharded", "state_dict_config": FullStateDictConfig()},
            "checkpoint.state_dict",
            "sharded",
        ),
        ({"use_orig_params": False}, "params.use_orig", False),
        ({"sync_module_states": True}, "loading.sync_module_states", True),
        ({"cpu_ram_efficient_loading": True}, "loading.ram_efficient", True),
        ({"activation_checkpointing": True}, "activation.checkpointing", "full"),
    ],
    ids=str,
)
def test_argument_sets_setting(assess: Assess, given: dict[str, Any], name: str, value: Any) -> None:
    found = assess(plugin_object=given)
    assert found.ok, found.problems
    assert found.spec.get(name) == value
    assert found.spec.launch.distributed_type == "FSDP"
    if found.spec.asked(name):
        assert found.spec.origin(name).source == "FullyShardedDataParallelPlugin"


def custom_policy(module: Any) -> bool:
    return False


@pytest.mark.parametrize(
    ("given", "code", "part"),
    [
        ({"auto_wrap_policy": custom_policy}, "FSDP-E037", "custom_policy"),
        ({"ignored_modules": [Layer()]}, "FSDP-E037", "ignored_modules is list"),
        ({"param_init_fn": custom_policy}, "FSDP-E037", "param_init_fn is function"),
        ({"sharding_strategy": "full_shrad"}, "FSDP-E101", "full_shard"),
        ({"auto_wrap_policy": "size_based_wrap"}, "FSDP-E142", "min_num_params"),
    ],
    ids=str,
)
def test_unsupported_argument_is_error(
    problems: Callable[..., list[Problem]], given: dict[str, Any], code: str, part: str
) -> None:
    (problem,) = problems(plugin_object=given)
    assert problem.code == code and part in str(problem) and problem.fix


def test_plugin_precedence_is_between_file_and_flags(assess: Assess) -> None:
    config = {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2, "fsdp_sharding_strategy": 1}}
    given = {"fsdp_version": 2, "sharding_strategy": ShardingStrategy.NO_SHARD}
    over_file = assess(config, plugin_object=given)
    assert over_file.spec.sharding.strategy == "no_shard"
    assert [p.code for p in over_file.problems if p.setting == "sharding.strategy"] == ["FSDP-W103"]
    under_flag = assess(config, plugin_object=given, command_line=["--fsdp_sharding_strategy", "2"])
    assert under_flag.spec.sharding.strategy == "shard_grad_op"
