"""Fields that a script assigns to the plugin of an Accelerator are applied or refused."""

from __future__ import annotations

from dataclasses import fields
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.utils import FullyShardedDataParallelPlugin
from torch import nn
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    CPUOffloadPolicy,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp.wrap import lambda_auto_wrap_policy, size_based_auto_wrap_policy

import hf_fsdp_plugin as hfp
from hf_fsdp_plugin.integrations.accelerate.accelerator import init_accelerator
from hf_fsdp_plugin.integrations.accelerate.plugin import STATE_DICT_FIELDS, PlannedFsdpPlugin, update_fsdp_plugin_peft
from tests.support.parameter_ids import keys_of

Assignment = tuple[dict[str, Any], str, Any]
# Fields assigned together -> the setting and its value, or the code of the error.
pytestmark = pytest.mark.usefixtures("uninstalled")
APPLIED: list[Assignment] = [
    ({"fsdp_version": 1}, "fsdp.version", 1),
    ({"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP}, "sharding.strategy", "shard_grad_op"),
    ({"reshard_after_forward": False}, "sharding.strategy", "shard_grad_op"),
    ({"backward_prefetch": BackwardPrefetch.BACKWARD_POST}, "prefetch.backward", "post"),
    ({"mixed_precision_policy": torch.bfloat16}, "precision.param", "bf16"),
    ({"mixed_precision_policy": MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)}, "precision.reduce", "bf16"),
    ({"mixed_precision_policy": MixedPrecision(param_dtype=torch.bfloat16)}, "precision.param", "bf16"),
    ({"auto_wrap_policy": "transformer_based_wrap"}, "wrap.policy", "transformer"),
    ({"auto_wrap_policy": partial(size_based_auto_wrap_policy, min_num_params=7)}, "wrap.min_num_params", 7),
    ({"auto_wrap_policy": "size_based_wrap", "min_num_params": 7}, "wrap.policy", "size"),
    ({"cpu_offload": CPUOffload(offload_params=True)}, "offload.params", True),
    ({"cpu_offload": CPUOffloadPolicy(pin_memory=False)}, "offload.pin_memory", False),
    ({"cpu_offload": True}, "offload.params", True),
    ({"ignored_modules": ".*head"}, "wrap.ignored_modules", ".*head"),
    ({"limit_all_gathers": False}, "prefetch.limit_all_gathers", False),
    ({"use_orig_params": False}, "params.use_orig", False),
    ({"sync_module_states": True}, "loading.sync_module_states", True),
    ({"forward_prefetch": True}, "prefetch.forward", True),
    ({"activation_checkpointing": True}, "activation.checkpointing", "full"),
    ({"activation_checkpointing": True, "activation_checkpointing_offload": True}, "activation.offload", True),
    ({"transformer_cls_names_to_wrap": ["Layer"]}, "wrap.classes", ("Layer",)),
    ({"transformer_cls_names_to_wrap": ["Layer"]}, "wrap.policy", "transformer"),
    ({"min_num_params": 7}, "wrap.policy", "size"),
]
REFUSED = [
    ({"auto_wrap_policy": partial(lambda_auto_wrap_policy, lambda_fn=bool)}, "FSDP-E037"),
    ({"ignored_modules": [nn.Linear(1, 1)]}, "FSDP-E037"),
    ({"param_init_fn": print}, "FSDP-E037"),
    ({"mixed_precision_policy": MixedPrecisionPolicy(cast_forward_inputs=False)}, "FSDP-E037"),
    ({"mixed_precision_policy": MixedPrecision(keep_low_precision_grads=True)}, "FSDP-E037"),
    ({"mixed_precision_policy": 3}, "FSDP-E037"),
    ({"cpu_offload": object()}, "FSDP-E037"),
    ({"mixed_precision_policy": torch.float16}, "FSDP-E632"),
    ({"cpu_ram_efficient_loading": True}, "FSDP-E632"),
    ({"sharding_strategy": None}, "FSDP-E632"),
    ({"backward_prefetch": None}, "FSDP-E632"),
    ({"sharding_strategy": "full_shrad"}, "FSDP-E101"),
    ({"activation_checkpointing_offload": True}, "FSDP-E140"),
]


def plugin_of(**config: Any) -> Any:
    spec = {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2, **config}}
    return PlannedFsdpPlugin(hfp.load_spec(spec, environ={}))


def test_every_field_is_tested() -> None:
    tested = {name for assigned, *_ in [*APPLIED, *REFUSED] for name in assigned} | STATE_DICT_FIELDS
    assert tested == {field.name for field in fields(FullyShardedDataParallelPlugin)}


@pytest.mark.parametrize(("assigned", "name", "value"), APPLIED, ids=keys_of)
def test_assignment_changes_the_spec(assigned: dict[str, Any], name: str, value: Any) -> None:
    plugin = plugin_of(fsdp_sync_module_states=False)
    for field, given in assigned.items():
        setattr(plugin, field, given)
        assert getattr(plugin, field) is given
    plugin.spec_for(nn.Identity())
    assert plugin.spec.get(name) == value
    assert plugin.spec.origin(name).source == "FullyShardedDataParallelPlugin"


@pytest.mark.parametrize(("assigned", "code"), REFUSED, ids=keys_of)
def test_assignment_without_effect_is_refused(assigned: dict[str, Any], code: str) -> None:
    plugin = plugin_of()
    for field, given in assigned.items():
        setattr(plugin, field, given)
    with pytest.raises(hfp.SpecError, match=code):
        plugin.spec_for(nn.Identity())


