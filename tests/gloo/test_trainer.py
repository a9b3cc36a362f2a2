"""The Trainer with FSDP settings in its arguments: training, evaluation, generation, checkpoints and resuming."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cases_trainer import (
    accumulate,
    evaluate_around_training,
    save_after_changing_state_dict_type,
    save_model,
    train_and_resume,
    train_with_the_best_model,
)
from ranks import Ranks

MODEL_FILES = {
    "full": {"model.safetensors", "optimizer_0", "config.json"},
    "sharded": {"pytorch_model_fsdp_0", "optimizer_0", "config.json"},
    "local": {"pytorch_model_fsdp_local", "optimizer_local", "config.json"},
}


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("kind", ["full", "sharded", "local"])
def test_resumed_training_equals_uninterrupted(two_ranks: Ranks, tmp_path: Path, version: int, kind: str) -> None:
    config = {"version": version, "state_dict_type": kind}
    run = two_ranks.run(train_and_resume, str(tmp_path), fsdp="full_shard auto_wrap", fsdp_config=config)[0]
    assert MODEL_FILES[kind] <= set(run["files"])
    assert run["resumed"] == run["whole"]
    whole, resumed = run["weights"]
    assert whole.keys() == resumed.keys()
    assert all((whole[name] == resumed[name]).all() for name in whole)


@pytest.mark.parametrize(
    ("fsdp", "version"),
    [
        pytest.param("shard_grad_op auto_wrap", 1, marks=pytest.mark.slow),
        pytest.param("no_shard auto_wrap", 1, marks=pytest.mark.slow),
        ("no_shard auto_wrap", 2),
        ("SHARD_GRAD_OP,auto_wrap", 2),
    ],
)
def test_resuming_works_with_every_strategy(two_ranks: Ranks, tmp_path: Path, fsdp: str, version: int) -> None:
    run = two_ranks.run(train_and_resume, str(tmp_path), fsdp=fsdp, fsdp_config={"version": version})[0]
    assert run["resumed"] == run["whole"]
    assert run["report"]["backend"] == f"fsdp{version}"


def test_evaluation_before_training_keeps_losses(two_ranks: Ranks, tmp_path: Path) -> None:
    runs = {
        version: two_ranks.run(
            evaluate_around_training, str(tmp_path), fsdp="full_shard auto_wrap", fsdp_config={"version": version}
        )[0]
        for version in (1, 2)
    }
    plain = two_ranks.run(train_and_resume, str(tmp_path), fsdp="full_shard auto_wrap")[0]
    for run in runs.values():
        assert run["losses"] == pytest.approx(plain["whole"], rel=1e-5)
        assert run["after"] < run["before"]
        assert run["generated"] == runs[1]["generated"]


@pytest.mark.parametrize("arguments", [{}, {"bf16": True}, {"gradient_checkpointing": True}], ids=str)
@pytest.mark.parametrize("version", [1, 2])
def test_saved_model_loads_with_from_pretrained(
    two_ranks: Ranks, tmp_path: Path, version: int, arguments: dict[str, Any]
) -> None:
    config = {"version": version}
    saved = two_ranks.run(save_model, str(tmp_path), fsdp="full_shard auto_wrap", fsdp_config=config, **arguments)[0]
    assert {"config.json", "model.safetensors"} <= set(saved["files"])
    assert saved["keys"] > 0
    assert saved["distance"] == 0.0


@pytest.mark.parametrize("kind", ["full", "sharded"])
@pytest.mark.parametrize("version", [1, 2])
def test_best_model_is_loaded_at_end(two_ranks: Ranks, tmp_path: Path, version: int, kind: str) -> None:
    config = {"version": version, "state_dict_type": kind}
    run = two_ranks.run(train_with_the_best_model, str(tmp_path), fsdp="full_shard auto_wrap", fsdp_config=config)[0]
    assert run["again"] == pytest.approx(run["best"], rel=1e-6)
    assert len(run["checkpoints"]) == 2


@pytest.mark.parametrize("version", [1, 2])
def test_full_save_after_changing_state_dict_type(two_ranks: Ranks, tmp_path: Path, version: int) -> None:
    config = {"version": version, "state_dict_type": "SHARDED_STATE_DICT"}
    saved = two_ranks.run(
        save_after_changing_state_dict_type, str(tmp_path), fsdp="full_shard auto_wrap", fsdp_config=config
    )[0]
    assert saved["keys"] > 0
    assert saved["equal"]


@pytest.mark.parametrize("version", [1, 2])
def test_accumulation_equals_one_larger_batch(two_ranks: Ranks, tmp_path: Path, version: int) -> None:
    fsdp = {"fsdp": "full_shard auto_wrap", "fsdp_config": {"version": version}}
    small = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4}
    accumulated = two_ranks.run(accumulate, str(tmp_path), **fsdp, **small)[0]
    whole = two_ranks.run(accumulate, str(tmp_path), **fsdp)[0]
    # The order of the micro-batches differs, but each epoch of six steps has the same 48 sequences.
    assert accumulated["effective_batch_size"] == whole["effective_batch_size"] == 8
    assert accumulated["losses"][0] == pytest.approx(whole["losses"][0], rel=0.02)
