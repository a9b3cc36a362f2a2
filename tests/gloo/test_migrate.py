"""``hf-fsdp migrate --prove``: both configs train a clone on real CPU ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.json_schema import assert_valid
from tests.support.launching import environment

CONFIG = """\
distributed_type: FSDP
num_processes: 2
fsdp_config:
  fsdp_sharding_strategy: SHARD_GRAD_OP
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_transformer_layer_cls_to_wrap: BertLayer  # the proof has a Llama
  fsdp_use_orig_params: false
"""


def migrate(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hf_fsdp_plugin.cli.main", "migrate", "c.yaml", "--prove", "--json", "--in-place"]
    return subprocess.run(
        command, cwd=folder, env=environment(folder), capture_output=True, text=True, timeout=300, check=False
    )


@pytest.mark.slow  # two runs take half a minute of CPU time
def test_proof_of_equal_losses_writes_the_file(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(CONFIG)
    done = migrate(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    tree = json.loads(done.stdout)
    assert_valid("migrate", tree)
    assert tree["proof"]["equal"] and tree["proof"]["tolerance"] == 1e-5
    rows = {row["what"]: row for row in tree["proof"]["rows"]}
    assert (rows["backend"]["old"], rows["backend"]["new"]) == ("fsdp1", "fsdp2")
    assert (rows["units"]["old"], rows["units"]["new"]) == (3, 5)
    assert [rows[f"loss, step {step}"]["difference"] <= 1e-5 for step in (1, 2, 3)] == [True] * 3
    assert rows["loss, step 1"]["old"] != rows["loss, step 3"]["old"]
    assert rows["gradient norm, step 1"]["new"] > 0 and rows["memory, peak"]["new"] > 0
    assert rows["settings that differ from the config"]["new"] == 0
    assert (tmp_path / "c.yaml").read_text() == tree["text"] != CONFIG


@pytest.mark.slow
def test_failed_run_of_a_proof_writes_nothing(tmp_path: Path) -> None:
    text = f"{CONFIG}  fsdp_ignored_modules: no_such_module\n"
    (tmp_path / "c.yaml").write_text(text)
    done = migrate(tmp_path)
    codes = [problem["code"] for problem in json.loads(done.stdout)["problems"]]
    assert (done.returncode, codes[0]) == (1, "FSDP-E794") and len(codes) > 1
    assert (tmp_path / "c.yaml").read_text() == text
