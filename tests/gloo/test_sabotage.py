"""A run that does not do what was asked is never reported as applied. The same run unsabotaged is, in all settings."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

import hf_fsdp_plugin as hfp
from hf_fsdp_plugin.backends.loading import weight_loader
from hf_fsdp_plugin.backends.sharding import fsdp1, fsdp2
from hf_fsdp_plugin.torch_private.functions import ActivationWrapper, CheckpointWrapper
from tests.support.json_schema import assert_valid
from tests.support.matrices import FSDP1_RACE
from tests.support.ranks import Ranks
from tests.support.tiny import MODELS, global_batch, my_part, parallel_config
from tests.support.training import fresh_accelerator

NUM_STEPS = 6


@dataclass
class Live:
    """A run that is being sabotaged."""

    accelerator: Any
    model: Any
    optimizer: Any
    context: Callable[[], Any] = nullcontext
    before_step: dict[int, Callable[[], None]] = field(default_factory=dict)
    cleanup: list[ExitStack] = field(default_factory=list)

    @property
    def units(self) -> list[Any]:
        """The modules of all units except the root."""
        return [m for m in self.model.modules() if isinstance(m, (FSDP, FSDPModule)) and m is not self.model]

    def modules(self, kind: type) -> list[Any]:
        return [module for module in self.model.modules() if isinstance(module, kind)]

    def named(self, suffix: str) -> list[Any]:
        return [module for name, module in self.model.named_modules() if name.endswith(suffix)]


def _unsharded_mlp(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Shard a unit, except the MLP of a layer."""
    module = args[0]
    if hasattr(module, "mlp"):
        ignored = list(module.mlp.parameters())
        if "ignored_states" in kwargs:
            kwargs["ignored_states"] = [*kwargs["ignored_states"], *ignored]
        else:
            kwargs["ignored_params"] = {*kwargs["ignored_params"], *ignored}
    return original(*args, **kwargs)


class _UnshardedMlps(FSDP):
    def __init__(self, module: nn.Module, **kwargs: Any) -> None:
        _unsharded_mlp(super().__init__, module, **kwargs)


class _WithoutAttention(FSDP):
    def __new__(cls, module: nn.Module, **kwargs: Any) -> Any:
        return module if type(module).__name__ == "LlamaAttention" else FSDP(module, **kwargs)


def _fill_if_wrapped(original: Callable[..., None], unit: Any, *args: Any) -> None:
    if isinstance(unit, FSDP):
        original(unit, *args)


def _fully_shard_without_attention(modules: Any, **kwargs: Any) -> None:
    if type(modules).__name__ != "LlamaAttention":
        fully_shard(modules, **kwargs)


class _ExtraUnit(FSDP):
    def __new__(cls, module: Any, **kwargs: Any) -> Any:
        if type(module).__name__ == "LlamaDecoderLayer":
            module.mlp = FSDP(module.mlp, **kwargs)
        return FSDP(module, **kwargs)


def _fully_shard_extra(modules: Any, **kwargs: Any) -> None:
    if type(modules).__name__ == "LlamaDecoderLayer":
        fully_shard(modules.mlp, **kwargs)
    fully_shard(modules, **kwargs)


def _without_broadcast(loader: Any, tensor: torch.Tensor) -> torch.Tensor:
    moved: torch.Tensor = loader._on_device(tensor)
    return moved


def _transposed_mesh(plan: Any) -> Any:
    ranks = torch.arange(plan.world_size).view(plan.mesh.shard, plan.mesh.replicate).t().contiguous()
    return DeviceMesh("cpu", ranks, mesh_dim_names=("dp_replicate", "dp_shard"))


PREPARING: dict[str, dict[tuple[Any, str], Any]] = {
    "unsharded MLPs": {
        (fsdp1, "FSDP"): _UnshardedMlps,
        (fsdp2, "fully_shard"): partial(_unsharded_mlp, fully_shard),
    },
    "inner class not wrapped": {
        (fsdp1, "FSDP"): _WithoutAttention,
        (fsdp1, "_fill"): partial(_fill_if_wrapped, fsdp1._fill),
        (fsdp2, "fully_shard"): _fully_shard_without_attention,
    },
    "extra unit": {(fsdp1, "FSDP"): _ExtraUnit, (fsdp2, "fully_shard"): _fully_shard_extra},
    "no broadcast": {(weight_loader.WeightLoader, "_broadcast"): _without_broadcast},
    "transposed mesh": {(fsdp1, "device_mesh"): _transposed_mesh, (fsdp2, "device_mesh"): _transposed_mesh},
}
"""Sabotages of the preparation: what is replaced, and by what."""


