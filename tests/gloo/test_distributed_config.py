"""Models that ``from_pretrained(distributed_config=…)`` shards: training, reports, checkpoints and resuming."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import hf_fsdp_plugin as hfp
from tests.support.distributed_config_runs import PLAIN, load, norms, one_process, train, with_adapters
from tests.support.matrices import needs_transformers, slow
from tests.support.ranks import Ranks, on_accelerator, reset_accelerate
from tests.support.tiny import tiny_llama
from tests.support.trainer_runs import gathered, losses, make_trainer
from tests.support.training import assert_same_weights, differing, reference, train_prepared

RELATIVE = 1e-4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with the weights of a small model."""
    path = tmp_path_factory.mktemp("model")
    tiny_llama().save_pretrained(path)  # type: ignore[operator]
    return str(path)


@pytest.fixture(scope="module")
def expected(folder: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return one_process(folder, str(tmp_path_factory.mktemp("reference")))


@pytest.fixture(scope="module")
def trained(two_ranks: Ranks, folder: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    """The results of two ranks, and the folder with their checkpoints."""
    output = str(tmp_path_factory.mktemp("trained"))
    return two_ranks.run(train, folder, output, {"fsdp_size": 2})[0], output


def assert_same_run(run: dict[str, Any], expected: dict[str, Any]) -> None:
    assert run["losses"] == pytest.approx(expected["losses"], rel=RELATIVE)
    assert run["norms"] == pytest.approx(expected["norms"], rel=RELATIVE)
    assert_same_weights(run["weights"], expected["weights"], RELATIVE)
    assert all(torch.equal(run["exported"][name], weight) for name, weight in run["weights"].items())
    assert differing(run["report"]) == []


def test_trainer_equals_one_process(trained: tuple[dict[str, Any], str], expected: dict[str, Any]) -> None:
    run, _ = trained
    assert_same_run(run, expected)
    rows = {row["setting"]: row for row in run["report"]["settings"]}
    origin = rows["mesh.shard"]["origin"]
    assert (rows["mesh.shard"]["observed"], origin["source"], origin["key"]) == (2, "DistributedConfig", "fsdp_size")
    assert [problem["code"] for problem in run["report"]["problems"]] == ["FSDP-N280"]


def resume(folder: str, output_dir: str, fields: dict[str, Any] | None, **arguments: Any) -> dict[str, Any]:
    """Continue from the checkpoint at step 3, with a model that is sharded at load, or by the plan without fields."""
    arguments = {**PLAIN, **arguments}
    model = load(folder, **fields) if fields else "llama"
    if not fields:
        arguments |= {"fsdp": "full_shard auto_wrap", "fsdp_config": {"version": 2}}
    trainer = make_trainer(output_dir, model=model, **arguments)
    trainer.train(resume_from_checkpoint=str(Path(output_dir) / "checkpoint-3"))
    return {"losses": losses(trainer), "weights": gathered(trainer)}


@pytest.mark.parametrize("fields", [{"fsdp_size": 2}, slow(None)], ids=str)
def test_resumed_training_equals_uninterrupted(
    two_ranks: Ranks, folder: str, trained: tuple[dict[str, Any], str], fields: dict[str, Any] | None
) -> None:
    run, output = trained
    resumed = two_ranks.run(resume, folder, output, fields)[0]
    assert resumed["losses"] == pytest.approx(run["losses"], rel=1e-6)
    assert_same_weights(resumed["weights"], run["weights"], 1e-6)


@needs_transformers("5.23")
@pytest.mark.slow
def test_two_by_two_mesh_equals_one_process(
    four_ranks: Ranks, folder: str, tmp_path: Path, expected: dict[str, Any]
) -> None:
    fields = {"fsdp_size": 2, "dp_replicate_size": 2}
    run = four_ranks.run(train, folder, str(tmp_path), fields)[0]
    assert_same_run(run, expected)
    observed = {row["setting"]: row["observed"] for row in run["report"]["settings"]}
    assert (observed["mesh.shard"], observed["mesh.replicate"]) == (2, 2)
    assert observed["sharding.strategy"] == "hybrid_shard"


@needs_transformers("5.23")
def test_training_resumes_in_other_world_size(
    four_ranks: Ranks, folder: str, trained: tuple[dict[str, Any], str]
) -> None:
    run, output = trained
    fields = {"fsdp_size": 2, "dp_replicate_size": 2}
    resumed = four_ranks.run(resume, folder, output, fields)[0]
    assert resumed["losses"] == pytest.approx(run["losses"], rel=RELATIVE)


def accelerate(folder: str, output_dir: str, fields: dict[str, Any], num_steps: int = 4) -> dict[str, Any]:
    """Train with a plain Accelerator after ``install()``, save, load again and train the same steps once more."""
    from accelerate import Accelerator
    from transformers import AutoModelForCausalLM

    reset_accelerate()
    hfp.install({})
    accelerator = Accelerator(cpu=not on_accelerator())
    model = load(folder, **fields)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    accelerator.save_state(output_dir)
    first = train_prepared(accelerator, model, optimizer, "llama", num_steps)
    exported = str(Path(output_dir) / "exported")
    accelerator.save_model(model, exported)
    dist.barrier()
    accelerator.load_state(output_dir)
    again = train_prepared(accelerator, model, optimizer, "llama", num_steps)
    loaded = dict(AutoModelForCausalLM.from_pretrained(exported).state_dict())
    return {**first, "again": again["losses"], "exported": loaded}


def test_accelerator_adopts_model(two_ranks: Ranks, folder: str, tmp_path: Path) -> None:
    num_steps = 4
    run = two_ranks.run(accelerate, folder, str(tmp_path), {"fsdp_size": 2}, num_steps)[0]
    assert_same_run(run, reference("llama", num_steps=num_steps))
    assert run["again"] == run["losses"]


def train_only(folder: str, output_dir: str, fields: dict[str, Any], dtype: str, **arguments: Any) -> dict[str, Any]:
    """Train with a model of some dtype. Also returns the dtypes that the optimizer updates."""
    model = load(folder, dtype=getattr(torch, dtype), **fields)
    trainer = make_trainer(output_dir, model=model, **{**PLAIN, **arguments})
    trainer.train()
    return {
        "losses": losses(trainer),
        "masters": {str(p.dtype) for group in trainer.optimizer.param_groups for p in group["params"]},
        "report": json.loads((Path(output_dir) / "fsdp_report.json").read_text()),
    }


@pytest.mark.parametrize(
    ("fields", "arguments"),
    [
        ({"fsdp_size": 2}, {"bf16": True}),
        slow({"fsdp_size": 2, "fsdp_mixed_precision": True}, {}),
    ],
    ids=str,
)
def test_mixed_precision_has_fp32_master_weights(
    two_ranks: Ranks, folder: str, tmp_path: Path, expected: dict[str, Any], fields: Any, arguments: Any
) -> None:
    run = two_ranks.run(train_only, folder, str(tmp_path), fields, "bfloat16", **arguments)[0]
    assert run["masters"] == {"torch.float32"}
    assert run["losses"] == pytest.approx(expected["losses"], rel=0.02)
    assert differing(run["report"]) == []
    assert {unit["param_dtype"] for unit in run["report"]["units"] if unit["num_params"]} == {"bf16"}


def test_rank_holds_only_its_shards(trained: tuple[dict[str, Any], str]) -> None:
    memory = trained[0]["report"]["memory"]
    assert memory["params_bytes"] == pytest.approx(memory["ddp_params_bytes"] / 2, rel=0.05)


def train_adapters(folder: str, output_dir: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Train LoRA adapters that were added to the sharded model, and resume from the third step."""
    arguments: dict[str, Any] = {**PLAIN, "save_strategy": "steps", "save_steps": 3}
    trainer = make_trainer(output_dir, model=with_adapters(load(folder, **fields)), **arguments)
    trainer.train()
    again = make_trainer(output_dir, model=with_adapters(load(folder, **fields)), **arguments)
    again.train(resume_from_checkpoint=str(Path(output_dir) / "checkpoint-3"))
    return {
        "losses": losses(trainer),
        "norms": norms(trainer),
        "resumed": losses(again),
        "adapters": {name: p.detach().clone() for name, p in trainer.model.named_parameters() if "lora_" in name},
    }


def test_adapters_on_sharded_model_equal_one_process(two_ranks: Ranks, folder: str, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    alone = one_process(folder, str(tmp_path / "alone"), adapters=True)
    runs = two_ranks.run(train_adapters, folder, str(tmp_path), {"fsdp_size": 2})
    assert runs[0]["losses"] == pytest.approx(alone["losses"], rel=RELATIVE)
    assert runs[0]["norms"] == pytest.approx(alone["norms"], rel=RELATIVE)
    assert runs[0]["resumed"] == pytest.approx(runs[0]["losses"], rel=1e-6)
    first, second = (run["adapters"] for run in runs)
    assert first and all(torch.equal(first[name], second[name]) for name in first)


def used_before_prepare(folder: str, fields: dict[str, Any], num_steps: int = 3) -> dict[str, Any]:
    """Compute a loss and create the optimizer before ``prepare``, as scripts do."""
    from accelerate import Accelerator

    from tests.support.tiny import global_batch

    reset_accelerate()
    hfp.install({})
    accelerator = Accelerator(cpu=not on_accelerator())
    model = load(folder, **fields)
    with torch.no_grad():
        model(**global_batch(0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    return train_prepared(accelerator, model, optimizer, "llama", num_steps)


def test_optimizer_made_before_prepare_trains_shards(two_ranks: Ranks, folder: str) -> None:
    run = two_ranks.run(used_before_prepare, folder, {"fsdp_size": 2}, 3)[0]
    alone = reference("llama", num_steps=3)
    assert run["losses"] == pytest.approx(alone["losses"], rel=RELATIVE)
    assert_same_weights(run["weights"], alone["weights"], RELATIVE)


def test_trainer_takes_optimizers(two_ranks: Ranks, folder: str, tmp_path: Path) -> None:
    alone = one_process(folder, str(tmp_path / "alone"), own=True)
    run = two_ranks.run(train, folder, str(tmp_path / "out"), {"fsdp_size": 2}, own=True)[0]
    assert_same_run(run, alone)


def refused_loads(folder: str) -> dict[str, str]:
    """The messages of ``from_pretrained`` after ``install()``, for configs that do not fit."""
    from transformers import AutoModelForCausalLM

    hfp.install({})
    messages = {}
    for name, kwargs in {
        "device_map": {"distributed_config": {"fsdp_size": 2}, "device_map": "auto"},
        "misspelled": {"distributed_config": {"fsdp_szie": 2}},
        "world size": {"distributed_config": {"fsdp_size": 4}},
    }.items():
        try:
            AutoModelForCausalLM.from_pretrained(folder, **kwargs)
        except Exception as error:
            messages[name] = str(error)
    return messages


def test_config_that_does_not_fit_is_refused_at_load(two_ranks: Ranks, folder: str) -> None:
    messages = two_ranks.run(refused_loads, folder)[0]
    assert "FSDP-E651" in messages["device_map"]
    assert "FSDP-E020" in messages["misspelled"]
    # The second text is that of Transformers 5.17 and 5.18.
    assert any(text in messages["world size"] for text in ("4 processes", "fsdp_size (4)"))


def test_tied_weights_are_trained_and_exported(two_ranks: Ranks, tmp_path: Path) -> None:
    tiny_llama(tied=True).save_pretrained(tmp_path / "model")  # type: ignore[operator]
    alone = one_process(str(tmp_path / "model"), str(tmp_path / "alone"))
    run = two_ranks.run(train, str(tmp_path / "model"), str(tmp_path / "out"), {"fsdp_size": 2})[0]
    assert run["losses"] == pytest.approx(alone["losses"], rel=RELATIVE)
    assert run["norms"] == pytest.approx(alone["norms"], rel=RELATIVE)
    assert all(torch.equal(run["exported"][name], weight) for name, weight in run["weights"].items())
