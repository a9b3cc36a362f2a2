"""``hf-fsdp inspect``: correct summaries from metadata, without torch."""

import json
import shutil

import pytest
import torch

from hf_fsdp_plugin.checkpoint.names import DCP_METADATA, MANIFEST_NAME
from hf_fsdp_plugin.tools.inspect.summary import summarize
from tests.support import damages, saved


@pytest.fixture
def inspect_json(hf_fsdp):
    """Run ``inspect --json``, and return the exit code and the printed object."""

    def run(*argv: object) -> tuple[int, dict]:
        code, out, _ = hf_fsdp("inspect", "--json", *argv)
        return code, json.loads(out)

    return run


def test_checkpoint_with_manifest_is_described(local, inspect_json):
    code, found = inspect_json(local)
    files = found.pop("files")
    assert code == 0 and found == {
        **saved.FACTS, "schema_version": 1, "checkpoint": str(local), "complete": True, "incomplete": None,
        "format": "dcp",
        "manifest": True, "num_parameters": 2, "num_elements": 10, "dtypes": {"float32": 10}, "model_bytes": 40,
        "optimizer_bytes": 40, "ties": [["embed.weight", "head.weight"]],
    }  # fmt: skip
    assert files == {path.relative_to(local).as_posix(): path.stat().st_size for path in local.rglob("*.*")}


def test_stock_checkpoint_is_described(stock, inspect_json):
    code, found = inspect_json(stock)
    model = saved.tiny_llama()
    elements = sum(parameter.numel() for parameter in model.parameters())
    assert code == 0 and found["complete"] is True and found["manifest"] is False
    assert (found["format"], found["kind"], found["step"], found["world_size"]) == ("dcp", "sharded", 7, 2)
    assert (found["num_parameters"], found["num_elements"]) == (len(list(model.parameters())), elements)
    assert (found["dtypes"], found["model_bytes"]) == ({"float32": elements}, 4 * elements)
    assert found["optimizer_bytes"] == 2 * 4 * elements + 4 * len(list(model.parameters()))
    assert found["settings"] is None and found["mesh"] is None and found["backend"] is None


def test_part_of_a_checkpoint_shows_the_checkpoint(stock, inspect_json):
    _, found = inspect_json(stock / "pytorch_model_fsdp_0")
    assert found["checkpoint"] == str(stock) and found["step"] == 7


def test_moved_part_is_shown_alone(stock, tmp_path, inspect_json):
    alone = (stock / "pytorch_model_fsdp_0").rename(tmp_path / "pytorch_model_fsdp_0")
    code, found = inspect_json(alone)
    assert code == 0 and (found["format"], found["step"], found["optimizer_bytes"]) == ("dcp", None, 0)


@pytest.mark.parametrize("tied", [False, True])
def test_hugging_face_folder_is_described(tmp_path, tied, inspect_json):
    model = saved.tiny_llama(tied=tied).to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    code, found = inspect_json(tmp_path)
    elements = sum(parameter.numel() for parameter in model.parameters())
    assert code == 0 and (found["format"], found["kind"], found["step"]) == ("full", "full", None)
    assert found["dtypes"] == {"bfloat16": elements} and found["model_bytes"] == 2 * elements
    assert found["versions"].keys() == {"transformers"}


def test_full_state_dict_of_accelerate_is_described(tmp_path, inspect_json):
    model = saved.tiny_llama(tied=True)
    torch.save(model.state_dict(), tmp_path / "pytorch_model_fsdp.bin")
    code, found = inspect_json(tmp_path)
    assert code == 0 and (found["format"], found["kind"]) == ("bin", "full")
    assert found["num_elements"] == sum(parameter.numel() for parameter in model.parameters())
    assert found["ties"] == [["model.embed_tokens.weight", "lm_head.weight"]]