def replace_linear(run: Live) -> None:
    """Replace a Linear by an unsharded copy, in whose place the sharded one is no longer used."""
    mlp = run.named("layers.1.mlp")[0] if run.named("layers.1.mlp") else run.named("mlp")[1]
    mlp.down_proj = nn.Linear(48, 32, bias=False)


def cast_to_bf16(run: Live) -> None:
    run.model.to(torch.bfloat16)


def autocast(run: Live) -> None:
    run.context = lambda: torch.autocast(run.accelerator.device.type, torch.bfloat16)


def other_reduce_dtype(run: Live) -> None:
    def change() -> None:
        unit = run.units[1]
        if isinstance(unit, FSDP):
            unit._handle._reduce_dtype = torch.float16  # type: ignore[union-attr]
        else:
            unit._get_fsdp_state()._fsdp_param_group._reduce_dtype = torch.float16

    run.before_step[1] = change


def _no_sync(units: list[Any]) -> None:
    for unit in units:
        if isinstance(unit, FSDP):
            unit._sync_gradients = False
        else:
            unit.set_requires_gradient_sync(False, recurse=False)


def no_sync_in_one_layer(run: Live) -> None:
    _no_sync(run.units[:1])


def no_sync_in_all(run: Live) -> None:
    _no_sync([*run.units, run.model])


def no_all_reduce(run: Live) -> None:
    for unit in [*run.units, run.model]:
        unit.set_requires_all_reduce(False, recurse=False)


def prefetch_wrong_unit(run: Live) -> None:
    run.units[0].set_modules_to_forward_prefetch([run.units[2]])


def remove_prefetch_hooks(run: Live) -> None:
    for unit in run.units:
        for key, hook in list(unit._forward_pre_hooks.items()):
            if "_unshard_after_backward" in getattr(hook, "__qualname__", ""):
                del unit._forward_pre_hooks[key]


