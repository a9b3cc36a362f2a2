"""``hf-fsdp check --run``: a clone of the model on real CPU ranks; good runs, and what each kind of failure reports."""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.json_schema import assert_valid
from tests.support.launching import environment, is_gone

CHECK = [sys.executable, "-m", "hf_fsdp_plugin.cli.main", "check", "--run"]
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 512, "intermediate_size": 1024,
    "num_attention_heads": 8, "num_key_value_heads": 4, "num_hidden_layers": 8, "vocab_size": 4000,
}  # fmt: skip
ALWAYS = (
    "start",
    "clone",
    "prepare",
    "step",
    "clip",
    "update",
    "evaluate",
    "save",
    "resume",
    "export",
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps(LLAMA))
    write_config(tmp_path)
    return tmp_path


def write_config(folder: Path, **settings: Any) -> None:
    own = {name: settings.pop(name) for name in ("mixed_precision",) if name in settings}
    fsdp = {"fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", **settings}
    config = {"distributed_type": "FSDP", "num_processes": 8, **own, "fsdp_config": fsdp}
    (folder / "fsdp.yaml").write_text(json.dumps(config))  # JSON is YAML


def start(folder: Path, *words: str) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    env = environment(folder, TMPDIR=str(folder / "tmp"))
    limit = [] if "--limit" in words else ["--limit", "500"]  # a loaded machine needs more than the default
    (folder / "tmp").mkdir(exist_ok=True)
    return subprocess.Popen(
        [*CHECK, *limit, *words], cwd=folder, env=env, stdin=pipe, stdout=pipe, stderr=pipe, text=True
    )


def check(folder: Path, *words: str, stdin: str = "") -> dict[str, Any]:
    """Run a preflight and return its JSON object. Nothing may be left in the folder."""
    before = sorted(path.name for path in folder.iterdir())
    process = start(folder, "--json", *words)
    out, err = process.communicate(stdin, timeout=560)
    tree: dict[str, Any] = json.loads(out)
    assert_valid("check", tree)
    assert process.returncode == (0 if tree["ok"] else 1), err
    assert sorted(path.name for path in folder.iterdir()) == sorted({*before, "tmp"})
    assert list((folder / "tmp").iterdir()) == []
    tree["results"] = {stage["stage"]: stage["result"] for stage in tree["run"]["stages"]}
    return tree


def codes(tree: dict[str, Any], severity: str = "error") -> set[str]:
    return {problem["code"] for problem in tree["problems"] if problem["severity"] == severity}


def test_good_settings_pass_every_stage(folder: Path) -> None:
    flags = ("--load_best_model_at_end", "true", "--eval_steps", "100", "--save_steps", "100", "--optim", "adafactor")
    tree = check(folder, "fsdp.yaml", "--model", "model", *flags)
    assert tree["results"] == dict.fromkeys((*ALWAYS[:8], "load best", *ALWAYS[8:]), "passed"), tree["problems"]
    assert codes(tree) == set() and codes(tree, "note") == {"FSDP-N757"}
    model = tree["run"]["model"]
    assert model["name"] == "LlamaForCausalLM" and 10 * model["num_params"] < model["real_num_params"]


@pytest.mark.slow
def test_absent_policy_class_in_a_config_of_stdin(folder: Path) -> None:
    write_config(folder, fsdp_transformer_layer_cls_to_wrap="BertLayer")
    tree = check(folder, "-", "--model", "model", stdin=(folder / "fsdp.yaml").read_text())
    assert tree["results"]["prepare"] == "failed" and codes(tree) == {"FSDP-E214"}
    assert tree["results"]["step"] == tree["results"]["export"] == "not tested"


@pytest.mark.slow
def test_failed_stage_leaves_later_ones_untested(folder: Path) -> None:
    tree = check(folder, "fsdp.yaml", "--model", "model", "--optim", "grokadamw")
    failed = {name for name, result in tree["results"].items() if result == "failed"}
    assert failed == {"prepare"} and tree["results"]["save"] == "not tested", tree["problems"]


