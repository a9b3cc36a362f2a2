"""Backward works for units whose outputs are in mappings that FSDP does not look into."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gloo import cases_outputs as cases
from tests.support.ranks import Ranks
from tests.support.tiny import parallel_config

UNITS: dict[str, dict[str, Any]] = {
    "layers": {"fsdp_transformer_layer_cls_to_wrap": "MappingLayer"},
    "root": {"fsdp_auto_wrap_policy": "NO_WRAP"},
    "checkpointed": {"fsdp_transformer_layer_cls_to_wrap": "MappingLayer", "fsdp_activation_checkpointing": True},
}


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("units", UNITS)
@pytest.mark.parametrize("calls_inner", [False, True], ids=["model", "unwrapped"])
def test_models_that_return_mappings_train_as_one_process(
    two_ranks: Ranks, version: int, units: str, calls_inner: bool
) -> None:
    config = parallel_config("full_shard", version, 2, **UNITS[units])
    found, expected = two_ranks.run(cases.train, config, calls_inner=calls_inner)[0]
    assert found == pytest.approx(expected, rel=1e-5)
    assert len(set(expected)) == cases.NUM_STEPS
