"""Each pair of flags of a verb: both have their effect, or the combination is refused. None is dropped silently."""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hf_fsdp_plugin.cli.main import make_parser
from hf_fsdp_plugin.cli.output import USAGE
from tests.programs.cli.test_plan import LLAMA as LLAMA_OF_SIX_LAYERS
from tests.programs.cli.test_plan import YAML
from tests.support.merge_inputs import save

# So large that each flag changes the first two digits of the memory.
LLAMA = {**LLAMA_OF_SIX_LAYERS, "num_hidden_layers": 2, "max_position_embeddings": 16384, "vocab_size": 131072}
PLAN = {
    "config_option": "--config sharded.yaml", "config_file": "--config-file sharded.yaml",
    "fsdp": "--fsdp shard_grad_op",
    "fsdp_config": "--fsdp-config options.json", "overrides": "--set sharding.strategy=no_shard",
    "distributed_config": "--distributed-config distributed.json", "world_size": "--world-size 8",
    "micro_batch": "--micro-batch 4", "seq_len": "--seq-len 16384", "global_batch": "--global-batch 128",
    "accumulation": "--accumulation 4", "sync_each_batch": "--sync-each-batch", "optimizer": "--optimizer sgd",
    "update_loop": "--for-loop", "no_clip": "--no-clip", "attention": "--attention eager",
    "gpu_memory": "--gpu-memory 1GiB", "machine": "--machine h100-sxm", "html": "--html out.html", "force": "--force",
    "device": "--device cpu", "advise": "--advise",
    "lora_rank": "--lora-rank 4", "qlora": "--qlora", "json": "--json", "model": "--model other",
}  # fmt: skip
EFFECTLESS = {
    # Given in every command.
    *("model", "json"),
    # Sources of settings, which follow the order of precedence.
    *("config_option", "config_file", "fsdp", "fsdp_config", "overrides", "distributed_config"),
}
"""Flags that are not compared in all pairs."""
HIDDEN = {"update_loop", "no_clip", "force"}
"""Flags that do not change the peak of this model, or whether a file is written."""
NEEDS = {"force": ["--html out.html"], "sync_each_batch": ["--accumulation 4"]}


@pytest.fixture
def outcome(hf_fsdp: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Any, ...]]:
    """Run ``hf-fsdp plan`` in a folder with a small Llama, and return everything that it prints and writes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    for name, layers in (("llama", 2), ("other", 3)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(LLAMA | {"num_hidden_layers": layers}))
    (tmp_path / "fsdp.yaml").write_text(YAML)

    def run(*flags: str) -> tuple[Any, ...]:
        words = [word for flag in flags for word in flag.split()]
        try:
            code, out, error = hf_fsdp("plan", "--model", "llama", "fsdp.yaml", *words)
        except SystemExit as exit_:
            code, out, error = exit_.code, "", ""
        written = {}
        for file in tmp_path.glob("out.*"):
            written[file.name] = hashlib.sha256(file.read_bytes()).hexdigest()
            file.unlink()
        return code, out, error, tuple(sorted(written.items()))

    return run


def options_of(verb: str) -> set[str]:
    """Return the attributes of all optional flags of a verb's parser."""
    actions: list[argparse.Action] = make_parser(verb)._actions
    return {action.dest for action in actions if action.option_strings} - {"help", "command_line"}


def test_every_flag_of_plan_has_a_case() -> None:
    assert set(PLAN) == options_of("plan")


@pytest.mark.slow
def test_flags_have_an_effect_on_the_advice(outcome: Any) -> None:
    """A flag that is not refused changes the advice, or what is written."""
    base = ["--advise", "--gpu-memory 80GB"]
    alone = outcome(*base)
    assert alone[0] == 0, alone
    refused = set()
    for name, flag in PLAN.items():
        if name in {"advise", "qlora"} | EFFECTLESS - {"json"}:
            continue
        needs = NEEDS.get(name, [])
        found = outcome(*base, *needs, flag)
        before = outcome(*base, *needs) if needs else alone
        if found[0] == USAGE:
            refused.add(name)
        elif name not in HIDDEN:
            assert found != before, name
    assert {"device", "sync_each_batch"} <= refused


