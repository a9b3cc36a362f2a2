"""``hf-fsdp verify``: exit codes and output."""

import json
import re
import shutil
from pathlib import Path

from tests.support import damages

FILES = ["pytorch_model_fsdp_0/__1_0.distcp", "trainer_state.json"]


def test_undamaged_checkpoint_exits_0(local, hf_fsdp):
    code, out, err = hf_fsdp("verify", local)
    assert code == 0 and out.startswith(f"{local}: undamaged; 8 files, ") and "[FSDP-N475]" in err


def test_damage_exits_1_with_problems_on_stderr(local, hf_fsdp):
    damages.flip(local / FILES[1], 0)
    code, out, err = hf_fsdp("verify", local)
    assert code == 1 and "1 problem; 8 files" in out
    assert "trainer_state.json: error: bytes 0 to 19 " in err and "[FSDP-E471]" in err


def test_json_is_one_object(local, hf_fsdp):
    damages.flip(local / FILES[0], -1)
    code, out, err = hf_fsdp("verify", "--json", local)
    printed = json.loads(out)
    assert (code, err) == (1, "") and printed["bytes_with_checksum"] == printed["bytes"]
    assert printed["ok"] is False and printed["checkpoint"] == str(local) and printed["files"] == 8
    problem = next(problem for problem in printed["problems"] if problem["severity"] == "error")
    assert problem["origin"]["file"] == str(local / FILES[0]) and "norm.weight" in problem["message"] and problem["fix"]


def test_wrong_folder_exits_2(local, hf_fsdp):
    code, _, err = hf_fsdp("verify", local / "nowhere")
    assert code == 2 and "nowhere does not exist" in err


def test_all_checkpoints_of_a_run_are_verified(local, hf_fsdp):
    other = Path(shutil.copytree(local, local.with_name("checkpoint-30")))
    code, out, _ = hf_fsdp("verify", local.parent)
    assert code == 0 and [line.partition(":")[0] for line in out.splitlines()] == [str(local), str(other)]
    damages.flip(local / FILES[1], 0)
    code, out, err = hf_fsdp("verify", local.parent)
    assert code == 1 and f"{local}: 1 problem" in out and f"{other}: undamaged" in out and "[FSDP-E471]" in err


def test_bytes_without_checksum_are_not_called_undamaged(local, tmp_path, hf_fsdp):
    assert hf_fsdp("merge", local, tmp_path / "merged")[0] == 0
    code, out, _ = hf_fsdp("verify", tmp_path / "merged")
    assert code == 0 and "undamaged" not in out
    assert "no damage found, but none of the " in out and "bytes has a checksum" in out


def test_stock_archives_have_checksums_for_a_part(stock, hf_fsdp):
    code, out, _ = hf_fsdp("verify", "--no-config-check", stock)
    assert code == 0 and re.search(r"no damage found, but [\d,]+ of [\d,]+ bytes have a checksum", out)


def test_bytes_are_verified_without_torch(local, imports_no_heavy_library):
    imports_no_heavy_library("verify", "--no-config-check", local)
