"""Predicted memory against the peak of torch's allocator on real ranks, by scripts/bench/measure/memory_error.py."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.matrices import slow

ROOT = Path(__file__).parents[2]
SMALL = "layers=2,hidden=128,inter=256,heads=4,kv_heads=2,vocab=500,seq=128"
QUICK = (f"family=llama,version=2,precision=bf16,checkpointing=1,{SMALL}", f"family=bert,version=1,{SMALL}")
LONG = (
    f"family=gpt2,version=2,strategy=shard_grad_op,loop=foreach,{SMALL}",
    f"family=mixtral,version=1,strategy=no_shard,precision=bf16,loop=fused,{SMALL}",
    f"family=llama,version=1,strategy=hybrid_shard,ranks=4,accumulation=2,{SMALL}",
    f"family=t5,version=2,checkpointing=1,{SMALL}",
    f"family=llama,version=1,lora=8,wrap=parts,{SMALL}",
)

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux") or not any(map(shutil.which, ("cc", "gcc", "clang"))),
    reason="the allocator's memory is counted by a library that is compiled for Linux",
)


@pytest.mark.parametrize("points", [QUICK, slow(LONG)], ids=["quick", "long"])
def test_predicted_peak_is_near_the_measured_one(points: tuple[str, ...], tmp_path: Path) -> None:
    out = tmp_path / "memory_error.json"
    command = [sys.executable, "-m", "scripts.bench", "memory_error", "--out", str(out), "--points", *points]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = json.loads(out.read_text())["points"]
    assert len(rows) == len(points)
    for row in rows:
        assert abs(row["error"]["traced"]) < 0.05, row
        assert abs(row["error"]["closed_form"]) < 0.20, row
