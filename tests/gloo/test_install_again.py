"""``uninstall()`` on ranks leaves nothing of the plugin but models, and the next ``install()`` begins anew."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from accelerate import Accelerator

import hf_fsdp_plugin as hfp
from hf_fsdp_plugin.messages import MessagePrinter
from hf_fsdp_plugin.state import process
from tests.support.ranks import Ranks
from tests.support.trainer_runs import losses, make_trainer


def train_twice(output_dir: str, **arguments: Any) -> list[dict[str, Any]]:
    """Install, train with checkpoints and uninstall, twice in this process."""
    hfp.uninstall()
    excepthook, prepare, threads = sys.excepthook, Accelerator.prepare, threading.active_count()
    runs = []
    for number in range(2):
        assert process.find(MessagePrinter) is None
        hfp.install()
        trainer = make_trainer(f"{output_dir}/{number}", save_strategy="steps", save_steps=3, **arguments)
        trainer.train()
        assert Accelerator.prepare is not prepare and sys.excepthook != excepthook
        hfp.uninstall()
        assert (sys.excepthook, Accelerator.prepare) == (excepthook, prepare)
        left = [kind.__name__ for kind in process._parts if kind not in process._kept]
        runs.append({"losses": losses(trainer), "left": left, "threads": threading.active_count() - threads})
    return runs


@pytest.mark.parametrize("version", [1, 2])
def test_second_install_trains_as_the_first(two_ranks: Ranks, tmp_path: Path, version: int) -> None:
    config = {"fsdp_version": version, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
    for first, second in two_ranks.run(train_twice, str(tmp_path), fsdp="full_shard auto_wrap", fsdp_config=config):
        assert first["losses"] == second["losses"] and len(first["losses"]) == 6
        assert first["left"] == second["left"] == []
        assert first["threads"] >= second["threads"]
