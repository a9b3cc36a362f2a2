"""scripts/bench/allocator counts what torch's CPU allocator holds, on every thread."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.bench.allocator import AllocatorCounter, NoCounter, build, preloaded

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux") or not any(map(shutil.which, ("cc", "gcc", "clang"))),
    reason="requires Linux and a C compiler",
)

ALLOCATE_BY_HAND = """
import random, sys, threading
sys.path.append(sys.argv[1])
from scripts.bench.allocator import AllocatorCounter
import torch

counter = AllocatorCounter()
held, blocks = counter.current, counter.blocks
kept = torch.empty(1000)
assert counter.current - held == 4000
assert torch.empty(0).numel() == 0 and counter.current - held == 4000

counter.reset_peak()
counter.record()
thread = threading.Thread(target=lambda: torch.empty(10**6, dtype=torch.uint8))
thread.start()
thread.join()
assert counter.current - held == 4000
assert counter.peak - held == 1_004_000
assert [size for _, size in counter.events()] == [10**6, -(10**6)]

kept.untyped_storage().resize_(100)  # a new block, while the old one exists
assert counter.current - held == 100
assert [size for _, size in counter.events()][2:] == [100, -4000]
del kept

source, tensors = random.Random(0), []
for step in range(20_000):
    if tensors and source.random() < 0.5:
        tensors.pop(source.randrange(len(tensors)))
    else:
        tensors.append(torch.empty(source.randrange(1, 5000), dtype=torch.uint8))
    if step % 1000 == 0:
        assert counter.current - held == sum(tensor.nbytes for tensor in tensors)
tensors.clear()
assert (counter.current, counter.blocks) == (held, blocks)
"""


def test_counter_equals_allocations_by_hand(tmp_path: Path) -> None:
    scripts = str(Path(__file__).parents[2])
    command = [sys.executable, "-c", ALLOCATE_BY_HAND, scripts]
    done = subprocess.run(command, env=preloaded(build(tmp_path)), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_counter_needs_the_preloaded_library() -> None:
    with pytest.raises(NoCounter, match="not preloaded"):
        AllocatorCounter()


def test_counter_without_compiler_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NoCounter, match="No C compiler"):
        build(tmp_path)
