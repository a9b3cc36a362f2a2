"""Cases that ranks run: trials of a hyperparameter search, a curriculum, and Trainers with a given optimizer."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch
from accelerate.utils import release_memory

from tests.gloo.cases_trainer import losses, make_trainer
from tests.support.tiny import tiny_llama


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


def train_with_foreign_optimizer(output_dir: str, **arguments: Any) -> None:
    optimizer = torch.optim.SGD(tiny_llama().parameters(), lr=0.05)
    trainer = make_trainer(output_dir, tiny_llama(), optimizers=(optimizer, None), **arguments)
    trainer.train()
