"""``hf-fsdp merge``: exit codes and output."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from merge_inputs import CONFIG, save

from hf_fsdp_plugin.cli.main import main


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = save(tmp_path / "run" / "checkpoint-1")
    (folder / "trainer_state.json").write_text("{}")
    return folder


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "merged"


def test_merge_prints_a_summary(checkpoint: Path, out: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["merge", str(checkpoint), str(out), "--verify"]) == 0
    printed = capsys.readouterr()
    assert "4 tensors, 4.61 kB in model.safetensors" in printed.out
    assert "names and shapes match the manifest; all bytes match the checkpoint" in printed.out
    assert "[FSDP-W488]" in printed.err


def test_json_is_one_object(checkpoint: Path, out: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["merge", str(checkpoint), str(out), "--json", "--max-shard-size", "250B"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["ok"]
    assert printed["files"] == [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]


def test_problems_exit_1_on_stderr(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["merge", str(tmp_path / "gone"), str(tmp_path / "out")]) == 1
    printed = capsys.readouterr()
    assert printed.out == "" and "gone: " in printed.err and "[FSDP-E450]" in printed.err


def test_problems_are_printed_as_json(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["merge", str(tmp_path / "gone"), str(tmp_path / "out"), "--json"]) == 1
    printed = json.loads(capsys.readouterr().out)
    assert not printed["ok"] and printed["problems"][0]["code"] == "FSDP-E450"


@pytest.mark.parametrize("words", [["--max-shard-size", "5XB"], ["--max-shard-size", "0"], ["--dtype", "int4"], []])
def test_wrong_usage_exits_2(words: list[str], checkpoint: Path) -> None:
    assert main(["merge", str(checkpoint), *([] if not words else ["out", *words])]) == 2


def test_merge_imports_no_heavy_library(checkpoint: Path, out: Path) -> None:
    (checkpoint / "config.json").write_text(json.dumps(CONFIG))
    program = (
        "import sys; from hf_fsdp_plugin.cli.main import main\n"
        f"code = main(['merge', {str(checkpoint)!r}, {str(out)!r}, '--verify'])\n"
        "loaded = sorted({'torch', 'transformers', 'accelerate'} & set(sys.modules))\n"
        "sys.exit(f'loaded {loaded}' if loaded else code)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_disk_error_exits_1(
    checkpoint: Path, out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    assert main(["merge", str(checkpoint), str(out), "--json"]) == 1
    (problem,) = json.loads(capsys.readouterr().out)["problems"]
    assert problem["code"] == "FSDP-E495" and "No space left on device" in problem["message"]
