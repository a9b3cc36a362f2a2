"""Gradients that are reduced over the replicas at the last micro-batch only, on a mesh of two replicas."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

import hf_fsdp_plugin as hfp
from hf_fsdp_plugin.problems import SpecError
from tests.gloo import test_unused_parameters as unused
from tests.gloo.test_communication import check as check_collectives
from tests.support.matrices import slow
from tests.support.ranks import Ranks
from tests.support.tiny import parallel_config, tiny_llama
from tests.support.trainer_runs import losses, make_trainer
from tests.support.training import assert_same_training, reference, train

KEY = "sharding.reduce_replicas_at_last_micro_batch"
LATE = {"fsdp_reduce_replicas_at_last_micro_batch": True}
reference_of = cache(reference)


def config_of(**settings: Any) -> dict[str, Any]:
    return parallel_config("hybrid_shard", 2, 4, **LATE, **settings)


@pytest.mark.parametrize("loop", [{}, {"no_sync": "model"}], ids=["accumulate", "no_sync"])
def test_late_reduction_matches_single_process(four_ranks: Ranks, loop: dict[str, Any]) -> None:
    found = four_ranks.run(train, "llama", config_of(), accumulation=2, **loop)[0]
    assert_same_training(found, reference_of("llama"))
    rows = {row["setting"]: row for row in found["report"]["settings"]}
    assert (rows[KEY]["observed"], rows[KEY]["status"]) == (True, "applied")
    assert rows["mesh.replicate"]["status"] == rows["sharding.strategy"]["status"] == "applied"


@pytest.mark.parametrize("loop", [{}, slow({"sync_each_batch": True})], ids=["accumulate", "sync_each_batch"])
def test_replicas_communicate_once_per_step(four_ranks: Ranks, loop: dict[str, Any]) -> None:
    check_collectives(four_ranks, "llama", {**config_of(), "mixed_precision": "bf16"}, accumulation=2, **loop)


@pytest.mark.parametrize("name", [slow(name) for name in unused.USES if name != "layer drop"] + ["layer drop"])
def test_units_of_one_micro_batch_keep_their_gradients(two_ranks: Ranks, name: str) -> None:
    unused.check(two_ranks, unused.config_of(2, {**unused.LAYERS, **LATE}, "no_shard"), name, 3)


def train_with_trainer(folder: str, settings: dict[str, Any]) -> tuple[list[float], list[str]]:
    """Losses, and the statuses of the key in the report."""
    config = {"version": 2, "dp_replicate_size": 2, "size": 2, **settings}
    trainer = make_trainer(
        folder, fsdp="hybrid_shard auto_wrap", fsdp_config=config, gradient_accumulation_steps=2,
        per_device_train_batch_size=1,
    )  # fmt: skip
    trainer.train()
    rows = hfp.report(trainer).to_json()["settings"]
    return losses(trainer), [row["status"] for row in rows if row["setting"] == KEY]


def test_trainer_reduces_replicas_late(four_ranks: Ranks, tmp_path: Path) -> None:
    found, status = four_ranks.run(train_with_trainer, str(tmp_path), LATE)[0]
    expected, _ = four_ranks.run(train_with_trainer, str(tmp_path), {})[0]
    assert found == pytest.approx(expected, rel=1e-6)
    assert status == ["applied"]


def test_late_reduction_without_replicas_is_refused() -> None:
    for version, strategy in ((1, "hybrid_shard"), (2, "full_shard")):
        with pytest.raises(SpecError) as refused:
            spec = hfp.load_spec(parallel_config(strategy, version, 2, **LATE), environ={})
            hfp.resolve(spec, tiny_llama(), world_size=2)
        assert [problem.code for problem in refused.value.problems] == ["FSDP-E170"]
