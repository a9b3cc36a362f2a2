"""Code that reads ``args.fsdp_config`` finds what Transformers itself would leave there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainingArguments

import hf_fsdp_plugin as hfp

LAYER = "LlamaDecoderLayer"


def config_after(fsdp: Any, config: Any) -> dict[str, Any]:
    return dict(TrainingArguments("out", use_cpu=True, fsdp=fsdp, fsdp_config=config).fsdp_config)


@pytest.mark.parametrize(
    ("fsdp", "config"),
    [
        (True, None),
        (True, {"fsdp_transformer_layer_cls_to_wrap": LAYER}),
        (True, {"transformer_layer_cls_to_wrap": [LAYER], "version": 1}),
        (True, {"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP", "fsdp_min_num_params": 2000}),
        ("full_shard auto_wrap", {"fsdp_state_dict_type": "SHARDED_STATE_DICT"}),
        ("shard_grad_op auto_wrap", {}),
        ("full_shard offload", {"fsdp_version": 1}),
        ("shard_grad_op", {"version": 1}),
    ],
)
@pytest.mark.parametrize("form", ["dict", "file"])
def test_config_is_that_of_stock(
    fsdp: Any, config: Any, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "")  # Transformers sets it
    monkeypatch.delenv("FSDP_CPU_RAM_EFFICIENT_LOADING")

    def given() -> Any:
        if form == "dict" or config is None:
            return config if config is None else dict(config)
        path = tmp_path / "fsdp.json"
        path.write_text(json.dumps(config))
        return str(path)

    hfp.uninstall()
    stock = config_after(fsdp, given())
    hfp.install({})
    try:
        assert config_after(fsdp, given()) == stock
    finally:
        hfp.uninstall()


def test_arguments_can_be_made_again_from_their_config() -> None:
    hfp.install({})
    try:
        first = TrainingArguments("out", use_cpu=True, fsdp="shard_grad_op offload", fsdp_config={"version": 1})
        again = TrainingArguments("out", use_cpu=True, fsdp=first.fsdp, fsdp_config=first.fsdp_config)
        assert again.fsdp_config == first.fsdp_config
    finally:
        hfp.uninstall()
