"""Uploads that are interrupted, throttled, refused, lost or killed: a storage contains complete checkpoints only."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest

from hf_fsdp_plugin.checkpoint.formats.manifest import read_manifest
from hf_fsdp_plugin.checkpoint.storage import Storage
from hf_fsdp_plugin.tools.verify.verification import hash_problems
from tests.support.object_store import BUCKET, Faults, object_store


@pytest.fixture(scope="module")
def faults() -> Faults:
    return Faults()


@pytest.fixture(scope="module")
def variables(faults: Faults) -> Iterator[dict[str, str]]:
    with object_store(faults) as found, patch.dict(os.environ, found):
        yield found


@pytest.mark.parametrize(
    "trials", [pytest.param(range(6), id="few"), pytest.param(range(6, 200), id="many", marks=pytest.mark.slow)]
)
@pytest.mark.timeout(3600)
def test_no_trial_leaves_or_loses_a_checkpoint(
    trials: range, variables: dict[str, str], faults: Faults, tmp_path: Path
) -> None:
    url = f"s3://{BUCKET}/trials{len(trials)}"
    complete: set[str] = set()
    environ = {**os.environ, **variables, "TMPDIR": str(tmp_path)}
    for trial in trials:
        draw = random.Random(trial)
        faults.randomly(trial, draw.choice([0.0, 0.05, 0.3]))
        command = [sys.executable, "-m", "tests.programs.checkpoint.storage_writer", url, str(trial)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ) as writer:
            assert writer.stdout is not None
            first = writer.stdout.readline()
            time.sleep(draw.choice([0.0, 0.5, 2.0, 6.0]) * draw.random())
            writer.kill()
            lines = [line.split() for line in (first + writer.stdout.read()).splitlines()]
        faults.choose = lambda method, path: ""
        for word, name, *_ in lines:
            if word == "complete":
                complete.add(name)
            elif word == "removing":
                complete.discard(name)
        found = Storage(url).checkpoints()
        assert complete <= found.keys(), (trial, lines)
        complete = {*found}
        for name in found:
            with tempfile.TemporaryDirectory() as folder:
                fetched = Storage(url).fetch(name, Path(folder))
                assert not check_all(fetched), (trial, name)


def check_all(folder: Path) -> list[str]:
    """Return the problems of all bytes of a checkpoint."""
    manifest = read_manifest(folder)
    assert manifest is not None
    files = {folder / record.path: record.ranges for record in manifest.files}
    return [str(problem) for problem in hash_problems(files, lambda *_: None)]