def _direct(function: Any, *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def checkpoint_neutralized_in_one(run: Live) -> None:
    run.modules(CheckpointWrapper)[0].checkpoint_fn = _direct


def checkpoint_neutralized_in_all(run: Live) -> None:
    for wrapper in run.modules(CheckpointWrapper):
        wrapper.forward = wrapper._checkpoint_wrapped_module.forward


def _layers(run: Live) -> list[Any]:
    return [module for module in run.model.modules() if "LlamaDecoderLayer" in type(module).__name__]


def native_off_in_one(run: Live) -> None:
    _layers(run)[0].gradient_checkpointing = False


def no_offload_in_others(run: Live) -> None:
    for wrapper in run.modules(ActivationWrapper)[1:]:
        if not isinstance(wrapper, CheckpointWrapper):
            wrapper.forward = wrapper._checkpoint_wrapped_module.forward


def half_of_the_parameters(run: Live) -> None:
    for group in run.optimizer.param_groups:
        del group["params"][::2]


def gathered_copies(run: Live) -> None:
    def change() -> None:
        for unit in run.units:
            unit.unshard()
        run.optimizer.param_groups[0]["params"] = list(run.model.parameters())
        for unit in run.units:
            unit.reshard()

    run.before_step[1] = change


def step_does_nothing(run: Live) -> None:
    optimizer: Any = run.optimizer.optimizer
    for group in optimizer.param_groups:
        group["weight_decay"] = 0.0

    def clear_gradients(*args: Any) -> None:
        for parameter in run.model.parameters():
            if parameter.grad is not None:
                parameter.grad.zero_()

    optimizer.register_step_pre_hook(clear_gradients)


def full_checkpoint_between(run: Live) -> None:
    from torch.distributed.fsdp import StateDictType

    plugin = run.accelerator.state.fsdp_plugin

    def save(kind: StateDictType) -> None:
        plugin.state_dict_type = kind
        run.accelerator.save_state(f"{tempfile.gettempdir()}/sabotaged")  # the ranks share the folder

    run.before_step[1] = partial(save, StateDictType.FULL_STATE_DICT)
    run.before_step[2] = partial(save, StateDictType.SHARDED_STATE_DICT)


def uncompiled_in_one(run: Live) -> None:
    _layers(run)[0]._compiled_call_impl = None


def uncompiled_in_all(run: Live) -> None:
    for layer in _layers(run):
        layer._compiled_call_impl = None


def dynamo_disabled(run: Live) -> None:
    stack = ExitStack()
    stack.enter_context(patch.object(torch._dynamo.config, "disable", True))
    run.cleanup.append(stack)


def no_reshard_after_backward(run: Live) -> None:
    run.model.set_reshard_after_backward(False)


def checkpointing_in_some_steps(run: Live) -> None:
    run.model.gradient_checkpointing_enable()
    run.before_step[2] = run.model.gradient_checkpointing_disable


def training_in_eval_mode(run: Live) -> None:
    run.model.eval()


def training_in_eval_mode_with_dropout(run: Live) -> None:
    run.model.eval()
    for layer in _layers(run):
        layer.dropout = nn.Dropout(0.1)


def training_in_eval_mode_with_functional_dropout(run: Live) -> None:
    """The attention passes its attribute to a function; there is no dropout module."""
    run.model.eval()
    for module in run.model.modules():
        if "attention_dropout" in vars(module):
            module.attention_dropout = 0.1


SABOTAGES: dict[str, Callable[[Live], None]] = {
    "Linear replaced": replace_linear,
    "cast to bf16": cast_to_bf16,
    "autocast": autocast,
    "reduce dtype": other_reduce_dtype,
    "no sync in one": no_sync_in_one_layer,
    "no sync in all": no_sync_in_all,
    "no all-reduce": no_all_reduce,
    "wrong prefetch": prefetch_wrong_unit,
    "prefetch hooks removed": remove_prefetch_hooks,
    "checkpoint off in one": checkpoint_neutralized_in_one,
    "checkpoint off in all": checkpoint_neutralized_in_all,
    "native off in one": native_off_in_one,
    "offload off in others": no_offload_in_others,
    "half of the optimizer": half_of_the_parameters,
    "gathered copies": gathered_copies,
    "step does nothing": step_does_nothing,
    "full checkpoint": full_checkpoint_between,
    "uncompiled in one": uncompiled_in_one,
    "uncompiled in all": uncompiled_in_all,
    "dynamo disabled": dynamo_disabled,
    "gathered after backward": no_reshard_after_backward,
    "native in some steps": checkpointing_in_some_steps,
    "eval mode": training_in_eval_mode_with_dropout,
    "eval mode, functional dropout": training_in_eval_mode_with_functional_dropout,
    "eval mode without dropout": training_in_eval_mode,
}
"""Sabotages of a prepared run."""


BOTH, ONE, TWO = (1, 2), (1,), (2,)

INNER = {"fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer,LlamaAttention"}

CHECKPOINT = {"fsdp_activation_checkpointing": True}

OFFLOAD = {**CHECKPOINT, "fsdp_activation_checkpointing_offload": True}

SYNC = {"fsdp_sync_module_states": True}

NO_SYNC = {"fsdp_sync_module_states": False, "fsdp_cpu_ram_efficient_loading": False}

SHARDED = {"fsdp_state_dict_type": "SHARDED_STATE_DICT"}

NO_SHARD = {"strategy": "no_shard"}


# Sabotage, versions, settings of fsdp_config, settings that must not be applied, codes of problems.
MATRIX: list[tuple[str, tuple[int, ...], dict[str, Any], tuple[str, ...], tuple[str, ...]]] = [
    ("unsharded MLPs", BOTH, {}, ("wrap.policy", "wrap.classes", "sharding.strategy"), ()),
    ("Linear replaced", BOTH, {}, ("wrap.policy", "wrap.classes", "sharding.strategy"), ()),
    ("inner class not wrapped", BOTH, INNER, ("wrap.policy", "wrap.classes"), ()),
    ("extra unit", BOTH, {}, ("wrap.policy", "wrap.classes"), ()),
    ("cast to bf16", BOTH, {}, ("precision.param",), ()),
    ("autocast", BOTH, {}, ("precision.param",), ()),
    ("reduce dtype", BOTH, {}, ("precision.reduce",), ()),
    ("no sync in one", TWO, {}, ("sharding.strategy",), ()),
    ("no sync in all", TWO, {}, ("sharding.strategy",), ()),
    # Under FSDP1, a sharded strategy raises an error in the optimizer step.
    ("no sync in one", BOTH, NO_SHARD, ("mesh.replicate",), ()),
    ("no sync in all", BOTH, NO_SHARD, ("mesh.replicate",), ()),
    ("wrong prefetch", TWO, {"fsdp_forward_prefetch": True}, ("prefetch.forward",), ()),
    ("prefetch hooks removed", TWO, {"fsdp_backward_prefetch": "BACKWARD_POST"}, ("prefetch.backward",), ()),
    ("checkpoint off in one", BOTH, CHECKPOINT, ("activation.checkpointing",), ()),
    ("checkpoint off in all", BOTH, CHECKPOINT, ("activation.checkpointing",), ()),
    ("offload off in others", BOTH, OFFLOAD, ("activation.offload",), ()),
    ("no broadcast", BOTH, SYNC, ("loading.sync_module_states",), ()),
    ("half of the optimizer", BOTH, {}, (), ("FSDP-E509",)),
    ("gathered copies", TWO, {}, (), ("FSDP-E504",)),
    ("step does nothing", BOTH, {}, (), ("FSDP-E510",)),
    ("gathered after backward", TWO, {}, ("sharding.strategy",), ()),
    ("native in some steps", BOTH, {}, ("activation.checkpointing",), ()),
    ("eval mode", BOTH, {}, (), ("FSDP-W516",)),
    ("eval mode, functional dropout", BOTH, {}, (), ("FSDP-W516",)),
    ("full checkpoint", BOTH, SHARDED, ("checkpoint.state_dict",), ()),
    ("native off in one", BOTH, {}, ("activation.checkpointing",), ()),
    ("different models", BOTH, NO_SYNC, (), ("FSDP-W325",)),
    ("different models", BOTH, NO_SHARD | NO_SYNC, ("mesh.replicate",), ("FSDP-W325",)),
]

# The others need two minutes.
QUICK = {
    "unsharded MLPs",
    "autocast",
    "no sync in one",
    "checkpoint off in one",
    "half of the optimizer",
    "gathered after backward",
    "native in some steps",
    "eval mode",
    "eval mode, functional dropout",
}

CASES = [
    pytest.param(
        name,
        version,
        *rest,
        id=f"{name}-{version}" + ("-no_shard" if "strategy" in rest[0] else ""),
        marks=[
            *([] if name in QUICK else [pytest.mark.slow]),
            *([FSDP1_RACE] if (name, version) == ("half of the optimizer", 1) else []),
        ],
    )
    for name, versions, *rest in MATRIX
    for version in versions
]


def _train(run: Live) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for step in range(NUM_STEPS):
        run.before_step.get(step, lambda: None)()
        batch = my_part(global_batch(step), rank, world_size)
        with run.context():
            loss = run.model(**batch).loss
        run.accelerator.backward(loss)
        run.optimizer.step()
        run.optimizer.zero_grad()


def report_of_sabotaged(config: dict[str, Any], sabotage: str | None = None, model_name: str = "llama") -> Any:
    """Train, and return the status of each setting, the reasons of those that differ, and the codes of problems."""
    while_preparing = PREPARING.get(sabotage or "", {})
    with ExitStack() as stack:
        for target, replacement in while_preparing.items():
            stack.enter_context(patch.object(*target, replacement))
        is_native = (sabotage or "").startswith("native") and sabotage != "native in some steps"
        accelerator = fresh_accelerator(config, gradient_checkpointing=True) if is_native else fresh_accelerator(config)
        model = MODELS[model_name]()
        if is_native:
            model.gradient_checkpointing_enable()  # type: ignore[operator]
        if sabotage == "different models":
            next(model.parameters()).data.add_(dist.get_rank())
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
        run = Live(accelerator, model, optimizer)
        if sabotage in SABOTAGES:
            SABOTAGES[sabotage](run)
        elif sabotage not in (None, "native", "different models") and not while_preparing:
            raise KeyError(sabotage)
        _train(run)
        found = hfp.report(accelerator).to_json()
        for changed in run.cleanup:
            changed.close()
    return {
        "status": {row["setting"]: row["status"] for row in found["settings"]},
        "reasons": {row["setting"]: (row["observed"], row["reason"]) for row in found["settings"]},
        "codes": sorted({problem["code"] for problem in found["problems"] if problem["severity"] != "note"}),
        "report": found,
    }


@pytest.mark.parametrize(("name", "version", "settings", "not_applied", "codes"), CASES)
def test_sabotaged_setting_is_not_applied(
    two_ranks: Ranks,
    name: str,
    version: int,
    settings: dict[str, Any],
    not_applied: tuple[str, ...],
    codes: tuple[str, ...],
) -> None:
    config = parallel_config(version=version, world_size=2, **{"strategy": "full_shard", **settings})
    found = two_ranks.run(report_of_sabotaged, config, name)[0]
    assert {setting: found["status"][setting] for setting in not_applied} == dict.fromkeys(not_applied, "differs")
    assert set(codes) <= set(found["codes"])
    assert_valid("report", found["report"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "version", "setting"),
    [
        ("transposed mesh", 1, "mesh.shard"),
        ("transposed mesh", 2, "mesh.shard"),
        ("no all-reduce", 2, "mesh.replicate"),
    ],
)
def test_sabotaged_mesh_is_not_applied(four_ranks: Ranks, name: str, version: int, setting: str) -> None:
    found = four_ranks.run(report_of_sabotaged, parallel_config("hybrid_shard", version, 4), name)[0]
    assert found["status"][setting] == "differs"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["uncompiled in one", "uncompiled in all", "dynamo disabled"])
