"""Checkpoints of real Trainers are complete, and readable with the tools of torch, Transformers and PEFT."""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from transformers import AutoModelForCausalLM

from hf_fsdp_plugin.checkpoint.folders import remove_checkpoint
from hf_fsdp_plugin.integrations.saving import manager
from hf_fsdp_plugin.tools.inspect.summary import summarize
from hf_fsdp_plugin.tools.verify.verification import verify
from tests.support.matrices import alternating
from tests.support.ranks import Ranks
from tests.support.trainer_runs import gathered, losses, make_trainer

OBJECTS = ("all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list")


SETTINGS = {
    "fsdp2": {"fsdp_version": 2},
    "fsdp1": {"fsdp_version": 1},
    "fsdp1-flat": {"fsdp_version": 1, "use_orig_params": False},
    "fsdp2-async": {"fsdp_version": 2, "async_save": True},
    "fsdp1-async": {"fsdp_version": 1, "async_save": True},
}


def arguments(name: str, kind: str) -> dict[str, Any]:
    return {"fsdp": "full_shard auto_wrap", "fsdp_config": {**SETTINGS[name], "state_dict_type": kind}}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def train_and_save_on_ranks(output_dir: str, **arguments: Any) -> dict[str, Any]:
    """Train three steps, save, and return the state in memory."""
    trainer = make_trainer(output_dir, save_strategy="steps", save_steps=3, max_steps=3, **arguments)
    trainer.train()
    options = StateDictOptions(full_state_dict=True)
    optimizer = get_optimizer_state_dict(trainer.model, trainer.optimizer.optimizer, options=options)
    return {
        "weights": gathered(trainer),
        "optimizer": optimizer if dist.get_rank() == 0 else {},
        "asynchronous": manager().saved_asynchronously.get(trainer.model),
    }


def train_and_save(ranks: Ranks, run: Path, name: str, kind: str) -> tuple[Path, dict[str, Any]]:
    """Save a checkpoint, check that it is complete, and return its folder and the state of the first rank."""
    state = ranks.run(train_and_save_on_ranks, str(run), **arguments(name, kind))[0]
    folder = run / "checkpoint-3"
    assert {
        "config.json", "generation_config.json", "scheduler.pt", "trainer_state.json", "training_args.bin",
        "rng_state_0.pth", "rng_state_1.pth", "fsdp_manifest.json",
    } <= {path.name for path in folder.iterdir()}  # fmt: skip
    assert not list(run.glob(".*"))
    assert verify(folder).problems == ()
    assert state["asynchronous"] == name.endswith("async")
    return folder, state


