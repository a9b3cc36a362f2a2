"""Exponential moving averages of shards equal those of one process, on real ranks."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hf_fsdp_plugin as hfp
from hf_fsdp_plugin.tools.verify.verification import verify
from tests.support.matrices import slow
from tests.support.ranks import Ranks
from tests.support.tiny import parallel_config, tiny_llama
from tests.support.trainer_runs import gathered, losses, make_trainer
from tests.support.training import fresh_accelerator, loss_of, sgd
from tests.support.user_code_runs import codes_of, make_model, step

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


VERSIONS = pytest.mark.parametrize("version", [1, 2])


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-6, atol=1e-6, msg=name)


def assert_results(run: dict[str, Any], expected: dict[str, Any]) -> None:
    assert_close(run["average"], expected["average"])
    assert run["loss"] == pytest.approx(expected["loss"], rel=1e-6)


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


def results(accelerator: Any, model: nn.Module, average: Any) -> dict[str, Any]:
    with average.applied(), torch.no_grad():
        loss = loss_of(model, "llama", 0, accelerator.process_index, accelerator.num_processes).detach()
    loss = accelerator.reduce(loss, "mean").item()
    return {"average": average.state_dict(), "weights": accelerator.get_state_dict(model), "loss": loss}


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


@VERSIONS
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("llama", {}),
        ("tied", {}),
        ("half", {"fsdp_activation_checkpointing": True}),
        ("lora", {}),
        ("llama", {"fsdp_sharding_strategy": "SHARD_GRAD_OP", "fsdp_state_dict_type": "FULL_STATE_DICT"}),
        ("llama", {"fsdp_sharding_strategy": "NO_SHARD"}),
        ("llama", {"fsdp_offload_params": True, "fsdp_async_save": True}),
        slow("llama", {"fsdp_auto_wrap_policy": "NO_WRAP"}),
    ],
    ids=str,
)
def test_averages_equal_one_process(
    two_ranks: Ranks, name: str, settings: dict[str, Any], version: int, tmp_path: Path
) -> None:
    runs = two_ranks.run(train_with_average, name, parallel_config("full_shard", version, 2, **settings), str(tmp_path))
    assert_results(runs[0], reference(name))
    assert runs[1]["average"] == {}
    assert verify(tmp_path / "state").ok


@VERSIONS
def test_averages_on_a_hybrid_mesh_equal_one_process(four_ranks: Ranks, version: int, tmp_path: Path) -> None:
    config = parallel_config("hybrid_shard", version, 4)
    assert_results(four_ranks.run(train_with_average, "llama", config, str(tmp_path))[0], reference("llama"))


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


@pytest.mark.parametrize("name", ["llama", "tied"])
@VERSIONS
def test_averages_resume_with_other_settings(
    two_ranks: Ranks, one_rank: Ranks, name: str, version: int, tmp_path: Path
) -> None:
    two_ranks.run(train_with_average, name, parallel_config("full_shard", version, 2), str(tmp_path))
    expected = reference(name)
    other = parallel_config("full_shard", 3 - version, 2)
    assert_results(two_ranks.run(resume_with_average, name, other, str(tmp_path))[0], expected)
    alone = parallel_config("full_shard", version, 1)
    assert_results(one_rank.run(resume_with_average, name, alone, str(tmp_path))[0], expected)


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


@VERSIONS
def test_average_loads_whole_tensors(two_ranks: Ranks, version: int) -> None:
    run = two_ranks.run(load_whole, parallel_config("full_shard", version, 2))[0]
    assert_close(run["average"], other_state())
    assert len(run["errors"]) == 1


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


@VERSIONS
def test_misuse_of_averages_is_refused(two_ranks: Ranks, version: int, tmp_path: Path) -> None:
    for codes in two_ranks.run(misuse, parallel_config("full_shard", version, 2), str(tmp_path)):
        assert codes.pop("other") == ["FSDP-E422"]
        assert codes == {kind: ["FSDP-E312"] for kind in codes}


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


@VERSIONS
def test_average_absent_from_checkpoint_begins_anew(two_ranks: Ranks, version: int, tmp_path: Path) -> None:
    runs = two_ranks.run(load_without_average, parallel_config("full_shard", version, 2), str(tmp_path))
    assert runs[0]["printed"].count("FSDP-W435") == 1
    assert_close(runs[0]["average"], runs[0]["weights"])


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


@VERSIONS
def test_callback_evaluates_saves_resumes_and_exports(two_ranks: Ranks, version: int, tmp_path: Path) -> None:
    fsdp = {"fsdp": "full_shard auto_wrap", "fsdp_config": {"fsdp_version": version}}
    run = two_ranks.run(train_and_resume, str(tmp_path), **fsdp)[0]
    assert "exponential_moving_average.safetensors" in run["files"]
    assert verify(tmp_path / "checkpoint-3").ok
    assert_close(run["averages"][1], run["averages"][0])
    assert_close(run["weights"][1], run["weights"][0])
    assert_close(run["exported"], run["averages"][0])
    assert_close(run["applied"], run["averages"][0])
    assert run["after"] == run["evaluated"][-1]
    assert abs(run["after"] - run["plain"]) > 1e-4
    assert run["losses"][0][3:] == pytest.approx(run["losses"][1][-3:], rel=1e-6)


def train_with_bema(output_dir: str, **arguments: Any) -> list[str]:
    from trl import BEMACallback

    return codes_of(make_trainer(output_dir, callbacks=[BEMACallback()], **arguments).train)


@VERSIONS
def test_bema_of_trl_is_refused(two_ranks: Ranks, version: int, tmp_path: Path) -> None:
    fsdp = {"fsdp": "full_shard auto_wrap", "fsdp_config": {"fsdp_version": version}}
    assert two_ranks.run(train_with_bema, str(tmp_path), **fsdp) == [["FSDP-E627"]] * 2
