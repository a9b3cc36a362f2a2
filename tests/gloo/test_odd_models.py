"""Legitimate but unusual models train with every layer as a unit, and their report has no false alarm."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.gloo.cases_odd_models import report_of_odd, resume_registers, train_registers
from tests.support.ranks import Ranks
from tests.support.tiny import parallel_config
from tests.support.training import assert_same_weights

CHECKPOINT = {"fsdp_activation_checkpointing": True}
SIZE = {"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP", "fsdp_min_num_params": 1}
LINEAR = {"fsdp_transformer_layer_cls_to_wrap": "Linear"}
BF16 = {"mixed_precision": "bf16"}

CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("fp64", LINEAR, {}),
    ("linear", {"fsdp_auto_wrap_policy": "NO_WRAP"}, {}),
    ("linear", SIZE, {}),
    ("linear", LINEAR, {}),
    ("odd", SIZE, {}),
    ("complex", {**LINEAR, "fsdp_ignored_modules": "filter"}, {}),
    ("empty", LINEAR, {}),
    ("empty", SIZE, {}),
    ("scalars", {"fsdp_auto_wrap_policy": "NO_WRAP"}, {}),
    ("scalars", {**SIZE, "fsdp_offload_params": True}, BF16),
    ("t5", CHECKPOINT, {}),
    ("t5", {**CHECKPOINT, **SIZE}, {}),
    ("t5", {**CHECKPOINT, **SIZE}, BF16),
    ("vit", SIZE, BF16),
    ("vit", {}, BF16),
]


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(("name", "settings", "top"), CASES)
def test_odd_model_trains_without_false_alarm(
    two_ranks: Ranks, name: str, settings: dict[str, Any], top: dict[str, Any], version: int
) -> None:
    config = {**parallel_config("full_shard", version, 2, **settings), **top}
    found = two_ranks.run(report_of_odd, config, name)[0]
    assert [row for row in found["settings"] if row["status"] == "differs"] == []
    assert all(norm > 0 for norm in found["norms"])


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("state_dict", ["FULL_STATE_DICT", "SHARDED_STATE_DICT"])
def test_parameter_without_elements_is_resumed(two_ranks: Ranks, state_dict: str, version: int, tmp_path: Path) -> None:
    layers = {"fsdp_transformer_layer_cls_to_wrap": "Layer", "fsdp_state_dict_type": state_dict}
    config = parallel_config("full_shard", version, 2, **layers)
    weights = two_ranks.run(resume_registers, config, str(tmp_path / "state"))[0]
    assert_same_weights(weights, train_registers())