@pytest.mark.slow
def test_pairs_of_workload_flags_have_both_effects(outcome: Any) -> None:
    names = [name for name in PLAN if name not in EFFECTLESS | {"advise", "force"}]
    names = [name for name in names if name not in ("qlora", "global_batch", "html")]
    single = {name: outcome(PLAN[name], "--json") for name in names}
    base = outcome("--json")
    visible = [name for name in names if single[name] != base]
    hidden = set(names) - set(visible)
    assert hidden <= HIDDEN | {"sync_each_batch"}, hidden
    for one, other in itertools.combinations(visible, 2):
        both = outcome(PLAN[one], PLAN[other], "--json")
        assert both[0] == USAGE or both not in (single[one], single[other]), (one, other)


@pytest.mark.parametrize(
    "words",
    [
        "--force", "--advise --sync-each-batch", "--advise --device cpu",
    ],
)  # fmt: skip
def test_flags_without_an_effect_are_refused(outcome: Any, words: str) -> None:
    code, out, error, written = outcome(words)
    assert code == USAGE and "hf-fsdp plan: --" in error and not out and not written


CHECKPOINT_FLAGS = {
    "inspect": ["--json", "--parameters", "--optimizer"],
    "verify": ["--json", "--no-config-check"],
    "merge": ["--dtype bf16", "--max-shard-size 100", "--verify", "--delete-input", "--json"],
    "export": ["--dtype bf16", "--max-shard-size 100", "--verify", "--delete-input", "--json", "--best"],
}
SINGLE = {
    "--config", "--model-number", "--force", "--no-verify", "--no-config-check", "--verify",
    "--fold-adapter",
}  # fmt: skip
"""Flags of other inputs (an adapter: tests/programs/merge/test_fold_adapter.py), and those whose effect is not in the
result for an undamaged checkpoint."""


@pytest.mark.parametrize("verb", CHECKPOINT_FLAGS)
def test_pairs_of_flags_of_checkpoints_have_both_effects(hf_fsdp: Any, tmp_path: Path, verb: str) -> None:
    def outcome(*flags: str) -> tuple[Any, ...]:
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        for number in (1, 2):
            folder = save(tmp_path / "run" / f"checkpoint-{number}")
            (folder / "trainer_state.json").write_text('{"best_model_checkpoint": "run/checkpoint-1"}')
        place = tmp_path / "run" / ("" if verb == "export" else "checkpoint-1")
        out_folder = [] if verb in ("inspect", "verify") else [tmp_path / "out"]
        code, out, error = hf_fsdp(verb, place, *out_folder, *(word for flag in flags for word in flag.split()))
        files = {str(path): path.read_bytes() for path in tmp_path.rglob("*") if path.suffix == ".safetensors"}
        return code, out, error, files

    flags = CHECKPOINT_FLAGS[verb]
    known = {flag for action in make_parser(verb)._actions for flag in action.option_strings if flag.startswith("--")}
    assert {flag.split()[0] for flag in flags} | SINGLE >= known - {"--help"}
    base, single = outcome(), {flag: outcome(flag) for flag in flags}
    visible = [flag for flag in flags if single[flag] != base]
    assert set(flags) - set(visible) <= SINGLE
    for one, other in itertools.combinations(visible, 2):
        both = outcome(one, other)
        assert (both[0] == 0 and both not in (single[one], single[other])) or {one, other} <= IMPLIED, (one, other)


IMPLIED = {"--verify", "--delete-input"}
"""--delete-input verifies, too."""


@pytest.mark.parametrize("verb", ["merge", "export"])
def test_no_verify_conflicts_with_delete_input(hf_fsdp: Any, tmp_path: Path, verb: str) -> None:
    folder = save(tmp_path / "run" / "checkpoint-1")
    place = folder if verb == "merge" else folder.parent
    code, _, error = hf_fsdp(verb, place, tmp_path / "out", "--no-verify", "--delete-input")
    assert code == USAGE and "--no-verify conflicts with --delete-input" in error
    assert not (tmp_path / "out").exists() and list(folder.rglob("*.distcp"))


@pytest.mark.parametrize("words", ["--device cuda", "--limit 5"])
def test_check_refuses_flags_without_an_effect(hf_fsdp: Any, tmp_path: Path, words: str) -> None:
    (tmp_path / "fsdp.yaml").write_text(YAML)
    code, out, error = hf_fsdp("check", tmp_path / "fsdp.yaml", *words.split())
    assert code == USAGE and "hf-fsdp check: --" in error and not out
