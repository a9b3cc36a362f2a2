"""Predicted memory against the peak of torch's allocator on real ranks, by scripts/bench/measure/memory_error.py."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.matrices import needs_transformers, slow

ROOT = Path(__file__).parents[2]
SMALL = "layers=2,hidden=128,inter=256,heads=4,kv_heads=2,vocab=500,seq=128"
QUICK = (f"family=llama,version=2,precision=bf16,checkpointing=1,{SMALL}", f"family=bert,version=1,{SMALL}")
LONG = (
    f"family=gpt2,version=2,strategy=shard_grad_op,loop=foreach,{SMALL}",
    f"family=mixtral,version=1,strategy=no_shard,precision=bf16,loop=fused,{SMALL}",
    f"family=llama,version=1,strategy=hybrid_shard,ranks=4,accumulation=2,{SMALL}",
    f"family=t5,version=2,checkpointing=1,{SMALL}",
    f"family=whisper,version=2,checkpointing=1,{SMALL}",
    f"family=clip,version=1,checkpointing=1,{SMALL}",
    f"family=llama,version=1,lora=8,wrap=parts,{SMALL}",
    f"family=llama,version=1,lora=8,precision=bf16,{SMALL}",
    f"family=llama,version=2,lora=8,precision=bf16,checkpointing=1,{SMALL}",
)

_FOUR = f"version=2,ranks=4,{SMALL}"
AXES = (f"family=llama,tensor=2,precision=bf16,{_FOUR}", f"family=mixtral,expert=4,{_FOUR}")
MORE_AXES = (
    f"family=llama,context=2,tensor=2,{_FOUR}",
    f"family=llama,context=2,exchange=alltoall,{_FOUR}",
    f"family=mixtral,tensor=2,{_FOUR}",
    f"family=mixtral,expert=2,{_FOUR}",
    f"family=llama,tensor=2,accumulation=2,{_FOUR}",
)

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux") or not any(map(shutil.which, ("cc", "gcc", "clang"))),
    reason="the allocator's memory is counted by a library that is compiled for Linux",
)


def compared(points: tuple[str, ...], tmp_path: Path) -> list[dict[str, Any]]:
    """The rows of the points: the measured peak, and the errors of the predictions."""
    out = tmp_path / "memory_error.json"
    command = [sys.executable, "-m", "scripts.bench", "memory_error", "--out", str(out), "--points", *points]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = json.loads(out.read_text())["points"]
    assert len(rows) == len(points)
    return rows


@needs_transformers("5.20")
@pytest.mark.parametrize("points", [AXES[:1], slow(AXES[1:] + MORE_AXES)], ids=["tensor", "more"])
def test_predicted_peak_of_axes_is_the_measured_one(points: tuple[str, ...], tmp_path: Path) -> None:
    """The prediction has a batch with labels of its own, and no scalars of the loop."""
    for row in compared(points, tmp_path):
        assert abs(row["predicted"]["closed_form"]["bytes"] - row["measured_bytes"]) < 4096, row


@pytest.mark.parametrize("points", [QUICK, slow(LONG)], ids=["quick", "long"])
def test_predicted_peak_is_near_the_measured_one(points: tuple[str, ...], tmp_path: Path) -> None:
    for row in compared(points, tmp_path):
        assert abs(row["error"]["closed_form"]) < 0.05, row