@pytest.mark.slow
def test_run_beyond_the_limit_is_stopped_with_its_stage(folder: Path) -> None:
    tree = check(folder, "fsdp.yaml", "--model", "model", "--limit", "1")
    assert codes(tree) == {"FSDP-E755"} and not tree["ok"]


@pytest.mark.slow
def test_save_only_model_is_not_resumed_but_exported(folder: Path) -> None:
    tree = check(folder, "fsdp.yaml", "--model", "model", "--save_only_model", "true")
    assert (tree["results"]["resume"], tree["results"]["export"], tree["ok"]) == ("not tested", "passed", True)


@pytest.mark.slow
def test_run_without_saves_exports_the_model(folder: Path) -> None:
    flags = ("--save_strategy", "no", "--eval_strategy", "no")
    results = check(folder, "fsdp.yaml", "--model", "model", *flags)["results"]
    assert [results[stage] for stage in ("evaluate", "save", "resume")] == ["not tested"] * 3
    assert results["export"] == "passed"


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_ends_all_ranks_and_leaves_nothing(folder: Path, number: int) -> None:
    process = start(folder, "fsdp.yaml", "--model", "model")
    deadline = time.monotonic() + 200
    while not (ranks := list((folder / "tmp").glob("*/run/rank_1.pickle"))) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert ranks
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.send_signal(number)
    process.communicate(timeout=200)
    assert process.returncode == 128 + number
    assert all(is_gone(int(pid)) for pid in children)
    assert list((folder / "tmp").iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ("--optmi adafactor", "--optmi"),
        ("--optim nonsense", "optim"),
        ("--load_best_model_at_end true --eval_strategy no", "load_best_model_at_end"),
    ],
)
def test_refused_training_arguments_are_reported(folder: Path, arguments: str, problem: str) -> None:
    tree = check(folder, "fsdp.yaml", "--model", "model", *arguments.split())
    assert codes(tree) == {"FSDP-E751"}
    assert any(problem in str(each) for each in tree["problems"])


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD"])
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("kind", ["SHARDED_STATE_DICT", "FULL_STATE_DICT"])
def test_every_strategy_passes_with_fp16(folder: Path, strategy: str, version: int, kind: str) -> None:
    write_config(
        folder, fsdp_version=version, fsdp_sharding_strategy=strategy, fsdp_state_dict_type=kind, mixed_precision="fp16"
    )
    flags = "--gradient_checkpointing true --max_grad_norm 0.5 --lr_scheduler_type cosine"
    tree = check(folder, "fsdp.yaml", "--model", "model", *flags.split())
    assert tree["ok"], tree["problems"]
    assert tree["run"]["world_size"] == (4 if strategy == "HYBRID_SHARD" else 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "architecture",
    ["LlamaForCausalLM", "MixtralForCausalLM", "BertForMaskedLM", "T5ForConditionalGeneration", "GPT2LMHeadModel"],
)
def test_preflight_of_each_family_ends_in_a_minute(folder: Path, architecture: str) -> None:
    import transformers

    config = getattr(transformers, architecture).config_class(architectures=[architecture])
    config.decoder_start_token_id = 0
    config.save_pretrained(folder / "real")
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    tree = check(folder, "fsdp.yaml", "--model", "real", "--bf16", "true")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert tree["ok"], tree["problems"]
    # CPU time of launcher and ranks, because other processes may take the cores.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 60


@pytest.mark.slow
def test_model_with_a_vision_tower_trains_on_text(folder: Path) -> None:
    import transformers as hf

    vision = {
        "model_type": "clip_vision_model", "image_size": 56, "patch_size": 14, "hidden_size": 512,
        "num_attention_heads": 8, "intermediate_size": 1024, "num_hidden_layers": 4,
    }  # fmt: skip
    config = hf.LlavaConfig(
        text_config=LLAMA,
        vision_config=vision,
        architectures=["LlavaForConditionalGeneration"],
        image_token_index=3999,
    )
    config.save_pretrained(folder / "vlm")
    tree = check(folder, "fsdp.yaml", "--model", "vlm")
    assert tree["ok"], tree["problems"]
    assert any("images" in problem["message"] for problem in tree["problems"] if problem["code"] == "FSDP-W756")
