"""``PeftModel.save_pretrained`` of a sharded model writes the whole adapters, or raises an error."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

import hf_fsdp_plugin as hfp
from tests.support.peft_runs import KINDS, adapted_llama
from tests.support.ranks import RankError, Ranks
from tests.support.save_pretrained_runs import Trained, codes_of
from tests.support.tiny import global_batch, tiny_llama

pytest.importorskip("peft")


VERSIONS = [1, 2]

QUICK = ["lora", "modules", "prompt"]


def assert_loads(result: dict[str, Any]) -> None:
    assert result["codes"] == []
    assert torch.allclose(result["loaded"], result["live"], atol=1e-5)


def save(folder: str, form: str, version: int, strategy: str, kind: str, **settings: Any) -> dict[str, Any]:
    """Save adapters after one step, in one of the forms in which scripts do, and load them in one process.

    Returns:
        The logits of the sharded model and of the loaded one, and the codes of problems.
    """
    from peft import PeftModel

    with patch.dict(os.environ):  # BOFT sets the compiler
        run = Trained(version, strategy, partial(adapted_llama, kind), **settings)
    codes: list[str] = []
    if form == "all":
        run.save(folder)
    elif form == "wrapped":
        run.model.save_pretrained(folder, safe_serialization=False)
    elif form == "state_dict":
        run.save(folder, state_dict=run.accelerator.get_state_dict(run.model))
    elif form == "evaluated":
        with torch.no_grad():
            run.loss(1)
        run.save(folder)
    elif form == "one":
        codes = codes_of(lambda: run.unwrapped.save_pretrained(folder)) if run.main else []
    dist.barrier()
    tokens = torch.arange(8)[None]
    run.model.eval()
    with torch.no_grad():
        live = run.model(input_ids=tokens).logits.detach().clone()
        if form == "one":
            return {"codes": codes}
        base: Any = tiny_llama(layers=2, attention_bias=kind == "bias")
        with patch.dict(os.environ):
            loaded = PeftModel.from_pretrained(base, folder).eval()(input_ids=tokens).logits
            fresh = adapted_llama(kind).eval()(input_ids=tokens).logits
    assert KINDS[kind] is not None and not torch.equal(fresh, live), "the step changes the model"
    return {"codes": codes, "live": live, "loaded": loaded}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("kind", QUICK)
def test_adapters_load_in_one_process(two_ranks: Ranks, tmp_path: Path, kind: str, version: int) -> None:
    folder = tmp_path / "adapter"
    assert_loads(two_ranks.run(save, str(folder), "all", version, "full_shard", kind)[0])
    stored = load_file(folder / "adapter_model.safetensors")
    assert stored and not any("_fsdp_wrapped_module" in name for name in stored)
    assert all(tensor.numel() for tensor in stored.values())
    assert not any("layers.0.mlp" in name for name in stored), "the frozen base model is not stored"


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("form", ["wrapped", "state_dict", "evaluated"])
def test_adapters_are_saved_in_every_form(two_ranks: Ranks, tmp_path: Path, form: str, version: int) -> None:
    assert_loads(two_ranks.run(save, str(tmp_path / "adapter"), form, version, "full_shard", "lora")[0])


def added_llama() -> Any:
    """A llama with an adapter that Transformers added."""
    from peft import LoraConfig
    from transformers.integrations import peft

    # Transformers 5.24 needs PEFT 0.22 for all adapters. It was published before that, and LoRA does not need it.
    peft.MIN_PEFT_VERSION = min(peft.MIN_PEFT_VERSION, "0.20.0")
    model: Any = tiny_llama(layers=2)
    torch.manual_seed(1)
    model.add_adapter(LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    return model


def save_added(folder: str, version: int) -> dict[str, Any]:
    """Save a model whose adapter was added with ``model.add_adapter``, and load the adapter in one process."""
    run = Trained(version, model=added_llama)
    run.save(folder)
    dist.barrier()
    tokens = torch.arange(8)[None]
    run.model.eval()
    with torch.no_grad():
        live = run.model(input_ids=tokens).logits.detach().clone()
        base: Any = tiny_llama(layers=2)
        base.load_adapter(folder)
        loaded = base.eval()(input_ids=tokens).logits
        assert not torch.equal(added_llama().eval()(input_ids=tokens).logits, live), "the step changes the model"
    return {"codes": [], "live": live, "loaded": loaded}


@pytest.mark.parametrize("version", VERSIONS)
def test_adapter_of_add_adapter_is_saved(two_ranks: Ranks, tmp_path: Path, version: int) -> None:
    assert_loads(two_ranks.run(save_added, str(tmp_path / "adapter"), version)[0])
    stored = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert stored and all("lora_" in name and "_fsdp_wrapped_module" not in name for name in stored)


def save_added_with_trainer(folder: str, version: int) -> dict[str, torch.Tensor]:
    """Train a model whose adapter was added with ``model.add_adapter``, and return the adapter's whole weights."""
    arguments = hfp.FsdpTrainingArguments(
        output_dir=folder, fsdp="full_shard auto_wrap", fsdp_config={"version": version, "state_dict_type": "FULL"},
        use_cpu=True, max_steps=1, save_steps=1, per_device_train_batch_size=2, report_to="none", disable_tqdm=True,
    )  # fmt: skip
    rows = [{name: value[row] for name, value in global_batch(0).items()} for row in range(4)]
    trainer = hfp.FsdpTrainer(model=added_llama(), args=arguments, train_dataset=rows)
    trainer.train()
    trainer.save_model()
    state = trainer.accelerator.get_state_dict(trainer.model)
    return {name: tensor.clone() for name, tensor in state.items() if "lora_" in name}


