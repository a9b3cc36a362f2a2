"""What a checkpoint is, told from its metadata: right, at once, and without torch."""

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import saved
import torch

from hf_fsdp_plugin.checkpoint.checking.inspection import summarize
from hf_fsdp_plugin.checkpoint.names import MANIFEST_NAME
from hf_fsdp_plugin.cli.main import main


@pytest.fixture
def local(tmp_path) -> Path:
    return saved.local_checkpoint(tmp_path / "checkpoint-20")


@pytest.fixture(scope="module")
def stock_once(tmp_path_factory) -> Path:
    return saved.stock_checkpoint(tmp_path_factory.mktemp("stock") / "checkpoint-7", saved.tiny_llama())


@pytest.fixture
def stock(tmp_path, stock_once) -> Path:
    return Path(shutil.copytree(stock_once, tmp_path / "checkpoint-7"))


def told(capsys, *argv: str) -> tuple[int, dict]:
    code = main(["inspect", "--json", *argv])
    return code, json.loads(capsys.readouterr().out)


def test_a_checkpoint_with_a_manifest_is_told_in_full(local, capsys):
    code, said = told(capsys, str(local))
    files = said.pop("files")
    assert code == 0 and said == {
        "checkpoint": str(local),
        "complete": True,
        "incomplete": None,
        "format": "local",
        "kind": "local",
        "manifest": True,
        "step": 20,
        "world_size": 2,
        "backend": "fsdp2",
        "mesh": {"shard": 2},
        "strategy": "full_shard",
        "asynchronous": True,
        "created": "2026-01-02T03:04:05+00:00",
        "num_parameters": 2,
        "num_elements": 10,
        "dtypes": {"float32": 10},
        "model_bytes": 40,
        "optimizer_bytes": 40,
        "ties": [["embed.weight", "head.weight"]],
        "settings": {"fsdp.version": 2, "wrap.classes": ["LlamaDecoderLayer"]},
        "batch": {"per_device": 4},
        "versions": {"torch": "2.13.0"},
    }
    assert files == {path.relative_to(local).as_posix(): path.stat().st_size for path in local.rglob("*.*")}


def test_a_stock_checkpoint_is_told_as_far_as_it_tells(stock, capsys):
    code, said = told(capsys, str(stock))
    model = saved.tiny_llama()
    elements = sum(parameter.numel() for parameter in model.parameters())
    assert code == 0 and said["complete"] is True and said["manifest"] is False
    assert (said["format"], said["kind"], said["step"], said["world_size"]) == ("dcp", "sharded", 7, 2)
    assert (said["num_parameters"], said["num_elements"]) == (len(list(model.parameters())), elements)
    assert (said["dtypes"], said["model_bytes"]) == ({"float32": elements}, 4 * elements)
    assert said["optimizer_bytes"] == 2 * 4 * elements + 4 * len(list(model.parameters()))
    assert said["settings"] is None and said["mesh"] is None and said["backend"] is None


def test_a_part_of_a_checkpoint_is_told_as_the_checkpoint(stock, capsys):
    _, said = told(capsys, str(stock / "pytorch_model_fsdp_0"))
    assert said["checkpoint"] == str(stock) and said["step"] == 7


def test_a_part_that_was_moved_is_told_alone(stock, tmp_path, capsys):
    alone = (stock / "pytorch_model_fsdp_0").rename(tmp_path / "pytorch_model_fsdp_0")
    code, said = told(capsys, str(alone))
    assert code == 0 and (said["format"], said["step"], said["optimizer_bytes"]) == ("dcp", None, 0)


@pytest.mark.parametrize("tied", [False, True])
def test_a_hugging_face_folder_is_told(tmp_path, capsys, tied):
    model = saved.tiny_llama(tied=tied).to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    code, said = told(capsys, str(tmp_path))
    elements = sum(parameter.numel() for parameter in model.parameters())
    assert code == 0 and (said["format"], said["kind"], said["step"]) == ("full", "full", None)
    assert said["dtypes"] == {"bfloat16": elements} and said["model_bytes"] == 2 * elements
    assert said["versions"].keys() == {"transformers"}


