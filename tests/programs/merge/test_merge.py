"""The part of tests/unit/merge/test_merge.py that starts processes or computes for seconds."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.numpy import save_file

from hf_fsdp_plugin.problems import CheckpointError
from hf_fsdp_plugin.tools.merge.merge_plan import staging_path
from hf_fsdp_plugin.tools.merge.merging import MergeOptions, merge
from tests.support.merge_inputs import TENSORS, assert_same, codes, messages, read, tree


def test_stock_shards_load_in_transformers(tmp_path: Path, out: Path) -> None:
    """Without a manifest, names and shapes are compared with the config's model."""
    import torch
    import torch.distributed.checkpoint as dcp
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config)
    stock = tmp_path / "run" / "checkpoint-1"
    # Accelerate stores tied weights twice.
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    dcp.save({"model": state}, checkpoint_id=stock / "pytorch_model_fsdp_0", no_dist=True)
    (stock / "trainer_state.json").write_text("{}")
    model.config.architectures = ["LlamaForCausalLM"]
    model.config.save_pretrained(stock.parent)

    merged = merge(stock, out, MergeOptions(verify=True))
    assert (merged.compared_with, merged.verified) == ("model", True)
    assert codes(merged) == ["FSDP-N490"] and f"from {stock.parent}." in messages(merged)
    loaded = AutoModelForCausalLM.from_pretrained(out).state_dict()
    assert loaded.keys() == state.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in state.items())

    # Another architecture is refused, and nothing is changed.
    LlamaConfig(**{**config.to_dict(), "num_hidden_layers": 3}).save_pretrained(tmp_path / "other")
    before = tree(tmp_path)
    with pytest.raises(CheckpointError, match=r"9 of the 30 parameters of the LlamaForCausalLM.*FSDP-E477"):
        merge(stock, tmp_path / "new", MergeOptions(config=tmp_path / "other"))
    assert tree(tmp_path) == before
    assert not staging_path(tmp_path / "new").exists()


def test_different_copies_of_tied_weights_are_kept(tmp_path: Path, out: Path) -> None:
    (tmp_path / "ck").mkdir()
    save_file(TENSORS, tmp_path / "ck" / "model.safetensors")
    (tmp_path / "ck" / "config.json").write_text('{"model_type": "no such", "tie_word_embeddings": true}')
    merged = merge(tmp_path / "ck", out, MergeOptions())
    assert_same(read(out))
    assert "FSDP-N475" in codes(merged)
