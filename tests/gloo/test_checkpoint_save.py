"""Checkpoints of real Trainers are complete, and readable with the tools of torch, Transformers and PEFT."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from hf_fsdp_plugin.checkpoint.checking.inspection import summarize
from hf_fsdp_plugin.checkpoint.checking.verify import verify
from hf_fsdp_plugin.checkpoint.folders import remove_checkpoint
from tests.gloo import cases_checkpoint_save as cases
from tests.support.matrices import alternating
from tests.support.ranks import Ranks

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


def train_and_save(ranks: Ranks, run: Path, name: str, kind: str) -> tuple[Path, dict[str, Any]]:
    """Save a checkpoint, check that it is complete, and return its folder and the state of the first rank."""
    state = ranks.run(cases.train_and_save, str(run), **arguments(name, kind))[0]
    folder = run / "checkpoint-3"
    assert {
        "config.json", "generation_config.json", "scheduler.pt", "trainer_state.json", "training_args.bin",
        "rng_state_0.pth", "rng_state_1.pth", "fsdp_manifest.json",
    } <= {path.name for path in folder.iterdir()}  # fmt: skip
    assert not list(run.glob(".*"))
    assert verify(folder).problems == ()
    assert state["asynchronous"] == name.endswith("async")
    return folder, state


@pytest.mark.parametrize("kind", ["SHARDED", "FULL", "LOCAL"])
@pytest.mark.parametrize("name", ["fsdp2", "fsdp1", "fsdp2-async"])
def test_save_sends_few_objects(two_ranks: Ranks, tmp_path: Path, name: str, kind: str) -> None:
    """Each rank would send four messages per rank of the world for an object, and there is nothing to report."""
    for of_rank in two_ranks.run(cases.count_calls_of_saves, str(tmp_path), **arguments(name, kind)):
        for calls in of_rank:
            assert sum(calls[name] for name in cases.OBJECTS) == calls["barrier"] == 0, calls
            assert 4 <= calls["all_reduce"] <= 12 or name.endswith("async"), calls  # which also asks whether it is done


@pytest.mark.parametrize("name", SETTINGS)
def test_sharded_checkpoint_is_readable_by_torch(two_ranks: Ranks, tmp_path: Path, name: str) -> None:
    folder, expected = train_and_save(two_ranks, tmp_path, name, "SHARDED")
    assert_same(cases.read_dcp(folder / "pytorch_model_fsdp_0")["model"], expected["weights"])
    stored = cases.read_dcp(folder / "optimizer_0")["optimizer"]
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


@pytest.mark.parametrize("kind", ["FULL", "SHARDED"])
def test_fused_experts_are_readable_by_transformers(two_ranks: Ranks, tmp_path: Path, kind: str) -> None:
    expected = two_ranks.run(cases.train_mixture, str(tmp_path), **arguments("fsdp2", kind))[0]
    folders = [tmp_path / "final", *([tmp_path / "checkpoint-3"] if kind == "FULL" else [])]
    for folder in folders:
        assert_same(dict(AutoModelForCausalLM.from_pretrained(folder).state_dict()), expected)
    stored = load_file(tmp_path / "final" / "model.safetensors")
    assert any("experts.0." in name for name in stored), "not split as Transformers stores them"


@pytest.mark.parametrize("kind", ["FULL", "SHARDED", "LOCAL"])
def test_save_only_model_with_load_best_model_at_end(two_ranks: Ranks, tmp_path: Path, kind: str) -> None:
    run = two_ranks.run(cases.train_with_only_models, str(tmp_path), **arguments("fsdp2-async", kind))[0]
    assert run["again"] == pytest.approx(run["best"], rel=1e-6)
    best = Path(run["best_checkpoint"])
    assert best.parent == tmp_path and best.name in ("checkpoint-2", "checkpoint-4")
    names = {path.name for path in best.iterdir()}
    assert "config.json" in names and not any(name.startswith(("optimizer", "rng_state")) for name in names)
    assert_same(dict(AutoModelForCausalLM.from_pretrained(best).state_dict()), run["weights"])
    assert verify(best).ok and summarize(best).kind == "full"


@pytest.mark.parametrize(("name", "kind"), [("fsdp1", "SHARDED"), ("fsdp2", "LOCAL"), ("fsdp2-async", "SHARDED")])
def test_from_pretrained_reads_every_state_dict_type(two_ranks: Ranks, tmp_path: Path, name: str, kind: str) -> None:
    ranks = two_ranks.run(cases.load_own_checkpoint, str(tmp_path), **arguments(name, kind))
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


@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft is not installed")
@pytest.mark.parametrize(("kind", "name"), alternating(["FULL", "SHARDED", "LOCAL"], ["fsdp1", "fsdp2"]))
def test_adapters_are_saved_alone_and_readable_by_peft(two_ranks: Ranks, tmp_path: Path, name: str, kind: str) -> None:
    run = two_ranks.run(cases.train_adapters, str(tmp_path), **arguments(name, kind))[0]
    whole, resumed = run["losses"]
    assert resumed[-1] == pytest.approx(whole[-1], rel=1e-6)
    for logits in run["loaded"].values():
        assert torch.allclose(logits, run["live"], atol=1e-5)
