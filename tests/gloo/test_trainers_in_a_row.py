"""Trials of a search, a curriculum and a given optimizer train like a Trainer without FSDP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.gloo import cases_trainers_in_a_row as cases
from tests.support.ranks import RankError, Ranks


def fsdp(version: int, **settings: Any) -> dict[str, Any]:
    config = {"fsdp_version": version, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"], **settings}
    return {"fsdp": "full_shard auto_wrap", "fsdp_config": config}


def unsharded(one_rank: Ranks, case: Any, *args: Any) -> Any:
    return one_rank.run(case, *args)[0]


@pytest.mark.parametrize("version", [1, 2])
def test_trials_start_from_fresh_weights(two_ranks: Ranks, tmp_path: Path, version: int) -> None:
    result = two_ranks.run(cases.search, str(tmp_path), [1e-3, 5e-3, 1e-3], **fsdp(version))[0]
    first, other, last = result["runs"]
    assert first == last
    assert other[0][0] == first[0][0]
    assert other[0][-1] != first[0][-1]
    if version == 2:  # FSDP1 keeps the models of earlier trials in memory
        assert result["alive"] == [0, 0, 0]


@pytest.mark.parametrize("version", [1, 2])
def test_search_with_optuna(two_ranks: Ranks, tmp_path: Path, version: int) -> None:
    pytest.importorskip("optuna")
    objectives = two_ranks.run(cases.search_with_optuna, str(tmp_path), **fsdp(version))[0]
    first, second = objectives[: len(objectives) // 2], objectives[len(objectives) // 2 :]
    assert first and first == second


@pytest.mark.parametrize("version", [1, 2])
def test_second_trainer_on_the_same_variable(one_rank: Ranks, two_ranks: Ranks, tmp_path: Path, version: int) -> None:
    expected = unsharded(one_rank, cases.train_in_a_row, str(tmp_path / "one"))
    result = two_ranks.run(cases.train_in_a_row, str(tmp_path / "two"), **fsdp(version))[0]
    assert result == [pytest.approx(run, rel=1e-5) for run in expected]


@pytest.mark.parametrize("evaluates", [False, True])
@pytest.mark.parametrize("version", [1, 2])
def test_given_optimizer_updates_the_shards(
    one_rank: Ranks, two_ranks: Ranks, tmp_path: Path, version: int, evaluates: bool
) -> None:
    expected = unsharded(one_rank, cases.train_given, str(tmp_path / "one"), False)
    result = two_ranks.run(cases.train_given, str(tmp_path / "two"), evaluates, **fsdp(version))[0]
    assert result == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("version", [1, 2])
def test_optimizer_of_other_weights_is_refused(two_ranks: Ranks, tmp_path: Path, version: int) -> None:
    with pytest.raises(RankError, match="FSDP-E604"):
        two_ranks.run(cases.train_with_foreign_optimizer, str(tmp_path), **fsdp(version))
