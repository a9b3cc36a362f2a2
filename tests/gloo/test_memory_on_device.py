"""Predicted memory against the counter of the simulated accelerator, by scripts/bench/measure/memory_on_device.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.accelerator.accelerator_build import available
from tests.support.matrices import slow

ROOT = Path(__file__).parents[2]
SMALL = "layers=2,hidden=256,inter=512,heads=4,kv_heads=2,vocab=1000,seq=64,attention=eager"
QUICK = (
    f"version=1,offload_params=1,{SMALL}",
    f"version=2,offload_params=1,precision=bf16,checkpointing=1,{SMALL}",
    f"version=2,strategy=shard_grad_op,loop=foreach,{SMALL}",
)
LONG = (
    f"version=1,offload_params=1,precision=bf16,{SMALL}",
    f"version=1,strategy=shard_grad_op,offload_params=1,use_orig=0,{SMALL}",
    f"version=1,strategy=no_shard,offload_params=1,precision=bf16,{SMALL}",
    f"version=2,strategy=no_shard,offload_params=1,{SMALL}",
    f"version=2,checkpointing=1,offload_activations=1,{SMALL}",
    f"version=1,offload_optimizer=1,precision=bf16,{SMALL}",
    "version=2,offload_optimizer=1,loop=foreach,hidden=1024,inter=4096,vocab=16000,seq=64,batch=1,attention=eager",
    *(f"version=2,optimizer=muon,precision={each},{SMALL},seq=16,batch=1" for each in ("no", "bf16")),
    f"version=1,accumulation=2,{SMALL}",
    f"version=2,strategy=hybrid_shard,ranks=4,accumulation=3,late=1,{SMALL}",
    f"version=2,strategy=hybrid_shard,ranks=4,accumulation=3,late=1,precision=bf16,{SMALL}",
)


@pytest.mark.parametrize("points", [slow(QUICK), slow(LONG)], ids=["quick", "long"])
def test_predicted_peak_equals_the_counter(points: tuple[str, ...], tmp_path: Path) -> None:
    if reason := available():
        pytest.skip(f"no simulated accelerator: {reason}")
    out = tmp_path / "memory_on_device.json"
    command = [sys.executable, "-m", "scripts.bench", "memory_on_device", "--out", str(out), "--points", *points]
    environ = {**os.environ, "TMPDIR": str(tmp_path)}  # torchrun leaves an empty folder
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=environ)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = json.loads(out.read_text())["points"]
    assert len(rows) == len(points)
    for row in rows:
        assert abs(row["error"]["closed_form"]) < 0.02, row
