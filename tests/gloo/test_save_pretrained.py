"""``save_pretrained`` and its relatives write the whole trained model, or raise an error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaModel

from tests.gloo import cases_save_pretrained as cases
from tests.support.matrices import slow
from tests.support.ranks import Ranks

VERSIONS = [1, 2]


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


def assert_loads(folder: Path, expected: dict[str, torch.Tensor], **arguments: Any) -> None:
    """Load a folder, and compare with the weights in memory."""
    loaded, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **arguments)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert_equal(dict(loaded.state_dict()), expected)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("form", ["all", "wrapped", "split", "state_dict", "state_dict_main", "evaluated"])
def test_saved_model_equals_trained_model(two_ranks: Ranks, tmp_path: Path, form: str, version: int) -> None:
    folder = tmp_path / "model"
    result = two_ranks.run(cases.save, str(folder), form, version, "full_shard")[0]
    assert_loads(folder, result["weights"])
    names = {path.name for path in folder.iterdir()}
    assert {"config.json", "generation_config.json"} <= names
    assert ("model.safetensors" in names) != (form == "split"), "an earlier save leaves no stale weights"
    assert [path.name for path in tmp_path.iterdir()] == ["model"] and not list(folder.glob(".*"))


@pytest.mark.parametrize("version", VERSIONS)
def test_save_on_one_rank_raises_and_can_be_repeated(two_ranks: Ranks, tmp_path: Path, version: int) -> None:
    folder = tmp_path / "model"
    first, second = two_ranks.run(cases.save, str(folder), "one_then_all", version, "full_shard")
    assert (first["codes"], second["codes"]) == (["FSDP-E670"], [])
    assert_loads(folder, first["weights"])


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("strategy", ["full_shard", "hybrid_shard", "no_shard"])
@pytest.mark.parametrize("form", ["all", "one", "state_dict", "state_dict_main", "evaluated", "variant", "folders"])
def test_every_form_with_every_strategy(
    four_ranks: Ranks, tmp_path: Path, form: str, strategy: str, version: int
) -> None:
    folder = tmp_path / "model"
    result = four_ranks.run(cases.save, str(folder), form, version, strategy)[0]
    if form == "one":
        assert result["codes"] == ["FSDP-E670"] and not list(tmp_path.rglob("*.safetensors"))
    else:
        assert_loads(folder, result["weights"], **({"variant": "fp32"} if form == "variant" else {}))


@pytest.mark.parametrize(
    ("version", "model", "settings"),
    [
        (1, "mixture", {}),
        (2, "mixture", {}),
        (1, "llama", {"use_orig_params": False}),
        (1, "llama-bf16", {"use_orig_params": False}),
        (2, "llama-bf16", {}),
    ],
    ids=str,
)
def test_other_models_and_settings(
    two_ranks: Ranks, tmp_path: Path, version: int, model: str, settings: dict[str, Any]
) -> None:
    result = two_ranks.run(cases.save, str(tmp_path / "model"), "all", version, "full_shard", model, **settings)[0]
    assert_loads(tmp_path / "model", result["weights"], dtype="auto")
    if model == "mixture":
        assert any("experts.0." in name for name in load_file(tmp_path / "model" / "model.safetensors"))


@pytest.mark.parametrize("version", VERSIONS)
def test_module_of_sharded_model_is_saved(two_ranks: Ranks, tmp_path: Path, version: int) -> None:
    result = two_ranks.run(cases.save_modules, str(tmp_path), version)[0]
    expected = {
        name.removeprefix("model."): tensor for name, tensor in result["weights"].items() if name.startswith("model.")
    }
    assert_equal(dict(LlamaModel.from_pretrained(tmp_path / "base").state_dict()), expected)
    assert_equal(load_file(tmp_path / "accelerate" / "model.safetensors"), expected)
    assert_loads(tmp_path / "plain", result["plain"])
    assert_equal(load_file(tmp_path / "plain_accelerate" / "model.safetensors"), result["plain"])


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
def test_state_dict_is_whole_or_refused(two_ranks: Ranks, tmp_path: Path, strategy: str, version: int) -> None:
    ranks = two_ranks.run(cases.use_state_dicts, str(tmp_path), version, strategy)
    expected = ranks[0]["weights"]
    assert_equal(torch.load(tmp_path / "gathered.pt"), expected)
    assert_equal(load_file(tmp_path / "gathered.safetensors"), expected)
    assert_equal(ranks[0]["loaded"], expected)
    assert torch.equal(ranks[0]["module"]["weight"], expected["model.norm.weight"])
    sharded = strategy == "full_shard"
    for result in ranks:
        assert result["torch.save"] == result["accelerator.save"] == [] and result["unchanged"]
        assert result["safetensors"] == (["FSDP-E672"] if version == 2 else [])
        assert result["parameters"] == (["FSDP-E672"] if sharded and version == 1 else [])
        assert result["optimizer"] == (["FSDP-E672"] if sharded or version == 2 else [])
    for rank in range(2):
        saved = torch.load(tmp_path / f"live{rank}.pt")
        assert_equal(saved["model"], expected)
        assert saved["step"] == [1, 2]
    assert_equal(torch.load(tmp_path / "accelerate.pt"), expected)
    assert_equal(load_file(tmp_path / "accelerate.safetensors"), expected)
    if version == 1:
        assert_equal(load_file(tmp_path / "live0.safetensors"), expected)
    if sharded and version == 1:
        assert not (tmp_path / "parameters0.pt").exists()


@pytest.mark.parametrize("version", [1, slow(2)])
def test_collective_call_on_one_rank_raises(two_ranks: Ranks, version: int) -> None:
    codes = two_ranks.run(cases.call_on_one_rank, version)[0]
    assert codes and set(map(tuple, codes.values())) == {("FSDP-E670",)}


def test_quantized_model_is_refused(two_ranks: Ranks, tmp_path: Path) -> None:
    assert two_ranks.run(cases.save_quantized, str(tmp_path / "model")) == [["FSDP-E673"]] * 2
    assert not list(tmp_path.rglob("*.safetensors"))


@pytest.mark.parametrize("version", VERSIONS)
def test_given_state_must_be_whole(two_ranks: Ranks, tmp_path: Path, version: int) -> None:
    codes = two_ranks.run(cases.give_wrong_state, version, str(tmp_path / "model"))[0]
    assert codes.pop("whole") == []
    assert codes.keys() == {"incomplete", "sharded", "empty", "nothing"}
    assert set(map(tuple, codes.values())) == {("FSDP-E671",)}


@pytest.mark.parametrize("version", VERSIONS)
def test_model_is_uploaded_once_and_whole(two_ranks: Ranks, tmp_path: Path, version: int) -> None:
    ranks = two_ranks.run(cases.push, version, str(tmp_path / "hub"))
    assert [result["result"] for result in ranks] == ["uploaded user/pushed"] * 2
    assert [len(result["uploads"]) for result in ranks] == [2, 0]
    for name in ("pushed", "saved"):
        assert_loads(tmp_path / "hub" / name, ranks[0]["weights"])