@contextmanager
def counted_calls() -> Iterator[Counter[str]]:
    """Count the collectives of objects and the all-reduces and barriers that this rank calls through torch."""
    calls: Counter[str] = Counter()

    def counting(name: str) -> Any:
        original = getattr(dist, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return original(*args, **kwargs)

        return call

    with mock.patch.multiple(dist, **{name: counting(name) for name in (*OBJECTS, "all_reduce", "barrier")}):
        yield calls


def count_calls_of_saves(output_dir: str, **arguments: Any) -> list[dict[str, int]]:
    """Return the calls of the second save, and of what it waits for, in a Trainer and in ``save_state``."""
    trainer = make_trainer(output_dir, save_strategy="no", max_steps=2, **arguments)
    trainer.train()
    found = []
    for save in (
        lambda: trainer._save_checkpoint(trainer.model, trial=None),
        lambda: trainer.accelerator.save_state(str(Path(output_dir) / "state")),
    ):
        save()
        with counted_calls() as calls:
            save()
            found.append({name: calls[name] for name in (*OBJECTS, "all_reduce", "barrier")})
    manager().wait()
    return found


@pytest.mark.parametrize("kind", ["SHARDED", "FULL", "LOCAL"])
@pytest.mark.parametrize("name", ["fsdp2", "fsdp1", "fsdp2-async"])
def test_save_sends_few_objects(two_ranks: Ranks, tmp_path: Path, name: str, kind: str) -> None:
    """Each rank would send four messages per rank of the world for an object, and there is nothing to report."""
    for of_rank in two_ranks.run(count_calls_of_saves, str(tmp_path), **arguments(name, kind)):
        for calls in of_rank:
            assert sum(calls[name] for name in OBJECTS) == calls["barrier"] == 0, calls
            assert 4 <= calls["all_reduce"] <= 12 or name.endswith("async"), calls  # which also asks whether it is done


def read_dcp(folder: Path) -> dict[str, Any]:
    """Read everything with torch's reader, as ``accelerate merge-weights`` does."""
    state: dict[str, Any] = {}
    _load_state_dict(state, storage_reader=FileSystemReader(folder), planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    return state


@pytest.mark.parametrize("name", SETTINGS)
def test_sharded_checkpoint_is_readable_by_torch(two_ranks: Ranks, tmp_path: Path, name: str) -> None:
    folder, expected = train_and_save(two_ranks, tmp_path, name, "SHARDED")
    assert_same(read_dcp(folder / "pytorch_model_fsdp_0")["model"], expected["weights"])
    stored = read_dcp(folder / "optimizer_0")["optimizer"]
    assert stored["state"].keys() == expected["optimizer"]["state"].keys()
    for parameter, state in expected["optimizer"]["state"].items():
        assert_same(stored["state"][parameter], state)


@pytest.mark.parametrize("name", SETTINGS)
def test_full_checkpoint_is_a_hugging_face_folder(two_ranks: Ranks, tmp_path: Path, name: str) -> None:
    folder, expected = train_and_save(two_ranks, tmp_path, name, "FULL")
    assert_same(load_file(folder / "model.safetensors"), expected["weights"])
    assert_same(dict(AutoModelForCausalLM.from_pretrained(folder).state_dict()), expected["weights"])
    assert not (folder / "pytorch_model_fsdp.bin").exists()


@pytest.mark.parametrize("name", SETTINGS)
def test_local_checkpoint_is_complete(two_ranks: Ranks, tmp_path: Path, name: str) -> None:
    folder, _ = train_and_save(two_ranks, tmp_path, name, "LOCAL")
    assert {"pytorch_model_fsdp_0", "optimizer_0"} <= {path.name for path in folder.iterdir()}


def train_mixture(output_dir: str, **arguments: Any) -> dict[str, Any]:
    """Train a mixture of experts. Transformers keeps the experts in one tensor, and stores them separately."""
    trainer = make_trainer(output_dir, "experts", save_strategy="steps", save_steps=3, max_steps=3, **arguments)
    trainer.train()
    trainer.save_model(str(Path(output_dir) / "final"))
    dist.barrier()
    return gathered(trainer)


@pytest.mark.parametrize("kind", ["FULL", "SHARDED"])
def test_fused_experts_are_readable_by_transformers(two_ranks: Ranks, tmp_path: Path, kind: str) -> None:
    expected = two_ranks.run(train_mixture, str(tmp_path), **arguments("fsdp2", kind))[0]
    folders = [tmp_path / "final", *([tmp_path / "checkpoint-3"] if kind == "FULL" else [])]
    for folder in folders:
        assert_same(dict(AutoModelForCausalLM.from_pretrained(folder).state_dict()), expected)
    stored = load_file(tmp_path / "final" / "model.safetensors")
    assert any("experts.0." in name for name in stored), "not split as Transformers stores them"


def train_with_only_models(output_dir: str, **arguments: Any) -> dict[str, Any]:
    """Train with ``save_only_model`` and ``load_best_model_at_end``, which the Trainer refuses for FSDP."""
    trainer = make_trainer(
        output_dir, save_strategy="steps", save_steps=2, eval_strategy="steps", eval_steps=2, max_steps=4,
        save_only_model=True, load_best_model_at_end=True, metric_for_best_model="eval_loss", save_total_limit=1,
        **arguments,
    )  # fmt: skip
    trainer.train()
    return {
        "best": trainer.state.best_metric,
        "again": trainer.evaluate()["eval_loss"],
        "best_checkpoint": trainer.state.best_model_checkpoint,
        "weights": gathered(trainer),
    }


@pytest.mark.parametrize("kind", ["FULL", "SHARDED", "LOCAL"])
def test_save_only_model_with_load_best_model_at_end(two_ranks: Ranks, tmp_path: Path, kind: str) -> None:
    run = two_ranks.run(train_with_only_models, str(tmp_path), **arguments("fsdp2-async", kind))[0]
    assert run["again"] == pytest.approx(run["best"], rel=1e-6)
    best = Path(run["best_checkpoint"])
    assert best.parent == tmp_path and best.name in ("checkpoint-2", "checkpoint-4")
    names = {path.name for path in best.iterdir()}
    assert "config.json" in names and not any(name.startswith(("optimizer", "rng_state")) for name in names)
    assert_same(dict(AutoModelForCausalLM.from_pretrained(best).state_dict()), run["weights"])
    assert verify(best).ok and summarize(best).kind == "full"


def load_own_checkpoint(output_dir: str, **arguments: Any) -> dict[str, Any]:
    """Train, load the model of the checkpoint on all ranks two times, and again after the checkpoint was replaced."""
    from transformers import AutoModelForCausalLM

    run = Path(output_dir)
    results: dict[str, Any] = {"loaded": [], "expected": [], "copies": []}
    for learning_rate in (1e-3, 1e-2):
        trainer = make_trainer(
            output_dir, save_strategy="steps", save_steps=2, max_steps=2, learning_rate=learning_rate, **arguments
        )
        trainer.train()
        expected = gathered(trainer)
        for _ in range(2):
            model = AutoModelForCausalLM.from_pretrained(run / "checkpoint-2")
            results["loaded"].append({name: tensor.clone() for name, tensor in model.state_dict().items()})
            results["expected"].append(expected)
            dist.barrier()
            results["copies"].append({path.name: path.stat().st_ino for path in run.glob(".checkpoint-2.merged-*")})
    return results


@pytest.mark.parametrize(("name", "kind"), [("fsdp1", "SHARDED"), ("fsdp2", "LOCAL"), ("fsdp2-async", "SHARDED")])
def test_from_pretrained_reads_every_state_dict_type(two_ranks: Ranks, tmp_path: Path, name: str, kind: str) -> None:
    ranks = two_ranks.run(load_own_checkpoint, str(tmp_path), **arguments(name, kind))
    for rank in ranks:
        for loaded in rank["loaded"]:
            assert loaded.keys() == ranks[0]["loaded"][0].keys()
        first, again, replaced, last = rank["copies"]
        assert len(first) == len(replaced) == 1
        assert first == again and replaced == last and first != replaced, "the copy of an older checkpoint was read"
    for loaded, expected in zip(ranks[0]["loaded"], ranks[0]["expected"], strict=True):
        assert_same(loaded, expected)
    remove_checkpoint(tmp_path / "checkpoint-2")
    assert not [path for path in tmp_path.iterdir() if "checkpoint-2" in path.name]


def train_adapters(output_dir: str, **arguments: Any) -> dict[str, Any]:
    """Train LoRA adapters for three steps, repeat the last step from a checkpoint, and export."""
    from peft import PeftModel

    from tests.support.tiny import tiny_llama

    schedule = {"save_strategy": "steps", "save_steps": 2, "max_steps": 3, "fp16": False, **arguments}
    whole = make_trainer(output_dir, "lora", **schedule)
    whole.train()
    resumed = make_trainer(output_dir, "lora", **schedule)
    resumed.train(resume_from_checkpoint=str(Path(output_dir) / "checkpoint-2"))
    resumed.save_model(str(Path(output_dir) / "final"))
    dist.barrier()
    logits = {}
    tokens = torch.arange(8)[None]
    for name in ("final", "checkpoint-3"):
        loaded = PeftModel.from_pretrained(tiny_llama(), str(Path(output_dir) / name))
        logits[name] = loaded(input_ids=tokens).logits.detach()
    return {
        "losses": (losses(whole), losses(resumed)),
        "live": resumed.model(input_ids=tokens).logits.detach().clone(),
        "loaded": logits,
    }


@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft is not installed")
@pytest.mark.parametrize(("kind", "name"), alternating(["FULL", "SHARDED", "LOCAL"], ["fsdp1", "fsdp2"]))
def test_adapters_are_saved_alone_and_readable_by_peft(two_ranks: Ranks, tmp_path: Path, name: str, kind: str) -> None:
    run = two_ranks.run(train_adapters, str(tmp_path), **arguments(name, kind))[0]
    whole, resumed = run["losses"]
    assert resumed[-1] == pytest.approx(whole[-1], rel=1e-6)
    for logits in run["loaded"].values():
        assert torch.allclose(logits, run["live"], atol=1e-5)