def test_assignment_after_prepare_is_refused() -> None:
    plugin = plugin_of()
    plugin.spec_for(nn.Identity())
    plugin.forward_prefetch = plugin.forward_prefetch
    with pytest.raises(hfp.SpecError, match="FSDP-E632"):
        plugin.forward_prefetch = True
    assert not plugin.forward_prefetch


def test_assigned_setting_overrides_config_with_warning(capsys: pytest.CaptureFixture[str]) -> None:
    plugin = plugin_of(fsdp_forward_prefetch=False)
    plugin.forward_prefetch = True
    plugin.spec_for(nn.Identity())
    assert plugin.spec.prefetch.forward
    assert capsys.readouterr().err.count("[FSDP-W103]") == 1


def test_state_dict_type_may_be_assigned_at_any_time() -> None:
    plugin = plugin_of()
    plugin.state_dict_type = StateDictType.FULL_STATE_DICT
    plugin.min_num_params = 7
    plugin.spec_for(nn.Identity())
    assert plugin.state_dict_kind == "full"
    plugin.state_dict_type = "SHARDED_STATE_DICT"
    assert plugin.state_dict_kind == "sharded"
    plugin.state_dict_config, plugin.optim_state_dict_config = FullStateDictConfig(), FullOptimStateDictConfig()


class Model(nn.Module):
    """Two kinds of layers. The first is what the model itself names, as models of Transformers do."""

    _no_split_modules = ("Linear",)

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(2, 2), nn.LayerNorm(2)


def peft_policy() -> Any:
    pytest.importorskip("peft")
    from peft.utils.other import fsdp_auto_wrap_policy

    return fsdp_auto_wrap_policy(Model())


@pytest.mark.parametrize(
    ("config", "overridden"),
    [
        ({}, []),
        ({"auto_wrap_policy": "NO_WRAP"}, ["wrap.policy"]),
        ({"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 7}, ["wrap.policy"]),
        ({"transformer_layer_cls_to_wrap": "LayerNorm"}, ["wrap.classes"]),
        ({"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "transformer_layer_cls_to_wrap": "Linear"}, []),
    ],
    ids=keys_of,
)
def test_assigned_policy_of_peft_overrides_config_with_warning(
    config: dict[str, Any], overridden: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    plugin = plugin_of(**config)
    plugin.auto_wrap_policy = peft_policy()
    plugin.spec_for(nn.Identity())
    assert (plugin.spec.wrap.policy, plugin.spec.wrap.classes) == ("transformer", ("Linear",))
    warnings = [problem for problem in plugin.spec.problems if problem.code == "FSDP-W103"]
    assert [problem.setting for problem in warnings] == overridden
    printed = capsys.readouterr().err
    assert all("auto_wrap_policy=peft.utils.other.fsdp_auto_wrap_policy" in problem.message for problem in warnings)
    assert all(str(problem) in printed for problem in warnings)
    plugin.auto_wrap_policy = peft_policy()  # for a second model


@pytest.mark.parametrize(
    ("config", "policy", "is_noted"),
    [
        ({}, "transformer", False),
        ({"auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}, "transformer", False),
        ({"auto_wrap_policy": "NO_WRAP"}, "none", True),
        ({"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 7}, "size", True),
    ],
    ids=keys_of,
)
def test_policy_of_the_trainer_for_peft_is_a_default(
    config: dict[str, Any], policy: str, is_noted: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    plugin, given = plugin_of(**config), peft_policy()
    accelerator = SimpleNamespace(state=SimpleNamespace(fsdp_plugin=plugin), scaler=None)

    def assign(model: Any, accelerator: Any) -> None:
        accelerator.state.fsdp_plugin.auto_wrap_policy = given

    for _ in range(2):  # train() may be called again
        update_fsdp_plugin_peft(assign, Model(), accelerator)
        plugin.spec_for(nn.Identity())
    assert plugin.spec.wrap.policy == policy
    assert capsys.readouterr().err.count("[FSDP-N680]") == is_noted


def test_policy_of_the_script_overrides_that_of_the_trainer(capsys: pytest.CaptureFixture[str]) -> None:
    plugin = plugin_of(auto_wrap_policy="NO_WRAP")
    plugin.auto_wrap_policy = partial(size_based_auto_wrap_policy, min_num_params=7)
    accelerator = SimpleNamespace(state=SimpleNamespace(fsdp_plugin=plugin), scaler=None)
    update_fsdp_plugin_peft(lambda *_: pytest.fail("assigned"), Model(), accelerator)
    plugin.spec_for(nn.Identity())
    assert plugin.spec.wrap.policy == "size"
    printed = capsys.readouterr().err
    assert (printed.count("[FSDP-N680]"), printed.count("[FSDP-W103]")) == (0, 1)


class Stub(SimpleNamespace):
    """An accelerator with a few attributes, of which there can be weak references."""


def test_assignment_to_the_plugin_of_the_script_is_applied() -> None:
    hfp.install()
    own: Any = FullyShardedDataParallelPlugin(fsdp_version=2)
    passed: dict[str, Any] = {}

    def original(fsdp_plugin: Any = None, mixed_precision: Any = None, dynamo_plugin: Any = None) -> None:
        passed.update(fsdp_plugin=fsdp_plugin)

    init_accelerator(original, Stub(num_processes=2, scaler=None), fsdp_plugin=own)
    assert passed["fsdp_plugin"] is own
    own.forward_prefetch = True
    own.spec_for(nn.Identity())
    assert own.spec.prefetch.forward
