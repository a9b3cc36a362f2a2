"""Hostile checkpoints: no private file is published, no small file fills the memory."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import saved
import torch
from merge_inputs import CONFIG, TENSORS
from merge_inputs import save as save_local
from safetensors.numpy import save_file

from hf_fsdp_plugin.checkpoint.checking.verify import verify
from hf_fsdp_plugin.checkpoint.formats.strict_json import parse_json
from hf_fsdp_plugin.checkpoint.formats.table import read_stored_model
from hf_fsdp_plugin.checkpoint.merging.config_check import ConfigCheck
from hf_fsdp_plugin.checkpoint.merging.merge import MergeOptions, merge
from hf_fsdp_plugin.checkpoint.names import MANIFEST_NAME
from hf_fsdp_plugin.checkpoint.reading.states import load_state
from hf_fsdp_plugin.problems import CheckpointError


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


def test_compressed_state_is_refused_before_it_grows(tmp_path: Path) -> None:
    path = tmp_path / "scheduler.pt"
    torch.save({"last_epoch": 7}, path)
    assert load_state(path) == {"last_epoch": 7}
    with zipfile.ZipFile(path) as source:
        records = {name: source.read(name) for name in source.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as target:
        for name, data in records.items():
            target.writestr(name, data)
        target.writestr("scheduler/data/9", bytes(800_000_000))
    assert path.stat().st_size < 1_000_000
    program = (
        "import resource, sys; from pathlib import Path\n"
        "from hf_fsdp_plugin.checkpoint.reading.states import load_state\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "try: load_state(Path(sys.argv[1]))\n"
        "except ValueError as error: print(error)\n"
        "assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000\n"
    )
    done = subprocess.run([sys.executable, "-c", program, path], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "FSDP-E453" in done.stdout, done.stderr


@pytest.mark.parametrize("file", [MANIFEST_NAME, "pytorch_model_fsdp_0/.metadata"])
def test_huge_sparse_file_is_refused(tmp_path: Path, file: str) -> None:
    folder = saved.any_checkpoint(tmp_path / "ck", "sharded")
    with (folder / file).open("ab") as out:
        out.truncate(3 << 30)
    found = [problem.code for problem in verify(folder).problems if problem.severity == "error"]
    assert found == ["FSDP-E412"]


def test_file_larger_than_the_memory_is_refused(tmp_path: Path) -> None:
    with (tmp_path / "config.json").open("wb") as out:
        out.truncate(3 << 29)
    program = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30)); from pathlib import Path\n"
        "from hf_fsdp_plugin.checkpoint.io import read_file\n"
        "try: read_file(Path(sys.argv[1]))\n"
        "except ValueError as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, tmp_path / "config.json"], capture_output=True, text=True, timeout=60
    )
    assert "FSDP-E412" in done.stdout, done.stderr


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


def test_problems_of_the_config_check_have_a_place(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"model_type": "no such"}')
    with ConfigCheck(tmp_path, 0, tmp_path) as check:
        (found,) = check.problems()
    assert found.code == "FSDP-N475" and found.origin is not None
    assert found.origin.place == str(tmp_path / "config.json")
