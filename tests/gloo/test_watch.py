"""``hf-fsdp watch`` of a run that a Trainer has trained on ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hf_fsdp_plugin.cli.main import main
from tests.support.json_schema import assert_valid
from tests.support.ranks import Ranks
from tests.support.trainer_runs import losses, make_trainer


def train(folder: str) -> list[float]:
    config = {"fsdp": "full_shard auto_wrap", "fsdp_config": {"fsdp_version": 2}}
    trainer = make_trainer(folder, save_strategy="steps", save_steps=3, **config)
    trainer.train()
    return losses(trainer)


def test_watch_shows_the_run_of_a_trainer(two_ranks: Ranks, tmp_path: Path, capsys: Any) -> None:
    expected = two_ranks.run(train, str(tmp_path))[0]
    assert main(["watch", str(tmp_path), "--json"]) == 0
    tree = json.loads(capsys.readouterr().out)
    assert_valid("watch", tree)
    assert [row["loss"] for row in tree["history"] if "loss" in row] == pytest.approx(expected)
    assert (tree["step"], tree["max_steps"], tree["report"]["world_size"]) == (6, 6, 2)
    assert [(row["step"], row["complete"]) for row in tree["checkpoints"]] == [(6, True), (3, True)]
    assert main(["watch", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "step 6 of 6 (100%)" in shown and "LlamaForCausalLM" in shown and "differs:" not in shown
    lines = shown[shown.index("memory by kind at step 6") :].splitlines()
    assert [line.split("  ")[0] for line in lines[1:5]] == ["parameters", "gradients", "optimizer state", "other"]