def test_parameters_option_lists_parameters(local, stock, inspect_json, hf_fsdp):
    _, found = inspect_json(local, "--parameters")
    assert found["parameters"] == {
        name: {"dtype": "float32", "shape": list(shape)} for name, shape in saved.SHAPES.items()
    }
    _, found = inspect_json(stock, "--parameters")
    assert found["parameters"]["model.norm.weight"] == {"dtype": "float32", "shape": [16]}
    code, out, _ = hf_fsdp("inspect", stock, "--parameters")
    assert code == 0
    assert any(line.split() == ["model.embed_tokens.weight", "float32", "32×16"] for line in out.splitlines())


def test_optimizer_option_lists_groups_and_state(local, stock, inspect_json, hf_fsdp):
    _, found = inspect_json(local, "--optimizer")
    assert found["optimizer"] == {
        "groups": [{"params": ["embed.weight", "norm.weight"], "lr": 0.001}],
        "state": {
            "embed.weight": {"step": 20.0, "exp_avg": {"dtype": "float32", "shape": [4, 2]}},
            "norm.weight": {"step": 20.0, "exp_avg": {"dtype": "float32", "shape": [2]}},
        },
    }
    _, found = inspect_json(stock, "--optimizer")
    (group,) = found["optimizer"]["groups"]
    assert group["lr"] == 0.001 and group["betas"] == [0.9, 0.999] and "model.norm.weight" in group["params"]
    assert found["optimizer"]["state"]["lm_head.weight"]["exp_avg_sq"] == {"dtype": "float32", "shape": [32, 16]}
    code, out, _ = hf_fsdp("inspect", stock, "--optimizer")
    assert code == 0 and "lm_head.weight exp_avg_sq " in out


def test_text_contains_all_facts(local, hf_fsdp):
    code, out, err = hf_fsdp("inspect", local)
    assert code == 0 and err == "" and out.startswith(f"{local}: complete\n")
    lines = [" ".join(line.split()) for line in out.splitlines()]
    for line in (
        "format dcp, local",
        "step 20",
        "backend fsdp2, full_shard, mesh shard 2",
        "written 2026-01-02T03:04:05+00:00, in the background",
        "model 2 parameters, 10 elements (float32), 40 B",
        "optimizer 40 B (exp_avg, step), groups: 1",
        "tied embed.weight = head.weight",
        'settings fsdp.version 2, wrap.classes ["LlamaDecoderLayer"]',
        "trainer_state.json 19",
    ):
        assert line in lines


def test_long_settings_are_wrapped_at_commas(local, hf_fsdp):
    settings = {f"section.setting_{n}": n for n in range(20)}
    saved.write_manifest(local, settings=settings)
    _, out, _ = hf_fsdp("inspect", local)
    lines = [line for line in out.splitlines() if "section.setting" in line]
    assert 3 < len(lines) < 8 and all(len(line) < 116 for line in lines)
    found = " ".join(line[12:].strip() for line in lines)
    assert found == ", ".join(f"{key} {value}" for key, value in settings.items())


def test_incomplete_checkpoint_exits_1_with_the_reason(local, hf_fsdp):
    (local / "optimizer_0" / "__1_0.distcp").unlink()
    code, out, err = hf_fsdp("inspect", local)
    assert code == 1 and f"{local}: incomplete" in out and "step       20" in out
    assert err.startswith(f"{local}: optimizer_0/__1_0.distcp: is missing")


def test_damaged_model_is_described_by_the_manifest(local, inspect_json):
    shutil.rmtree(local / "pytorch_model_fsdp_0")
    code, found = inspect_json(local)
    assert code == 1 and found["complete"] is False and (found["format"], found["num_elements"]) == ("dcp", 10)


def test_damaged_manifest_is_reported(local, inspect_json):
    damages.flip(local / MANIFEST_NAME, 100)
    code, found = inspect_json(local)
    assert code == 1 and "fsdp_manifest.json: is" in found["incomplete"]
    assert (found["manifest"], found["step"], found["num_elements"]) == (False, 20, 10)


