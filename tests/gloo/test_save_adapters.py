"""``PeftModel.save_pretrained`` of a sharded model writes the whole adapters, or raises an error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support.ranks import Ranks

pytest.importorskip("peft")

from tests.gloo import cases_save_adapters as cases

VERSIONS = [1, 2]
QUICK = ["lora", "modules", "prompt"]


def assert_loads(result: dict[str, Any]) -> None:
    assert result["codes"] == []
    assert torch.allclose(result["loaded"], result["live"], atol=1e-5)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("kind", QUICK)
def test_adapters_load_in_one_process(two_ranks: Ranks, tmp_path: Path, kind: str, version: int) -> None:
    folder = tmp_path / "adapter"
    assert_loads(two_ranks.run(cases.save, str(folder), "all", version, "full_shard", kind)[0])
    stored = load_file(folder / "adapter_model.safetensors")
    assert stored and not any("_fsdp_wrapped_module" in name for name in stored)
    assert all(tensor.numel() for tensor in stored.values())
    assert not any("layers.0.mlp" in name for name in stored), "the frozen base model is not stored"


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("form", ["wrapped", "state_dict", "evaluated"])
def test_adapters_are_saved_in_every_form(two_ranks: Ranks, tmp_path: Path, form: str, version: int) -> None:
    assert_loads(two_ranks.run(cases.save, str(tmp_path / "adapter"), form, version, "full_shard", "lora")[0])


@pytest.mark.parametrize("version", VERSIONS)
def test_adapter_of_add_adapter_is_saved(two_ranks: Ranks, tmp_path: Path, version: int) -> None:
    assert_loads(two_ranks.run(cases.save_added, str(tmp_path / "adapter"), version)[0])
    stored = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert stored and all("lora_" in name and "_fsdp_wrapped_module" not in name for name in stored)


@pytest.mark.parametrize("version", VERSIONS)
def test_trainer_saves_adapter_of_add_adapter(two_ranks: Ranks, tmp_path: Path, version: int) -> None:
    trained = two_ranks.run(cases.save_added_with_trainer, str(tmp_path), version)[0]
    for folder in (tmp_path, tmp_path / "checkpoint-1"):
        stored = load_file(folder / "adapter_model.safetensors")
        assert {name.replace(".default", ""): tensor.sum() for name, tensor in trained.items()} == {
            name.removeprefix("base_model.model."): tensor.sum() for name, tensor in stored.items()
        }
        assert not (folder / "model.safetensors").exists()


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(("form", "code"), [("one", "FSDP-E670"), ("conversion", "FSDP-E675")])
def test_unsupported_save_of_adapters_raises(
    two_ranks: Ranks, tmp_path: Path, form: str, code: str, version: int
) -> None:
    result = two_ranks.run(cases.save, str(tmp_path / "adapter"), form, version, "full_shard", "lora")[0]
    assert result["codes"] == [code]
    assert not list(tmp_path.rglob("adapter_model*"))


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("kind", sorted(set(cases.KINDS) - set(QUICK) - {"two", "adalora"}))
def test_every_kind_of_adapter_is_saved(two_ranks: Ranks, tmp_path: Path, kind: str, version: int) -> None:
    assert_loads(two_ranks.run(cases.save, str(tmp_path / "adapter"), "all", version, "full_shard", kind)[0])


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("strategy", ["hybrid_shard", "no_shard"])
@pytest.mark.parametrize("form", ["all", "one", "state_dict", "evaluated"])
def test_adapters_with_every_strategy(
    four_ranks: Ranks, tmp_path: Path, form: str, strategy: str, version: int
) -> None:
    result = four_ranks.run(cases.save, str(tmp_path / "adapter"), form, version, strategy, "lora")[0]
    if form == "one":
        assert result["codes"] == ["FSDP-E670"]
    else:
        assert_loads(result)
