"""``hf-fsdp check --run``: whose arguments the words are, and wrong usage."""

from __future__ import annotations

from pathlib import Path

import pytest

from hf_fsdp_plugin.cli.main import main, make_parser
from hf_fsdp_plugin.spec.load import load_spec
from hf_fsdp_plugin.tools.preflight.run import overrides_for_cpu, split_run_words


@pytest.mark.parametrize(
    ("words", "checked", "training"),
    [
        ("--run a.yaml --model m", "--run a.yaml --model m", ""),
        ("--run a.yaml --model m --optim adafactor", "--run a.yaml --model m", "--optim adafactor"),
        ("--optim adafactor --run a.yaml --model m", "--run a.yaml --model m", "--optim adafactor"),
        ("--run --model m --bf16 a.yaml", "--run --model m a.yaml", "--bf16"),
        ("--run --learning-rate=1e-3 a.yaml", "--run a.yaml", "--learning-rate=1e-3"),
        ("--run --cpu a.yaml --mixed_precision bf16", "--run --cpu a.yaml --mixed_precision bf16", ""),
        ("--run a.yaml --fsdp_version 2 --json", "--run a.yaml --fsdp_version 2 --json", ""),
    ],
)
def test_words_are_split_by_their_owner(words: str, checked: str, training: str) -> None:
    parser = make_parser("check")
    assert split_run_words(words.split(), parser) == (checked.split(), training.split())


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ("--run fsdp.yaml", "needs --model DIR|ID"),
        ("--run fsdp.yaml train.py --epochs 3", "runs a script of its own, and not train.py. Pass --model"),
        ("--run fsdp.yaml -m package.train", "runs a script of its own, and not -m package.train. Pass --model"),
        ("--run fsdp.yaml other.yaml --model m", "needs one config"),
        ("--run fsdp.yaml --model m --limit 0", "--limit is 0"),
    ],
)
def test_wrong_usage_exits_2_without_ranks(
    words: str, hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fsdp.yaml").write_text("distributed_type: FSDP\n")
    (tmp_path / "train.py").write_text("")
    assert main(["check", *words.split()]) == 2
    shown = capsys.readouterr()
    assert hint in shown.err and shown.out == "" and shown.err.count("\n") == 1


def test_missing_config_exits_2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    assert main(["check", "--run", "--model", "m"]) == 2
    assert main(["check", "--run", str(tmp_path / "none.yaml"), "--model", "m"]) == 2


def test_config_with_errors_starts_no_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_fsdp_plugin.tools.preflight.run.run_preflight", lambda *_: pytest.fail("started"))
    (tmp_path / "fsdp.yaml").write_text("distributed_type: FSDP\nfsdp_config:\n  fsdp_versoin: 2\n")
    assert main(["check", "--run", str(tmp_path / "fsdp.yaml"), "--model", "m"]) == 1


@pytest.mark.parametrize(
    ("strategy", "mesh", "expected"),
    [
        ("FULL_SHARD", {}, {"launch.num_processes=2"}),
        ("HYBRID_SHARD", {}, {"launch.num_processes=4", "mesh.shard=2", "mesh.replicate=2"}),
        ("FULL_SHARD", {"dp_shard_size": 8, "dp_replicate_size": 8}, {"launch.num_processes=4", "mesh.shard=2"}),
        ("FULL_SHARD", {"dp_shard_size": 64}, {"launch.num_processes=2", "mesh.shard=2", "mesh.replicate=1"}),
        ("NO_SHARD", {"dp_shard_size": 1}, {"launch.num_processes=2", "mesh.shard=1", "mesh.replicate=2"}),
    ],
)
def test_mesh_is_reduced_to_few_ranks(strategy: str, mesh: dict[str, int], expected: set[str]) -> None:
    config = {"distributed_type": "FSDP", "fsdp_config": {"fsdp_sharding_strategy": strategy}}
    config |= {"parallelism_config": {f"parallelism_config_{name}": size for name, size in mesh.items()}}
    overrides, _ = overrides_for_cpu(load_spec(config, environ={}))
    assert expected <= set(overrides)


def test_size_of_units_is_reduced_for_the_clone() -> None:
    fsdp = {"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP", "fsdp_min_num_params": 10**8}
    spec = load_spec({"distributed_type": "FSDP", "fsdp_config": fsdp}, environ={})
    overrides, notes = overrides_for_cpu(spec)
    assert "wrap.min_num_params=10000" in overrides
    assert [(note.code, note.setting) for note in notes] == [("FSDP-N757", "wrap.min_num_params")]


def test_fp16_is_replaced_by_bf16_with_a_note() -> None:
    spec = load_spec({"distributed_type": "FSDP", "mixed_precision": "fp16", "num_processes": 64}, environ={})
    overrides, notes = overrides_for_cpu(spec)
    assert {"launch.mixed_precision=bf16", "precision.param=bf16"} <= set(overrides)
    assert {note.code for note in notes} == {"FSDP-N757"}
    assert {note.setting for note in notes} >= {"launch.mixed_precision", "launch.num_processes"}
