"""The files next to the weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hf_fsdp_plugin.problems import CheckpointError
from hf_fsdp_plugin.tools.merge.merging import MergeOptions, merge
from tests.support.merge_inputs import CONFIG, codes, messages


def test_config_tokenizer_and_code_are_copied(checkpoint: Path, out: Path) -> None:
    kept = ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "spiece.model", "modeling_own.py"]
    kept += ["generation_config.json", "preprocessor_config.json", "special_tokens_map.json"]
    for name in (*kept, "training_args.bin", "optimizer.bin", "report.json"):
        (checkpoint / name).write_text("x")
    (checkpoint / "config.json").write_text(json.dumps({**CONFIG, "auto_map": {"AutoModel": "modeling_own.Own"}}))
    merged = merge(checkpoint, out, MergeOptions())
    assert merged.companions == sorted([*kept, "config.json"])
    assert {path.name for path in out.iterdir()} == {*kept, "config.json", "model.safetensors"}


def test_scripts_of_a_run_are_not_copied(checkpoint: Path, out: Path) -> None:
    (checkpoint.parent / "config.json").write_text(json.dumps(CONFIG))
    (checkpoint.parent / "train.py").write_text("x")
    assert merge(checkpoint, out, MergeOptions()).companions == ["config.json"]


def test_missing_config_is_reported(checkpoint: Path, out: Path) -> None:
    merged = merge(checkpoint, out, MergeOptions())
    assert codes(merged) == ["FSDP-W488"] and "--config" in messages(merged)


def test_config_folder_without_config_is_refused(checkpoint: Path, out: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="FSDP-E489"):
        merge(checkpoint, out, MergeOptions(config=tmp_path))
