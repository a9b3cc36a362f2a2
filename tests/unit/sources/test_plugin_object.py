"""Constructor arguments of ``FullyShardedDataParallelPlugin`` as settings."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    CPUOffloadPolicy,
    FullStateDictConfig,
    MixedPrecision,
    OffloadPolicy,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp.wrap import (
    ModuleWrapPolicy,
    _or_policy,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)

from tests.support.parameter_ids import keys_of

MIXED = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
BY_LAYER = partial(transformer_auto_wrap_policy, transformer_layer_cls={nn.Linear, nn.Conv1d})
BY_SIZE = partial(size_based_auto_wrap_policy, min_num_params=7)


def is_trainable_leaf(module):
    return module.weight.requires_grad


# As peft.utils.other.fsdp_auto_wrap_policy returns it.
is_trainable_leaf.__module__ = "peft.utils.other"
LEAVES = partial(lambda_auto_wrap_policy, lambda_fn=is_trainable_leaf)
BY_PEFT = partial(_or_policy, policies=[LEAVES, BY_LAYER])


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
        ({"cpu_offload": CPUOffloadPolicy(pin_memory=False)}, "offload.pin_memory", False),
        ({"cpu_offload": OffloadPolicy()}, "offload.params", False),
        ({"mixed_precision_policy": "bf16"}, "precision.param", "bf16"),
        ({"mixed_precision_policy": {"param_dtype": torch.float16}}, "precision.param", "fp16"),
        ({"mixed_precision_policy": MIXED}, "precision.param", "bf16"),
        ({"mixed_precision_policy": MIXED}, "precision.reduce", "fp32"),
        ({"mixed_precision_policy": MIXED}, "precision.buffer", "auto"),
        ({"auto_wrap_policy": "transformer_based_wrap"}, "wrap.policy", "transformer"),
        ({"auto_wrap_policy": "no_wrap"}, "wrap.policy", "none"),
        ({"auto_wrap_policy": transformer_auto_wrap_policy}, "wrap.policy", "transformer"),
        ({"auto_wrap_policy": BY_LAYER}, "wrap.classes", ("Conv1d", "Linear")),
        ({"auto_wrap_policy": ModuleWrapPolicy({nn.Linear})}, "wrap.classes", ("Linear",)),
        ({"auto_wrap_policy": size_based_auto_wrap_policy}, "wrap.min_num_params", 100_000_000),
        ({"auto_wrap_policy": BY_SIZE}, "wrap.min_num_params", 7),
        ({"auto_wrap_policy": BY_PEFT}, "wrap.policy", "transformer"),
        ({"transformer_cls_names_to_wrap": ["Layer"]}, "wrap.classes", ("Layer",)),
        ({"ignored_modules": ".*head"}, "wrap.ignored_modules", ".*head"),
        ({"state_dict_type": StateDictType.SHARDED_STATE_DICT}, "checkpoint.state_dict", "sharded"),
        ({"state_dict_config": FullStateDictConfig()}, "checkpoint.state_dict", "full"),
        ({"state_dict_type": 3, "state_dict_config": FullStateDictConfig()}, "checkpoint.state_dict", "sharded"),
        ({"use_orig_params": False}, "params.use_orig", False),
        ({"sync_module_states": True}, "loading.sync_module_states", True),
        ({"cpu_ram_efficient_loading": True}, "loading.ram_efficient", True),
        ({"activation_checkpointing": True}, "activation.checkpointing", "full"),
    ],
    ids=keys_of,
)
def test_argument_sets_setting(assess, given, name, value):
    found = assess(plugin_object=given)
    assert found.ok, found.problems
    assert found.spec.get(name) == value
    assert found.spec.launch.distributed_type == "FSDP"
    if found.spec.asked(name):
        assert found.spec.origin(name).source == "FullyShardedDataParallelPlugin"


def custom_policy(module):
    return False


@pytest.mark.parametrize(
    ("given", "code", "part"),
    [
        ({"auto_wrap_policy": custom_policy}, "FSDP-E037", "custom_policy"),
        ({"ignored_modules": [nn.Linear(1, 1)]}, "FSDP-E037", "ignored_modules is list"),
        ({"param_init_fn": custom_policy}, "FSDP-E037", "param_init_fn is function"),
        ({"fsdp_version": 2, "reshard_after_forward": 2}, "FSDP-E037", "size of a group"),
        ({"mixed_precision_policy": MixedPrecision(_module_classes_to_ignore=[nn.Linear])}, "FSDP-E037", "['Linear']"),
        ({"mixed_precision_policy": MixedPrecision(_module_classes_to_ignore=[])}, "FSDP-E037", "_BatchNorm"),
        ({"sharding_strategy": "full_shrad"}, "FSDP-E101", "full_shard"),
        ({"auto_wrap_policy": "size_based_wrap"}, "FSDP-E142", "min_num_params"),
    ],
    ids=keys_of,
)
def test_unsupported_argument_is_error(problems, given, code, part):
    (problem,) = problems(plugin_object=given)
    assert problem.code == code and part in str(problem) and problem.fix
