"""``hf-fsdp merge``: exit codes and output."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest


def test_merge_prints_a_summary(checkpoint: Path, out: Path, hf_fsdp: Callable) -> None:
    code, printed, err = hf_fsdp("merge", checkpoint, out, "--verify")
    assert code == 0 and "4 tensors, 4.61 kB in model.safetensors" in printed
    assert "names and shapes match the manifest; all bytes match the checkpoint" in printed
    assert "[FSDP-W488]" in err


def test_json_is_one_object(checkpoint: Path, out: Path, hf_fsdp: Callable) -> None:
    code, printed, _ = hf_fsdp("merge", checkpoint, out, "--json", "--max-shard-size", "250B")
    result = json.loads(printed)
    assert code == 0 and result["ok"]
    assert result["files"] == [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]


def test_problems_exit_1_on_stderr_or_as_json(tmp_path: Path, out: Path, hf_fsdp: Callable) -> None:
    (tmp_path / "empty").mkdir()
    code, printed, err = hf_fsdp("merge", tmp_path / "empty", out)
    assert (code, printed) == (1, "") and "empty: " in err and "[FSDP-E483]" in err
    code, printed, _ = hf_fsdp("merge", tmp_path / "empty", out, "--json")
    result = json.loads(printed)
    assert code == 1 and not result["ok"] and result["problems"][0]["code"] == "FSDP-E483"


@pytest.mark.parametrize("words", [["--max-shard-size", "5XB"], ["--max-shard-size", "0"], ["--dtype", "int4"], []])
def test_wrong_usage_exits_2(words: list[str], checkpoint: Path, hf_fsdp: Callable) -> None:
    assert hf_fsdp("merge", checkpoint, *([] if not words else ["out", *words]))[0] == 2


def test_wrong_usage_of_fold_adapter_exits_2(checkpoint: Path, out: Path, tmp_path: Path, hf_fsdp: Callable) -> None:
    assert hf_fsdp("merge", checkpoint, out, "--fold-adapter", tmp_path / "missing")[0] == 2
    code, _, err = hf_fsdp("merge", checkpoint, out, "--fold-adapter", tmp_path, "--delete-input")
    assert code == 2 and "--fold-adapter conflicts with --delete-input" in err


def test_disk_error_exits_1(checkpoint: Path, out: Path, monkeypatch: pytest.MonkeyPatch, hf_fsdp: Callable) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    code, printed, _ = hf_fsdp("merge", checkpoint, out, "--json")
    (problem,) = json.loads(printed)["problems"]
    assert code == 1 and problem["code"] == "FSDP-E495" and "No space left on device" in problem["message"]