def test_a_full_state_dict_of_accelerate_is_told(tmp_path, capsys):
    model = saved.tiny_llama(tied=True)
    torch.save(model.state_dict(), tmp_path / "pytorch_model_fsdp.bin")
    code, said = told(capsys, str(tmp_path))
    assert code == 0 and (said["format"], said["kind"]) == ("bin", "full")
    assert said["num_elements"] == sum(parameter.numel() for parameter in model.parameters())
    assert said["ties"] == [["model.embed_tokens.weight", "lm_head.weight"]]


def test_the_parameters_are_listed_where_asked_for(local, stock, capsys):
    _, said = told(capsys, str(local), "--parameters")
    assert said["parameters"] == {
        name: {"dtype": "float32", "shape": list(shape)} for name, shape in saved.SHAPES.items()
    }
    _, said = told(capsys, str(stock), "--parameters")
    assert said["parameters"]["model.norm.weight"] == {"dtype": "float32", "shape": [16]}
    assert main(["inspect", str(stock), "--parameters"]) == 0
    out = capsys.readouterr().out
    assert any(line.split() == ["model.embed_tokens.weight", "float32", "32×16"] for line in out.splitlines())


def test_the_optimizer_is_listed_where_asked_for(local, stock, capsys):
    _, said = told(capsys, str(local), "--optimizer")
    assert said["optimizer"] == {
        "groups": [{"params": ["embed.weight", "norm.weight"], "lr": 0.001}],
        "state": {
            "embed.weight": {"step": 20.0, "exp_avg": {"dtype": "float32", "shape": [4, 2]}},
            "norm.weight": {"step": 20.0, "exp_avg": {"dtype": "float32", "shape": [2]}},
        },
    }
    _, said = told(capsys, str(stock), "--optimizer")
    (group,) = said["optimizer"]["groups"]
    assert group["lr"] == 0.001 and group["betas"] == [0.9, 0.999] and "model.norm.weight" in group["params"]
    assert said["optimizer"]["state"]["lm_head.weight"]["exp_avg_sq"] == {"dtype": "float32", "shape": [32, 16]}
    assert main(["inspect", str(stock), "--optimizer"]) == 0
    assert "lm_head.weight exp_avg_sq " in capsys.readouterr().out


def test_the_text_says_what_the_checkpoint_is(local, capsys):
    assert main(["inspect", str(local)]) == 0
    out, err = capsys.readouterr()
    assert err == "" and out.startswith(f"{local}: complete\n")
    lines = [" ".join(line.split()) for line in out.splitlines()]
    for line in (
        "format local",
        "step 20",
        "backend fsdp2, full_shard, mesh shard 2",
        "written 2026-01-02T03:04:05+00:00, beside the training",
        "model 2 parameters, 10 elements (float32), 40 B",
        "optimizer 40 B (step, exp_avg), groups: 1",
        "tied embed.weight = head.weight",
        'settings fsdp.version 2, wrap.classes ["LlamaDecoderLayer"]',
        "trainer_state.json 19",
    ):
        assert line in lines


def test_long_settings_are_wrapped_between_them(local, capsys):
    settings = {f"section.setting_{n}": n for n in range(20)}
    saved.write_manifest(local, settings=settings)
    assert main(["inspect", str(local)]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "section.setting" in line]
    assert 3 < len(lines) < 8 and all(len(line) < 116 for line in lines)
    said = " ".join(line[12:].strip() for line in lines)
    assert said == ", ".join(f"{key} {value}" for key, value in settings.items())


def test_an_incomplete_checkpoint_is_told_with_the_reason(local, capsys):
    (local / "optimizer_local" / "0_rank1.safetensors").unlink()
    assert main(["inspect", str(local)]) == 1
    out, err = capsys.readouterr()
    assert f"{local}: incomplete" in out and "step       20" in out
    assert err.startswith(f"{local}: optimizer_local/0_rank1.safetensors: is missing")


def test_a_damaged_model_is_still_told_from_the_manifest(local, capsys):
    shutil.rmtree(local / "pytorch_model_fsdp_local")
    code, said = told(capsys, str(local))
    assert code == 1 and said["complete"] is False and (said["format"], said["num_elements"]) == ("local", 10)


