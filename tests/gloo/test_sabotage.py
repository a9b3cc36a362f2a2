"""A run that does not do what was asked is never reported as applied. The same run unsabotaged is, in all settings."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gloo.cases_sabotage import report_of_sabotaged
from tests.support.json_schema import assert_valid
from tests.support.matrices import FSDP1_RACE
from tests.support.ranks import Ranks
from tests.support.tiny import parallel_config

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
    ("tensor changed", BOTH, SYNC, ("loading.sync_module_states",), ()),
    ("tensors zeroed", BOTH, SYNC, ("loading.sync_module_states",), ()),
    ("half of the optimizer", BOTH, {}, (), ("FSDP-E509",)),
    ("gathered copies", TWO, {}, (), ("FSDP-E504",)),
    ("step does nothing", BOTH, {}, (), ("FSDP-E510",)),
    ("gathered after backward", TWO, {}, ("sharding.strategy",), ()),
    ("native in some steps", BOTH, {}, ("activation.checkpointing",), ()),
    ("eval mode", BOTH, {}, (), ("FSDP-W516",)),
    ("eval mode, functional dropout", BOTH, {}, (), ("FSDP-W516",)),
    ("layers frozen", BOTH, {}, (), ("FSDP-W511",)),
    ("smaller batches", BOTH, {}, (), ("FSDP-W512",)),
    ("less accumulation", BOTH, {}, (), ("FSDP-W512",)),
    ("full checkpoint", BOTH, SHARDED, ("checkpoint.state_dict",), ()),
    ("native off in one", BOTH, {}, ("activation.checkpointing",), ()),
    ("native neutralized", BOTH, {}, ("activation.checkpointing",), ()),
    ("different models", BOTH, NO_SYNC, (), ("FSDP-W325",)),
    ("different models", BOTH, NO_SHARD | NO_SYNC, ("mesh.replicate",), ("FSDP-W325",)),
]
# The others need two minutes.
QUICK = {
    "unsharded MLPs",
    "autocast",
    "no sync in one",
    "checkpoint off in one",
    "tensor changed",
    "tensors zeroed",
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
    # A checkpoint may have changed the weights, too.
    status = "unobservable" if name in ("tensor changed", "tensors zeroed") else "differs"
    assert {setting: found["status"][setting] for setting in not_applied} == dict.fromkeys(not_applied, status)
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
