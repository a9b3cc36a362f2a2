"""The part of tests/unit/checkpoint/test_hostile_files.py that starts processes or computes for seconds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_file_larger_than_the_memory_is_refused(tmp_path: Path) -> None:
    with (tmp_path / "config.json").open("wb") as out:
        out.truncate(3 << 29)
    program = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30)); from pathlib import Path\n"
        "from hf_fsdp_plugin.checkpoint.file_io import read_file\n"
        "try: read_file(Path(sys.argv[1]))\n"
        "except ValueError as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, tmp_path / "config.json"], capture_output=True, text=True, timeout=60
    )
    assert "FSDP-E412" in done.stdout, done.stderr
