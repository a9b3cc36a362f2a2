"""``hf-fsdp verify``: exit codes and output."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import saved

from hf_fsdp_plugin.cli.main import main

FILES = ["pytorch_model_fsdp_local/0_rank1.safetensors", "trainer_state.json"]


@pytest.fixture
def local(tmp_path) -> Path:
    return saved.local_checkpoint(tmp_path / "checkpoint-20")


def test_undamaged_checkpoint_exits_0(local, capsys):
    assert main(["verify", str(local)]) == 0
    out, err = capsys.readouterr()
    assert out.startswith(f"{local}: undamaged; 5 files, ") and "[FSDP-N475]" in err


def test_damage_exits_1_with_problems_on_stderr(local, capsys):
    saved.flip(local / FILES[1], 0)
    assert main(["verify", str(local)]) == 1
    out, err = capsys.readouterr()
    assert "1 problem; 5 files" in out and "trainer_state.json: bytes 0 to 19 " in err and "[FSDP-E471]" in err


def test_json_is_one_object(local, capsys):
    saved.flip(local / FILES[0], -1)
    assert main(["verify", "--json", str(local)]) == 1
    out, err = capsys.readouterr()
    printed = json.loads(out)
    assert err == "" and printed.keys() == {"ok", "checkpoint", "problems", "files", "bytes"}
    assert printed["ok"] is False and printed["checkpoint"] == str(local) and printed["files"] == 5
    problem = next(problem for problem in printed["problems"] if problem["severity"] == "error")
    assert problem["origin"] == str(local / FILES[0]) and "norm.weight" in problem["message"] and problem["fix"]


def test_wrong_folder_exits_2(local, capsys):
    assert main(["verify", str(local / "nowhere")]) == 2
    assert "nowhere is not a folder" in capsys.readouterr().err
    assert main(["verify", str(local.parent)]) == 2
    assert f"such as {local}" in capsys.readouterr().err


def test_bytes_are_verified_without_torch(local):
    program = (
        "import sys; from hf_fsdp_plugin.cli.main import main\n"
        f"code = main(['verify', '--no-config-check', {str(local)!r}])\n"
        "loaded = {'torch', 'transformers', 'accelerate'} & set(sys.modules)\n"
        "sys.exit(f'loaded {loaded}' if loaded else code)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
