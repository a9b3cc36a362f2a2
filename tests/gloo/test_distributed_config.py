"""Models that ``from_pretrained(distributed_config=…)`` shards: training, reports, checkpoints and resuming."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gloo import cases_distributed_config as cases
from tests.support.matrices import needs_transformers, slow
from tests.support.ranks import Ranks
from tests.support.tiny import tiny_llama
from tests.support.training import assert_same_weights, differing, reference

RELATIVE = 1e-4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with the weights of a small model."""
    path = tmp_path_factory.mktemp("model")
    tiny_llama().save_pretrained(path)  # type: ignore[operator]
    return str(path)


@pytest.fixture(scope="module")
def expected(folder: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return cases.one_process(folder, str(tmp_path_factory.mktemp("reference")))


@pytest.fixture(scope="module")
def trained(two_ranks: Ranks, folder: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    """The results of two ranks, and the folder with their checkpoints."""
    output = str(tmp_path_factory.mktemp("trained"))
    return two_ranks.run(cases.train, folder, output, {"fsdp_size": 2})[0], output


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


@pytest.mark.parametrize("fields", [{"fsdp_size": 2}, slow(None)], ids=str)
def test_resumed_training_equals_uninterrupted(
    two_ranks: Ranks, folder: str, trained: tuple[dict[str, Any], str], fields: dict[str, Any] | None
) -> None:
    run, output = trained
    resumed = two_ranks.run(cases.resume, folder, output, fields)[0]
    assert resumed["losses"] == pytest.approx(run["losses"], rel=1e-6)
    assert_same_weights(resumed["weights"], run["weights"], 1e-6)


@needs_transformers("5.23")
@pytest.mark.slow
def test_two_by_two_mesh_equals_one_process(
    four_ranks: Ranks, folder: str, tmp_path: Path, expected: dict[str, Any]
) -> None:
    fields = {"fsdp_size": 2, "dp_replicate_size": 2}
    run = four_ranks.run(cases.train, folder, str(tmp_path), fields)[0]
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
    resumed = four_ranks.run(cases.resume, folder, output, fields)[0]
    assert resumed["losses"] == pytest.approx(run["losses"], rel=RELATIVE)


def test_accelerator_adopts_model(two_ranks: Ranks, folder: str, tmp_path: Path) -> None:
    num_steps = 4
    run = two_ranks.run(cases.accelerate, folder, str(tmp_path), {"fsdp_size": 2}, num_steps)[0]
    assert_same_run(run, reference("llama", num_steps=num_steps))
    assert run["again"] == run["losses"]


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
    run = two_ranks.run(cases.train_only, folder, str(tmp_path), fields, "bfloat16", **arguments)[0]
    assert run["masters"] == {"torch.float32"}
    assert run["losses"] == pytest.approx(expected["losses"], rel=0.02)
    assert differing(run["report"]) == []
    assert {unit["param_dtype"] for unit in run["report"]["units"] if unit["num_params"]} == {"bf16"}


def test_rank_holds_only_its_shards(trained: tuple[dict[str, Any], str]) -> None:
    memory = trained[0]["report"]["memory"]
    assert memory["params_bytes"] == pytest.approx(memory["ddp_params_bytes"] / 2, rel=0.05)


def test_adapters_on_sharded_model_equal_one_process(two_ranks: Ranks, folder: str, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    alone = cases.one_process(folder, str(tmp_path / "alone"), adapters=True)
    runs = two_ranks.run(cases.train_adapters, folder, str(tmp_path), {"fsdp_size": 2})
    assert runs[0]["losses"] == pytest.approx(alone["losses"], rel=RELATIVE)
    assert runs[0]["norms"] == pytest.approx(alone["norms"], rel=RELATIVE)
    assert runs[0]["resumed"] == pytest.approx(runs[0]["losses"], rel=1e-6)
    first, second = (run["adapters"] for run in runs)
    assert first and all(torch.equal(first[name], second[name]) for name in first)


def test_optimizer_made_before_prepare_trains_shards(two_ranks: Ranks, folder: str) -> None:
    run = two_ranks.run(cases.used_before_prepare, folder, {"fsdp_size": 2}, 3)[0]
    alone = reference("llama", num_steps=3)
    assert run["losses"] == pytest.approx(alone["losses"], rel=RELATIVE)
    assert_same_weights(run["weights"], alone["weights"], RELATIVE)


def test_trainer_takes_optimizers(two_ranks: Ranks, folder: str, tmp_path: Path) -> None:
    alone = cases.one_process(folder, str(tmp_path / "alone"), own=True)
    run = two_ranks.run(cases.train, folder, str(tmp_path / "out"), {"fsdp_size": 2}, own=True)[0]
    assert_same_run(run, alone)


def test_config_that_does_not_fit_is_refused_at_load(two_ranks: Ranks, folder: str) -> None:
    messages = two_ranks.run(cases.refused_loads, folder)[0]
    assert "FSDP-E651" in messages["device_map"]
    assert "FSDP-E020" in messages["misspelled"]
    # The second text is that of Transformers 5.17 and 5.18.
    assert any(text in messages["world size"] for text in ("4 processes", "fsdp_size (4)"))


def test_tied_weights_are_trained_and_exported(two_ranks: Ranks, tmp_path: Path) -> None:
    tiny_llama(tied=True).save_pretrained(tmp_path / "model")  # type: ignore[operator]
    alone = cases.one_process(str(tmp_path / "model"), str(tmp_path / "alone"))
    run = two_ranks.run(cases.train, str(tmp_path / "model"), str(tmp_path / "out"), {"fsdp_size": 2})[0]
    assert run["losses"] == pytest.approx(alone["losses"], rel=RELATIVE)
    assert run["norms"] == pytest.approx(alone["norms"], rel=RELATIVE)
    assert all(torch.equal(run["exported"][name], weight) for name, weight in run["weights"].items())
