"""The part of tests/unit/checkpoint/test_hostile_files.py that starts processes or computes for seconds."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import torch

from hf_fsdp_plugin.checkpoint.reading.states import load_state_file


def test_compressed_state_is_refused_before_it_grows(tmp_path: Path) -> None:
    path = tmp_path / "scheduler.pt"
    torch.save({"last_epoch": 7}, path)
    assert load_state_file(path) == {"last_epoch": 7}
    with zipfile.ZipFile(path) as source:
        records = {name: source.read(name) for name in source.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as target:
        for name, data in records.items():
            target.writestr(name, data)
        target.writestr("scheduler/data/9", bytes(800_000_000))
    assert path.stat().st_size < 1_000_000
    program = (
        "import resource, sys; from pathlib import Path\n"
        "from hf_fsdp_plugin.checkpoint.reading.states import load_state_file\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "try: load_state_file(Path(sys.argv[1]))\n"
        "except ValueError as error: print(error)\n"
        "assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000\n"
    )
    done = subprocess.run([sys.executable, "-c", program, path], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "FSDP-E453" in done.stdout, done.stderr


def test_file_larger_than_the_memory_is_refused(tmp_path: Path) -> None:
    with (tmp_path / "config.json").open("wb") as out:
        out.truncate(3 << 29)
    program = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30)); from pathlib import Path\n"
        "from hf_fsdp_plugin.checkpoint.io import read_file\n"
        "try: read_file(Path(sys.argv[1]))\n"
        "except ValueError as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, tmp_path / "config.json"], capture_output=True, text=True, timeout=60
    )
    assert "FSDP-E412" in done.stdout, done.stderr
