"""Hyperparameter search of the Trainer with Optuna."""

from __future__ import annotations

from typing import Any

from transformers import Trainer

from scripts.ecosystem.behaviors.common import arguments, llama, texts


def optuna_over_learning_rates() -> Any:
    import optuna

    trainer = Trainer(
        model_init=lambda: llama(),
        args=arguments(max_steps=2, eval_strategy="steps", eval_steps=2),
        train_dataset=texts(),
        eval_dataset=texts(8),
    )
    best = trainer.hyperparameter_search(
        hp_space=lambda trial: {"learning_rate": trial.suggest_float("learning_rate", 1e-4, 1e-2, log=True)},
        backend="optuna",
        n_trials=2,
        sampler=optuna.samplers.RandomSampler(seed=0),
    )
    trainer.args.learning_rate = 1e-3
    trainer.train()
    trainer.save_model("final")
    losses = {f"{row['step']} loss": row["loss"] for row in trainer.state.log_history if "loss" in row}
    return losses if best is None else losses | {"best loss": best.objective}
