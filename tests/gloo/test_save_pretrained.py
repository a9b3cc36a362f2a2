"""``save_pretrained`` and its relatives write the whole trained model, or raise an error."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, LlamaModel

from tests.support.matrices import slow
from tests.support.ranks import Ranks
from tests.support.save_pretrained_runs import Trained, codes_of
from tests.support.tiny import MODELS

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


def save(folder: str, form: str, version: int, strategy: str, model: Any = "llama", **settings: Any) -> dict[str, Any]:
    """Save a trained model in one of the forms in which scripts do.

    Returns:
        The weights, and the codes of problems.
    """
    run = Trained(version, strategy, model, **settings)
    codes: list[str] = []
    if form == "all":
        run.save(folder)
    elif form == "wrapped":
        run.model.save_pretrained(folder)
    elif form == "split":
        run.save(folder)
        run.save(folder, max_shard_size="20KB")
    elif form == "state_dict":
        state = run.accelerator.get_state_dict(run.model)
        run.save(folder, state_dict=state)
    elif form == "state_dict_main":
        state = run.accelerator.get_state_dict(run.model)
        if run.main:
            run.unwrapped.save_pretrained(folder, state_dict=state)
    elif form == "evaluated":
        run.model.eval()
        with torch.no_grad():
            run.loss(1)
        run.save(folder)
    elif form == "variant":
        run.save(folder, variant="fp32")
    elif form == "folders":
        run.unwrapped.save_pretrained(folder if run.main else f"{folder}-{run.rank}")
    elif form == "one":
        codes = codes_of(lambda: run.unwrapped.save_pretrained(folder)) if run.main else []
    elif form == "one_then_all":
        codes = codes_of(lambda: run.unwrapped.save_pretrained(folder)) if run.main else []
        dist.barrier()
        run.save(folder)
    else:
        raise ValueError(form)
    dist.barrier()
    return {"codes": codes, "weights": run.weights()}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("form", ["all", "wrapped", "split", "state_dict", "state_dict_main", "evaluated"])
def test_saved_model_equals_trained_model(two_ranks: Ranks, tmp_path: Path, form: str, version: int) -> None:
    folder = tmp_path / "model"
    result = two_ranks.run(save, str(folder), form, version, "full_shard")[0]
    assert_loads(folder, result["weights"])
    names = {path.name for path in folder.iterdir()}
    assert {"config.json", "generation_config.json"} <= names
    assert ("model.safetensors" in names) != (form == "split"), "an earlier save leaves no stale weights"
    assert [path.name for path in tmp_path.iterdir()] == ["model"] and not list(folder.glob(".*"))


@pytest.mark.parametrize("version", VERSIONS)
def test_save_on_one_rank_raises_and_can_be_repeated(two_ranks: Ranks, tmp_path: Path, version: int) -> None:
    folder = tmp_path / "model"
    first, second = two_ranks.run(save, str(folder), "one_then_all", version, "full_shard")
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
    result = four_ranks.run(save, str(folder), form, version, strategy)[0]
    if form == "one":
        assert result["codes"] == ["FSDP-E670"] and not list(tmp_path.rglob("*.safetensors"))
    else:
        assert_loads(folder, result["weights"], **({"variant": "fp32"} if form == "variant" else {}))


@pytest.mark.parametrize(
    ("version", "model", "settings"),
    [
        (1, "experts", {}),
        (2, "experts", {}),
        (1, "llama", {"use_orig_params": False}),
        (1, "llama-bf16", {"use_orig_params": False}),
        (2, "llama-bf16", {}),
    ],
    ids=str,
)
def test_other_models_and_settings(
    two_ranks: Ranks, tmp_path: Path, version: int, model: str, settings: dict[str, Any]
) -> None:
    result = two_ranks.run(save, str(tmp_path / "model"), "all", version, "full_shard", model, **settings)[0]
    assert_loads(tmp_path / "model", result["weights"], dtype="auto")
    if model == "experts":
        assert any("experts.0." in name for name in load_file(tmp_path / "model" / "model.safetensors"))


def save_modules(folder: str, version: int, **settings: Any) -> dict[str, Any]:
    """Save modules of a sharded model, and an unrelated model that is not sharded."""
    run = Trained(version, **settings)
    run.save(f"{folder}/base", run.unwrapped.model)
    run.accelerator.save_model(run.unwrapped.model, f"{folder}/accelerate")
    plain = MODELS["llama"]()
    run.save(f"{folder}/plain", plain)
    run.accelerator.save_model(plain, f"{folder}/plain_accelerate")
    dist.barrier()
    return {"weights": run.weights(), "plain": dict(plain.state_dict())}


@pytest.mark.parametrize("version", VERSIONS)
def test_module_of_sharded_model_is_saved(two_ranks: Ranks, tmp_path: Path, version: int) -> None:
    result = two_ranks.run(save_modules, str(tmp_path), version)[0]
    expected = {
        name.removeprefix("model."): tensor for name, tensor in result["weights"].items() if name.startswith("model.")
    }
    assert_equal(dict(LlamaModel.from_pretrained(tmp_path / "base").state_dict()), expected)
    assert_equal(load_file(tmp_path / "accelerate" / "model.safetensors"), expected)
    assert_loads(tmp_path / "plain", result["plain"])
    assert_equal(load_file(tmp_path / "plain_accelerate" / "model.safetensors"), result["plain"])


def use_state_dicts(folder: str, version: int, strategy: str) -> dict[str, Any]:
    """Write state dicts with torch and safetensors, and read them back into the model."""
    run = Trained(version, strategy)
    path = Path(folder)
    expected = run.weights()
    results: dict[str, Any] = {"weights": expected}
    state = run.accelerator.get_state_dict(run.model)
    if run.main:
        torch.save(state, path / "gathered.pt")
        save_file({name: tensor.contiguous() for name, tensor in state.items()}, path / "gathered.safetensors")
    live = run.unwrapped.state_dict()
    results["torch.save"] = codes_of(lambda: torch.save({"model": live, "step": [1, 2]}, path / f"live{run.rank}.pt"))
    results["accelerator.save"] = codes_of(lambda: run.accelerator.save(live, path / "accelerate.pt"))
    results["unchanged"] = all(isinstance(value, DTensor) == (version == 2) for value in live.values())
    results["safetensors"] = codes_of(lambda: save_file(dict(live), path / f"live{run.rank}.safetensors"))
    parameters = dict(run.model.named_parameters())
    results["parameters"] = codes_of(lambda: torch.save(parameters, path / f"parameters{run.rank}.pt"))
    steps = run.optimizer.state_dict()
    results["optimizer"] = codes_of(lambda: torch.save(steps, path / f"optimizer{run.rank}.pt"))
    copies = {name: value.clone() for name, value in live.items()}
    with torch.no_grad():
        for parameter in run.model.parameters():
            parameter.zero_()
    run.unwrapped.load_state_dict(copies)
    results["loaded"] = run.weights()
    module = run.unwrapped.model.norm.state_dict()
    results["module"] = {name: value.full_tensor() if version == 2 else value for name, value in module.items()}
    return results


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
def test_state_dict_is_whole_or_refused(two_ranks: Ranks, tmp_path: Path, strategy: str, version: int) -> None:
    ranks = two_ranks.run(use_state_dicts, str(tmp_path), version, strategy)
    expected = ranks[0]["weights"]
    assert_equal(torch.load(tmp_path / "gathered.pt"), expected)
    assert_equal(load_file(tmp_path / "gathered.safetensors"), expected)
    assert_equal(ranks[0]["loaded"], expected)
    assert torch.equal(ranks[0]["module"]["weight"], expected["model.norm.weight"])
    sharded = strategy == "full_shard"
    for result in ranks:
        assert result["torch.save"] == (["FSDP-E672"] if version == 2 else [])
        assert result["unchanged"]
        assert result["safetensors"] == (["FSDP-E672"] if version == 2 else [])
        assert result["parameters"] == (["FSDP-E672"] if sharded or version == 2 else [])
        assert result["optimizer"] == (["FSDP-E672"] if sharded or version == 2 else [])
    for rank in range(2) if version == 1 else ():
        saved = torch.load(tmp_path / f"live{rank}.pt")
        assert_equal(saved["model"], expected)
        assert saved["step"] == [1, 2]
    assert ranks[0]["accelerator.save"] == (["FSDP-E672"] if version == 2 else [])
    if version == 1:
        assert_equal(torch.load(tmp_path / "accelerate.pt"), expected)
        assert_equal(load_file(tmp_path / "live0.safetensors"), expected)
    if sharded and version == 1:
        assert not (tmp_path / "parameters0.pt").exists()


def call_on_one_rank(version: int) -> dict[str, list[str]]:
    """Make collective calls on rank 0 only."""
    run = Trained(version)
    calls: dict[str, Callable[[], Any]] = {
        "get_state_dict": lambda: run.accelerator.get_state_dict(run.model),
        "save_model": lambda: run.accelerator.save_model(run.model, "never"),
        "push_to_hub": lambda: run.unwrapped.push_to_hub("never"),
    }
    if version == 1:
        calls["state_dict"] = lambda: run.unwrapped.state_dict()
        calls["wrapped_state_dict"] = lambda: run.model.state_dict()
    codes = {name: codes_of(call) for name, call in calls.items()} if run.main else {}
    dist.barrier()
    return codes


@pytest.mark.parametrize("version", [1, slow(2)])
def test_collective_call_on_one_rank_raises(two_ranks: Ranks, version: int) -> None:
    codes = two_ranks.run(call_on_one_rank, version)[0]
    assert codes and set(map(tuple, codes.values())) == {("FSDP-E670",)}


def save_quantized(folder: str) -> list[str]:
    """Save a model that looks quantized."""
    run = Trained(2)
    run.unwrapped.hf_quantizer = object()
    return codes_of(lambda: run.save(folder))


def test_quantized_model_is_refused(two_ranks: Ranks, tmp_path: Path) -> None:
    assert two_ranks.run(save_quantized, str(tmp_path / "model")) == [["FSDP-E673"]] * 2
    assert not list(tmp_path.rglob("*.safetensors"))


def give_wrong_state(version: int, folder: str) -> dict[str, list[str]]:
    """Pass incomplete and sharded state dicts to ``save_pretrained``."""
    run = Trained(version)
    whole = run.accelerator.get_state_dict(run.model)
    parameters = dict(run.unwrapped.named_parameters())
    states = {
        "whole": whole,
        "incomplete": {name: tensor for name, tensor in whole.items() if "layers.1." not in name},
        "sharded": parameters,
        "empty": {name: torch.empty(0) for name in whole},
        "nothing": {},
    }
    codes = {}
    if run.main:
        for name, state in states.items():
            codes[name] = codes_of(lambda state=state: run.unwrapped.save_pretrained(folder, state_dict=state))
    dist.barrier()
    return codes


@pytest.mark.parametrize("version", VERSIONS)
def test_given_state_must_be_whole(two_ranks: Ranks, tmp_path: Path, version: int) -> None:
    codes = two_ranks.run(give_wrong_state, version, str(tmp_path / "model"))[0]
    assert codes.pop("whole") == []
    assert codes.keys() == {"incomplete", "sharded", "empty", "nothing"}
    assert set(map(tuple, codes.values())) == {("FSDP-E671",)}


def push(version: int, record: str) -> dict[str, Any]:
    """Upload a model with a hub that records the files."""
    from transformers.utils import hub

    run = Trained(version)
    uploads: list[str] = []

    def upload(self: Any, folder: str, repo_id: str, *args: Any, **kwargs: Any) -> str:
        target = Path(record) / repo_id.rpartition("/")[2]
        target.mkdir(parents=True)
        for path in Path(folder).iterdir():
            (target / path.name).write_bytes(path.read_bytes())
        uploads.append(repo_id)
        return f"uploaded {repo_id}"

    class Api:
        def create_repo(self, repo_id: str, **_: Any) -> Any:
            return type("Repo", (), {"repo_id": repo_id})

    class Card:
        def save(self, path: str) -> None:
            Path(path).write_text("card")

    from transformers import modeling_utils

    originals = {
        (hub, "hf_api"): lambda *_, **__: Api(),
        (hub, "create_and_tag_model_card"): lambda *_, **__: Card(),
        (modeling_utils, "hf_api"): lambda *_, **__: Api(),
        (modeling_utils, "create_and_tag_model_card"): lambda *_, **__: Card(),
        (hub.PushToHubMixin, "_upload_modified_files"): upload,
    }
    before = {key: getattr(*key) for key in originals}
    try:
        for (owner, name), value in originals.items():
            setattr(owner, name, value)
        result = run.unwrapped.push_to_hub("user/pushed")
        run.save(f"{record}-local", push_to_hub=True, repo_id="user/saved")
    finally:
        for (owner, name), value in before.items():
            setattr(owner, name, value)
    dist.barrier()
    return {"result": result, "uploads": uploads, "weights": run.weights()}


@pytest.mark.parametrize("version", VERSIONS)
def test_model_is_uploaded_once_and_whole(two_ranks: Ranks, tmp_path: Path, version: int) -> None:
    ranks = two_ranks.run(push, version, str(tmp_path / "hub"))
    assert [result["result"] for result in ranks] == ["uploaded user/pushed"] * 2
    assert [len(result["uploads"]) for result in ranks] == [2, 0]
    for name in ("pushed", "saved"):
        assert_loads(tmp_path / "hub" / name, ranks[0]["weights"])
