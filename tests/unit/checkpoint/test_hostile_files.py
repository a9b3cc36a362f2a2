"""Hostile checkpoints: no private file is published, no small file fills the memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import save_file

from hf_fsdp_plugin.checkpoint.checking.inspection import _last_file_problems
from hf_fsdp_plugin.checkpoint.formats.known_formats import read_stored_model
from hf_fsdp_plugin.checkpoint.io import parse_json
from hf_fsdp_plugin.checkpoint.names import MANIFEST_NAME
from hf_fsdp_plugin.checkpoint.reading.resharding import _model_type
from hf_fsdp_plugin.problems import CheckpointError
from hf_fsdp_plugin.tools.export.verb import find_checkpoint
from hf_fsdp_plugin.tools.merge.merging import MergeOptions, merge
from hf_fsdp_plugin.tools.verify.verification import verify
from tests.support import saved
from tests.support.merge_inputs import CONFIG, TENSORS
from tests.support.merge_inputs import save as save_local


@pytest.mark.parametrize("name", ["tokenizer.json", "chat_template.jinja", "config.json", "vocab.txt"])
def test_private_file_behind_a_link_is_not_copied(tmp_path: Path, name: str) -> None:
    checkpoint = save_local(tmp_path / "run" / "checkpoint-1")
    (tmp_path / "private").write_text(json.dumps({**CONFIG, "secret": 1}))
    (checkpoint / "config.json").write_text(json.dumps(CONFIG))
    (checkpoint / name).unlink(missing_ok=True)
    (checkpoint / name).symlink_to(tmp_path / "private")
    with pytest.raises(CheckpointError, match="FSDP-E456"):
        merge(checkpoint, tmp_path / "out", MergeOptions())
    assert not (tmp_path / "out").exists()
    (checkpoint / name).unlink()
    (checkpoint / "real").write_text(json.dumps(CONFIG))
    (checkpoint / name).symlink_to("real")  # a link inside the checkpoint
    assert name in merge(checkpoint, tmp_path / "out", MergeOptions()).companions


def test_model_file_that_is_a_link_outside_is_refused(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "elsewhere.safetensors")
    (tmp_path / "ck").mkdir()
    (tmp_path / "ck" / "model.safetensors").symlink_to(tmp_path / "elsewhere.safetensors")
    with pytest.raises(CheckpointError, match="FSDP-E456"):
        read_stored_model(tmp_path / "ck")


@pytest.mark.parametrize("file", [MANIFEST_NAME, "pytorch_model_fsdp_0/.metadata"])
def test_huge_sparse_file_is_refused(tmp_path: Path, file: str) -> None:
    folder = saved.any_checkpoint(tmp_path / "ck", "sharded")
    with (folder / file).open("ab") as out:
        out.truncate(3 << 30)
    found = [problem.code for problem in verify(folder).problems if problem.severity == "error"]
    assert found == ["FSDP-E412"]


@pytest.mark.parametrize("text", ['{"a": 1, "a": 2}', '[{"b": {"a": 1, "\\u0061": 1}}]'])
def test_duplicate_key_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="duplicate key 'a'"):
        parse_json(text)
    assert parse_json('[{"a": 1}, {"a": NaN}]')[0] == {"a": 1}
    with pytest.raises(ValueError, match="NaN"):
        parse_json('{"a": NaN}', only_finite=True)


def test_duplicate_key_in_an_index_of_weights_is_refused(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "a.safetensors")
    entries = ", ".join(f'"{name}": "a.safetensors"' for name in [*TENSORS, "model.steps"])
    (tmp_path / "model.safetensors.index.json").write_text(f'{{"weight_map": {{{entries}}}}}')
    with pytest.raises(CheckpointError, match=r"duplicate key 'model\.steps'.*FSDP-E453"):
        read_stored_model(tmp_path)


@pytest.mark.parametrize("text", ["[1]", '"x"', "5", "[" * 100_000, '{"best_model_checkpoint": 5}'])
def test_trainer_state_of_another_form_is_refused(checkpoint: Path, tmp_path: Path, text: str) -> None:
    (checkpoint / "trainer_state.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"FSDP-E49[78]"):
        find_checkpoint(checkpoint.parent, best=True)
    found = [problem.code for problem in _last_file_problems(checkpoint)]
    assert found == ["FSDP-E418" if text.startswith("{") else "FSDP-E453"]  # a resume refuses it too


@pytest.mark.parametrize("name", ["..", "/", "other", "checkpoint-1/../../secret", "a\0b"])
def test_best_checkpoint_is_a_checkpoint_of_the_run(checkpoint: Path, name: str) -> None:
    (checkpoint.parent / "other").mkdir()
    (checkpoint / "trainer_state.json").write_text(json.dumps({"best_model_checkpoint": name}))
    with pytest.raises(CheckpointError, match="FSDP-E498"):
        find_checkpoint(checkpoint.parent, best=True)


@pytest.mark.parametrize("architectures", [5, {"a": 1}, ["Llama"], None])
def test_config_of_another_form_is_no_traceback(tmp_path: Path, architectures: Any) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": architectures, "model_type": "llama"}))
    assert "llama" in _model_type(tmp_path)
    (tmp_path / "config.json").write_text("[" * 100_000)
    assert _model_type(tmp_path) == ""