@pytest.mark.parametrize("version", VERSIONS)
def test_trainer_saves_adapter_of_add_adapter(two_ranks: Ranks, tmp_path: Path, version: int) -> None:
    trained = two_ranks.run(save_added_with_trainer, str(tmp_path), version)[0]
    for folder in (tmp_path, tmp_path / "checkpoint-1"):
        stored = load_file(folder / "adapter_model.safetensors")
        assert {name.replace(".default", ""): tensor.sum() for name, tensor in trained.items()} == {
            name.removeprefix("base_model.model."): tensor.sum() for name, tensor in stored.items()
        }
        assert not (folder / "model.safetensors").exists()


@pytest.mark.parametrize("version", VERSIONS)
def test_save_of_adapters_on_one_rank_raises(two_ranks: Ranks, tmp_path: Path, version: int) -> None:
    result = two_ranks.run(save, str(tmp_path / "adapter"), "one", version, "full_shard", "lora")[0]
    assert result["codes"] == ["FSDP-E670"]
    assert not list(tmp_path.rglob("adapter_model*"))


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("kind", sorted(set(KINDS) - set(QUICK) - {"two", "adalora"}))
def test_every_kind_of_adapter_is_saved(two_ranks: Ranks, tmp_path: Path, kind: str, version: int) -> None:
    if (kind, version) == ("parameters", 1):
        with pytest.raises(RankError, match="FSDP-E646"):
            two_ranks.run(save, str(tmp_path / "adapter"), "all", version, "full_shard", kind)
        return
    assert_loads(two_ranks.run(save, str(tmp_path / "adapter"), "all", version, "full_shard", kind)[0])


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("strategy", ["hybrid_shard", "no_shard"])
@pytest.mark.parametrize("form", ["all", "one", "state_dict", "evaluated"])
def test_adapters_with_every_strategy(
    four_ranks: Ranks, tmp_path: Path, form: str, strategy: str, version: int
) -> None:
    result = four_ranks.run(save, str(tmp_path / "adapter"), form, version, strategy, "lora")[0]
    if form == "one":
        assert result["codes"] == ["FSDP-E670"]
    else:
        assert_loads(result)
