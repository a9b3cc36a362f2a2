"""The fields of the planned plugin are torch's objects, which code that shards models itself reads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accelerate.utils import FullyShardedDataParallelPlugin
from torch.distributed.fsdp import CPUOffload, CPUOffloadPolicy, MixedPrecision, MixedPrecisionPolicy, ShardingStrategy

import hf_fsdp_plugin as hfp
from hf_fsdp_plugin.integrations.accelerate.plugin import PlannedFsdpPlugin
from tests.support.model_families import on_meta


def plugin_of(version: int, mixed_precision: str = "no", **settings: Any) -> Any:
    config = {"fsdp_version": version, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", **settings}
    spec = {"distributed_type": "FSDP", "use_cpu": True, "mixed_precision": mixed_precision, "fsdp_config": config}
    return PlannedFsdpPlugin(hfp.load_spec(spec, environ={}))


def test_precision_is_a_policy_of_the_version() -> None:
    assert plugin_of(1).mixed_precision_policy is None
    for version, kind in ((1, MixedPrecision), (2, MixedPrecisionPolicy)):
        policy = plugin_of(version, "bf16").mixed_precision_policy
        assert isinstance(policy, kind)
        assert (policy.param_dtype, policy.reduce_dtype) == (torch.bfloat16, torch.float32)


def test_offload_on_cpu_ranks_pins_nothing() -> None:
    assert plugin_of(1, fsdp_offload_params=True).cpu_offload == CPUOffload(offload_params=False)
    assert plugin_of(2, fsdp_offload_params=True).cpu_offload == CPUOffloadPolicy(pin_memory=False)
    assert plugin_of(1, fsdp_sharding_strategy="SHARD_GRAD_OP").sharding_strategy == ShardingStrategy.SHARD_GRAD_OP
    assert not plugin_of(1, fsdp_sync_module_states=True).sync_module_states


@pytest.mark.parametrize(
    ("name", "units"),
    [
        ("llama", ["model.layers.0", "model.layers.1"]),
        ("bert", ["bert.embeddings", "bert.encoder.layer.0", "bert.encoder.layer.1"]),
    ],
)
def test_wrap_policy_selects_units_of_each_model(name: str, units: list[str]) -> None:
    plugin = plugin_of(1, fsdp_transformer_layer_cls_to_wrap="LlamaDecoderLayer", fsdp_ignored_modules="lm_head")
    assert isinstance(plugin, FullyShardedDataParallelPlugin)
    model = on_meta(name)
    plugin.set_auto_wrap_policy(model)
    policy = plugin.auto_wrap_policy
    assert [n for n, m in model.named_modules() if policy(module=m, recurse=False, nonwrapped_numel=0)] == units
    assert plugin.ignored_modules == ([model.lm_head] if name == "llama" else None)