def test_a_damaged_manifest_is_told_and_the_rest_read_from_the_files(local, capsys):
    saved.flip(local / MANIFEST_NAME, 100)
    code, said = told(capsys, str(local))
    assert code == 1 and "fsdp_manifest.json: is" in said["incomplete"]
    assert (said["manifest"], said["step"], said["num_elements"]) == (False, 20, 10)


@pytest.mark.parametrize("extra", [[], ["--json"]])
def test_what_is_no_checkpoint_exits_1_with_the_reason(tmp_path, capsys, extra):
    (tmp_path / "README.md").write_text("x")
    assert main(["inspect", str(tmp_path), *extra]) == 1
    out, err = capsys.readouterr()
    said = json.loads(out)["problems"][0]["message"] if extra else err
    assert "no model's weights in it" in said


def test_what_is_no_folder_exits_2(tmp_path, capsys):
    assert main(["inspect", str(tmp_path / "nowhere")]) == 2
    assert "nowhere is no folder" in capsys.readouterr().err


def test_a_run_s_checkpoints_are_listed_newest_first(local, stock, tmp_path, capsys):
    saved.local_checkpoint(tmp_path / "checkpoint-100")
    (tmp_path / "checkpoint-100" / MANIFEST_NAME).unlink()
    (tmp_path / ".checkpoint-120.saving").mkdir()
    assert main(["inspect", str(tmp_path)]) == 0
    rows = [line.split(maxsplit=6) for line in capsys.readouterr().out.splitlines()]
    assert [row[0] for row in rows[1:]] == ["checkpoint-100", "checkpoint-20", "checkpoint-7", ".checkpoint-120.saving"]
    assert rows[2][1:4] == ["20", "local", "2"] and rows[2][-1] == "complete"
    assert rows[3][1:4] == ["7", "sharded", "2"] and rows[3][-1] == "complete"
    assert "the save was not finished" in rows[1][-1] and "a save that was cut off" in rows[4][-1]


def test_a_run_s_json_names_the_newest_complete_checkpoint(local, tmp_path, capsys):
    (tmp_path / "checkpoint-30").mkdir()
    code, said = told(capsys, str(tmp_path))
    assert code == 0 and said["newest_complete"] == str(local)
    assert [(entry["checkpoint"], entry["complete"]) for entry in said["checkpoints"]] == [
        (str(tmp_path / "checkpoint-30"), False),
        (str(local), True),
    ]


def test_a_run_without_a_complete_checkpoint_exits_1(local, tmp_path, capsys):
    (local / "trainer_state.json").unlink()
    assert main(["inspect", str(tmp_path)]) == 1
    out, err = capsys.readouterr()
    assert "incomplete: trainer_state.json: is missing" in out and "none of its checkpoints is complete" in err


def test_accelerate_s_checkpoints_are_found_below_its_project(tmp_path, capsys):
    saved.local_checkpoint(tmp_path / "checkpoints" / "checkpoint_0")
    assert main(["inspect", str(tmp_path)]) == 0
    assert "checkpoint_0" in capsys.readouterr().out


def test_a_finished_run_is_told_as_a_model_with_its_checkpoints(local, tmp_path, capsys):
    saved.tiny_llama().save_pretrained(tmp_path)
    assert main(["inspect", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"{tmp_path}: complete") and "\ncheckpoint-20 " in out and "0_rank0" not in out


def test_an_index_of_one_rank_s_files_counts_the_ranks(stock):
    (stock / "rng_state_1.pth").unlink()
    (stock / "rng_state_0.pth").rename(stock / "rng_state.pth")
    assert summarize(stock).world_size == 1


@pytest.mark.parametrize("kind", ["local", "stock", "run"])
def test_inspect_loads_no_torch_and_is_done_at_once(local, stock, kind):
    path = {"local": local, "stock": stock, "run": local.parent}[kind]
    program = (
        "import sys; from hf_fsdp_plugin.cli.main import main\n"
        f"code = main(['inspect', {str(path)!r}, '--parameters', '--optimizer'])\n"
        "loaded = {'torch', 'transformers', 'accelerate', 'datasets', 'numpy'} & set(sys.modules)\n"
        "sys.exit(f'loaded {loaded}' if loaded else code)"
    )
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    # A fifth of a second where nothing else runs; importing torch alone is some three.
    assert time.monotonic() - began < 2