def test_uncompiled_layers_are_not_applied(two_ranks: Ranks, name: str) -> None:
    config = {**parallel_config("full_shard", 2, 2), "dynamo_config": {"dynamo_backend": "EAGER"}}
    assert two_ranks.run(report_of_sabotaged, config, name)[0]["status"]["launch.dynamo_config"] == "differs"


@pytest.mark.parametrize("version", BOTH)
@pytest.mark.parametrize(
    "settings",
    [
        OFFLOAD | SYNC | INNER,
        *(pytest.param(settings, marks=pytest.mark.slow) for settings in ({}, CHECKPOINT, SHARDED, NO_SHARD)),
    ],
)
def test_unsabotaged_run_is_applied(two_ranks: Ranks, version: int, settings: dict[str, Any]) -> None:
    config = parallel_config(version=version, world_size=2, **{"strategy": "full_shard", **settings})
    found = two_ranks.run(report_of_sabotaged, config)[0]
    assert [found["reasons"][name] for name, status in found["status"].items() if status == "differs"] == []
    assert found["codes"] == []


@pytest.mark.parametrize("version", BOTH)
def test_eval_mode_without_dropout_is_no_problem(two_ranks: Ranks, version: int) -> None:
    found = two_ranks.run(report_of_sabotaged, parallel_config("full_shard", version, 2), "eval mode without dropout")[
        0
    ]
    assert found["codes"] == [] and "differs" not in found["status"].values()


@pytest.mark.parametrize("version", BOTH)
def test_unsabotaged_native_checkpointing_is_applied(two_ranks: Ranks, version: int) -> None:
    found = two_ranks.run(report_of_sabotaged, parallel_config("full_shard", version, 2), "native")[0]
    assert found["status"]["activation.checkpointing"] == "applied" and found["codes"] == []


@pytest.mark.slow
@pytest.mark.parametrize("version", BOTH)
def test_unsabotaged_mesh_is_applied(four_ranks: Ranks, version: int) -> None:
    found = four_ranks.run(report_of_sabotaged, parallel_config("hybrid_shard", version, 4))[0]
    assert "differs" not in found["status"].values() and found["codes"] == []
