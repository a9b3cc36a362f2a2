"""Trials of a search, a curriculum and a given optimizer train like a Trainer without FSDP."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.utils import release_memory

from tests.support.ranks import RankError, Ranks
from tests.support.tiny import tiny_llama
from tests.support.trainer_runs import losses, make_trainer


def fsdp(version: int, **settings: Any) -> dict[str, Any]:
    config = {"fsdp_version": version, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"], **settings}
    return {"fsdp": "full_shard auto_wrap", "fsdp_config": config}


def unsharded(one_rank: Ranks, case: Any, *args: Any) -> Any:
    return one_rank.run(case, *args)[0]


def search(output_dir: str, rates: list[float], **arguments: Any) -> dict[str, Any]:
    """Run trials with the calls of ``hyperparameter_search``. Return their losses and how many old models live."""
    made: list[weakref.ref[Any]] = []

    def model_init() -> Any:
        model = tiny_llama()
        made.append(weakref.ref(model))
        return model

    trainer = make_trainer(output_dir, model=None, model_init=model_init, **arguments)
    runs, alive = [], []
    for rate in rates:
        trainer.args.learning_rate = rate
        trainer.create_accelerator_and_postprocess()
        trainer.train()
        runs.append((losses(trainer), trainer.evaluate()["eval_loss"]))
        trainer.model_wrapped, trainer.model = release_memory(trainer.model_wrapped, trainer.model)
        trainer.accelerator.clear()
        trainer.optimizer = trainer.lr_scheduler = None
        trainer.callback_handler.model = trainer.callback_handler.optimizer = trainer.callback_handler.lr_scheduler = (
            None
        )
        gc.collect()
        alive.append(sum(reference() is not None for reference in made))
    return {"runs": runs, "alive": alive}


@pytest.mark.parametrize("version", [1, 2])
def test_trials_start_from_fresh_weights(two_ranks: Ranks, tmp_path: Path, version: int) -> None:
    result = two_ranks.run(search, str(tmp_path), [1e-3, 5e-3, 1e-3], **fsdp(version))[0]
    first, other, last = result["runs"]
    assert first == last
    assert other[0][0] == first[0][0]
    assert other[0][-1] != first[0][-1]
    if version == 2:  # FSDP1 keeps the models of earlier trials in memory
        assert result["alive"] == [0, 0, 0]


def search_with_optuna(output_dir: str, **arguments: Any) -> list[float]:
    """The objectives of the trials of ``hyperparameter_search``."""
    trainer = make_trainer(output_dir, model=None, model_init=lambda: tiny_llama(), eval_strategy="steps", **arguments)
    found: list[float] = []

    def objective(metrics: dict[str, float]) -> float:
        found.append(metrics["eval_loss"])
        return metrics["eval_loss"]

    trainer.hyperparameter_search(
        hp_space=lambda trial: {"learning_rate": trial.suggest_categorical("learning_rate", [1e-3])},
        compute_objective=objective, n_trials=2, backend="optuna", direction="minimize",
    )  # fmt: skip
    return found


@pytest.mark.parametrize("version", [1, 2])
def test_search_with_optuna(two_ranks: Ranks, tmp_path: Path, version: int) -> None:
    pytest.importorskip("optuna")
    objectives = two_ranks.run(search_with_optuna, str(tmp_path), **fsdp(version))[0]
    first, second = objectives[: len(objectives) // 2], objectives[len(objectives) // 2 :]
    assert first and first == second


def train_in_a_row(output_dir: str, **arguments: Any) -> list[list[float]]:
    """Two Trainers on the script's own variable of the model."""
    model = tiny_llama()
    runs = []
    for stage in range(2):
        trainer = make_trainer(f"{output_dir}/{stage}", model, **arguments)
        trainer.train()
        runs.append(losses(trainer))
        del trainer
        gc.collect()
    return runs


@pytest.mark.parametrize("version", [1, 2])
def test_second_trainer_on_the_same_variable(one_rank: Ranks, two_ranks: Ranks, tmp_path: Path, version: int) -> None:
    expected = unsharded(one_rank, train_in_a_row, str(tmp_path / "one"))
    result = two_ranks.run(train_in_a_row, str(tmp_path / "two"), **fsdp(version))[0]
    assert result == [pytest.approx(run, rel=1e-5) for run in expected]


def train_given(output_dir: str, evaluates: bool, **arguments: Any) -> list[float]:
    """Train with an optimizer and a scheduler of the script."""
    model = tiny_llama()
    weights = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [{"params": weights}, {"params": others, "lr": 5e-3}]
    optimizer = torch.optim.SGD(groups, lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    trainer = make_trainer(output_dir, model, optimizers=(optimizer, scheduler), **arguments)
    if evaluates:
        trainer.evaluate()
    trainer.train()
    return losses(trainer)


@pytest.mark.parametrize("evaluates", [False, True])
@pytest.mark.parametrize("version", [1, 2])
def test_given_optimizer_updates_the_shards(
    one_rank: Ranks, two_ranks: Ranks, tmp_path: Path, version: int, evaluates: bool
) -> None:
    expected = unsharded(one_rank, train_given, str(tmp_path / "one"), False)
    result = two_ranks.run(train_given, str(tmp_path / "two"), evaluates, **fsdp(version))[0]
    assert result == pytest.approx(expected, rel=1e-5)


def train_with_foreign_optimizer(output_dir: str, **arguments: Any) -> None:
    optimizer = torch.optim.SGD(tiny_llama().parameters(), lr=0.05)
    trainer = make_trainer(output_dir, tiny_llama(), optimizers=(optimizer, None), **arguments)
    trainer.train()


@pytest.mark.parametrize("version", [1, 2])
def test_optimizer_of_other_weights_is_refused(two_ranks: Ranks, tmp_path: Path, version: int) -> None:
    with pytest.raises(RankError, match="FSDP-E604"):
        two_ranks.run(train_with_foreign_optimizer, str(tmp_path), **fsdp(version))