@pytest.mark.parametrize("extra", [[], ["--json"]])
def test_other_folder_exits_1(tmp_path, extra, hf_fsdp):
    (tmp_path / "README.md").write_text("x")
    code, out, err = hf_fsdp("inspect", tmp_path, *extra)
    assert code == 1 and "FSDP-E451" in (json.loads(out)["problems"][0]["code"] if extra else err)


def test_missing_folder_exits_2(tmp_path, hf_fsdp):
    code, _, err = hf_fsdp("inspect", tmp_path / "nowhere")
    assert code == 2 and "nowhere does not exist" in err


def test_run_lists_checkpoints_newest_first(local, stock, tmp_path, hf_fsdp):
    saved.local_checkpoint(tmp_path / "checkpoint-100")
    (tmp_path / "checkpoint-100" / "pytorch_model_fsdp_0" / DCP_METADATA).unlink()
    (tmp_path / "checkpoint-100" / MANIFEST_NAME).unlink()
    (tmp_path / ".checkpoint-120.saving").mkdir()
    code, out, _ = hf_fsdp("inspect", tmp_path)
    rows = [line.split(maxsplit=6) for line in out.splitlines()]
    assert code == 0
    assert [row[0] for row in rows[1:]] == ["checkpoint-100", "checkpoint-20", "checkpoint-7", ".checkpoint-120.saving"]
    assert rows[2][1:4] == ["20", "local", "2"] and rows[2][-1] == "complete"
    assert rows[3][1:4] == ["7", "sharded", "2"] and rows[3][-1] == "complete"
    assert "the save was not finished" in rows[1][-1] and "staging folder" in rows[4][-1]


def test_json_of_a_run_has_the_newest_complete_checkpoint(local, tmp_path, inspect_json):
    (tmp_path / "checkpoint-30").mkdir()
    code, found = inspect_json(tmp_path)
    assert code == 0 and found["newest_complete"] == str(local)
    assert [(entry["checkpoint"], entry["complete"]) for entry in found["checkpoints"]] == [
        (str(tmp_path / "checkpoint-30"), False),
        (str(local), True),
    ]


def test_run_without_complete_checkpoint_exits_1(local, tmp_path, hf_fsdp):
    (local / "trainer_state.json").unlink()
    code, out, err = hf_fsdp("inspect", tmp_path)
    assert code == 1 and "incomplete: trainer_state.json: is missing" in out
    assert "none of the checkpoints is complete" in err


def test_accelerate_checkpoints_are_found_in_the_project(tmp_path, hf_fsdp):
    saved.local_checkpoint(tmp_path / "checkpoints" / "checkpoint_0")
    code, out, _ = hf_fsdp("inspect", tmp_path)
    assert code == 0 and "checkpoint_0" in out


def test_finished_run_shows_model_and_checkpoints(local, tmp_path, hf_fsdp):
    saved.tiny_llama().save_pretrained(tmp_path)
    code, out, _ = hf_fsdp("inspect", tmp_path)
    assert code == 0 and out.startswith(f"{tmp_path}: complete") and "\ncheckpoint-20 " in out and "__0_0" not in out


def test_world_size_of_single_rng_file_is_1(stock):
    (stock / "rng_state_1.pth").unlink()
    (stock / "rng_state_0.pth").rename(stock / "rng_state.pth")
    assert summarize(stock).world_size == 1


@pytest.mark.parametrize("kind", ["local", "stock", "run"])
def test_inspect_imports_no_heavy_library(local, stock, kind, imports_no_heavy_library):
    path = {"local": local, "stock": stock, "run": local.parent}[kind]
    libraries = ("torch", "transformers", "accelerate", "datasets", "numpy")
    more = ["--json"] if kind == "run" else []
    imports_no_heavy_library("inspect", path, "--parameters", "--optimizer", *more, libraries=libraries)


@pytest.mark.parametrize("flag", ["--parameters", "--optimizer"])
def test_lists_of_a_run_are_refused(local, hf_fsdp, flag):
    code, out, error = hf_fsdp("inspect", local.parent, flag)
    assert code == 2 and not out and "need one checkpoint" in error
    assert hf_fsdp("inspect", local, flag)[0] == 0
