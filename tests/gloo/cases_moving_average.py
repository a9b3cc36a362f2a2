"""Cases that ranks run: exponential moving averages of sharded weights, and the same average in one process."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import torch
from torch import nn

import hf_fsdp_plugin as hfp
from tests.gloo.cases_trainer import gathered, losses, make_trainer
from tests.gloo.cases_user_code import codes_of, make_model, step
from tests.support.tiny import tiny_llama
from tests.support.training import fresh_accelerator, loss_of, sgd

DECAY = 0.6
NUM_STEPS = 4


class Reference:
    """The average of all parameters of an unsharded model."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.values = {name: p.detach().clone() for name, p in model.named_parameters(remove_duplicate=False)}

    def update(self) -> None:
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            self.values[name] = DECAY * self.values[name] + (1 - DECAY) * parameter.detach()


def reference(name: str, num_steps: int = NUM_STEPS) -> dict[str, Any]:
    model = make_model(name).float()
    optimizer, average = sgd(model), Reference(model)
    trained = [n for n, p in model.named_parameters(remove_duplicate=False) if p.requires_grad]
    for number in range(num_steps):
        step(None, model, optimizer, name, number)
        average.update()
    weights = {n: w.clone() for n, w in model.state_dict().items()}
    model.load_state_dict(average.values, strict=False)
    with torch.no_grad():
        loss = float(loss_of(model, "llama", 0))
    return {"average": {n: average.values[n] for n in trained}, "weights": weights, "loss": loss}


def train_with_average(name: str, config: dict[str, Any], folder: str | None = None) -> dict[str, Any]:
    """Train, save after two steps, change everything, load again, and train on. Evaluate with the averages."""
    accelerator = fresh_accelerator(config)
    model = make_model(name)
    model, optimizer = accelerator.prepare(model, sgd(model))
    average = hfp.ExponentialMovingAverage(model, DECAY)
    for number in range(NUM_STEPS):
        step(accelerator, model, optimizer, name, number)
        average.update()
        if number == 1 and folder is not None:
            accelerator.save_state(f"{folder}/state")
    if folder is not None:
        accelerator.load_state(f"{folder}/state")
        for number in range(2, NUM_STEPS):
            step(accelerator, model, optimizer, name, number)
            average.update()
    return results(accelerator, model, average)


def results(accelerator: Any, model: nn.Module, average: Any) -> dict[str, Any]:
    with average.applied(), torch.no_grad():
        loss = loss_of(model, "llama", 0, accelerator.process_index, accelerator.num_processes).detach()
    loss = accelerator.reduce(loss, "mean").item()
    return {"average": average.state_dict(), "weights": accelerator.get_state_dict(model), "loss": loss}


def resume_with_average(name: str, config: dict[str, Any], folder: str) -> dict[str, Any]:
    """Continue the training of :func:`train_with_average` from its checkpoint, with other settings."""
    accelerator = fresh_accelerator(config)
    model = make_model(name)
    model, optimizer = accelerator.prepare(model, sgd(model))
    average = hfp.ExponentialMovingAverage(model, DECAY)
    accelerator.load_state(f"{folder}/state")
    for number in range(2, NUM_STEPS):
        step(accelerator, model, optimizer, name, number)
        average.update()
    return results(accelerator, model, average)


def other_state() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(6)
    return {name: torch.randn(t.shape, generator=generator) for name, t in tiny_llama().state_dict().items()}


def load_whole(config: dict[str, Any]) -> dict[str, Any]:
    """Load a whole state dict to an average, and return it, and the errors for a state dict without a tensor."""
    state = other_state()
    accelerator = fresh_accelerator(config)
    average = hfp.ExponentialMovingAverage(accelerator.prepare(tiny_llama()), DECAY)
    average.load_state_dict(state)
    errors = []
    try:
        average.load_state_dict({name: tensor for name, tensor in state.items() if "norm" not in name})
    except ValueError as error:
        errors.append(str(error))
    return {"average": average.state_dict(), "errors": errors}


def misuse(config: dict[str, Any], folder: str) -> dict[str, list[str]]:
    """The codes of the problems of what an average refuses, by kind."""
    unsharded = codes_of(lambda: hfp.ExponentialMovingAverage(tiny_llama()))
    accelerator = fresh_accelerator(config)
    model = accelerator.prepare(tiny_llama())
    average = hfp.ExponentialMovingAverage(model)
    with average.applied():
        applied = {
            "update": codes_of(average.update),
            "apply": codes_of(lambda: average.applied().__enter__()),
            "save": codes_of(lambda: accelerator.save_state(f"{folder}/averages")),
        }
    accelerator.save_state(f"{folder}/good")
    other = accelerator.prepare(tiny_llama(layers=2))
    other_average = hfp.ExponentialMovingAverage(other)
    shapes = codes_of(lambda: other_average.load(Path(folder) / "good"))
    return {"unsharded": unsharded, "other": shapes, **applied}


def load_without_average(config: dict[str, Any], folder: str) -> dict[str, Any]:
    """Load a checkpoint that was saved without an average. Returns what was printed, the average and the weights."""
    accelerator = fresh_accelerator(config)
    model = tiny_llama()
    model, optimizer = accelerator.prepare(model, sgd(model))
    step(accelerator, model, optimizer, "llama", 0)
    accelerator.save_state(f"{folder}/state")
    average = hfp.ExponentialMovingAverage(model)
    step(accelerator, model, optimizer, "llama", 1)
    with contextlib.redirect_stderr(io.StringIO()) as printed:
        accelerator.load_state(f"{folder}/state")
    return {
        "printed": printed.getvalue(),
        "average": average.state_dict(),
        "weights": accelerator.get_state_dict(model),
    }


def train_and_resume(output_dir: str, **arguments: Any) -> dict[str, Any]:
    """Train with the callback, then again from the checkpoint at step 3, and load what was exported."""
    from transformers import AutoModelForCausalLM

    arguments = {"save_strategy": "steps", "save_steps": 3, "eval_strategy": "steps", "eval_steps": 3, **arguments}
    callback = hfp.ExponentialMovingAverageCallback(DECAY)
    trainer = make_trainer(output_dir, callbacks=[callback], **arguments)
    trainer.train()
    evaluated = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    plain = hfp.ExponentialMovingAverageCallback(DECAY, evaluate=False, export=None)
    resumed = make_trainer(output_dir, callbacks=[plain], **arguments)
    resumed.train(resume_from_checkpoint=f"{output_dir}/checkpoint-3")
    exported = AutoModelForCausalLM.from_pretrained(f"{output_dir}/ema")
    with callback.average.applied():  # type: ignore[union-attr]
        applied = gathered(trainer)
    return {
        "evaluated": evaluated,
        "after": trainer.evaluate()["eval_loss"],
        "plain": resumed.evaluate()["eval_loss"],
        "averages": (callback.average.state_dict(), plain.average.state_dict()),  # type: ignore[union-attr]
        "weights": (gathered(trainer), gathered(resumed)),
        "exported": dict(exported.state_dict()),
        "applied": applied,
        "losses": (losses(trainer), losses(resumed)),
        "files": sorted(path.name for path in (Path(output_dir) / "checkpoint-3").iterdir()),
    }


def train_with_bema(output_dir: str, **arguments: Any) -> list[str]:
    from trl import BEMACallback

    return codes_of(make_trainer(output_dir, callbacks=[BEMACallback()], **arguments).train)
