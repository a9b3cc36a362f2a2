"""Made-up checkpoints of 256 and 1,024 ranks: what resuming and committing cost must not be square in the ranks."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from made_up_runs import Counts, MadeUpRun, llama_shapes, plan_resume, sparse_data

from hf_fsdp_plugin.checkpoint.formats import dcp as reader
from hf_fsdp_plugin.checkpoint.names import DCP_METADATA, INDEX_FILE, MANIFEST_NAME
from hf_fsdp_plugin.checkpoint.writing import dcp
from hf_fsdp_plugin.checkpoint.writing.staging import StagingFolder

SMALL, LARGE = 256, 1024
NUM_TENSORS = 3 * len(llama_shapes(1))
"""Parameters, and the moments of AdamW."""


def calls_of(function: Callable[[], Any]) -> tuple[Any, int]:
    """Return the result of a function, and the number of calls of functions in it, of Python and of C."""
    count = 0

    def profile(_frame: Any, event: str, _argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        return function(), count
    finally:
        sys.setprofile(None)


@dataclass
class Saved:
    """A committed checkpoint, and the number of calls of its commit."""

    folder: Path
    run: MadeUpRun
    commit_calls: int

    def resume(self, world: int) -> tuple[Counts, int, int, int]:
        """Plan the reads of one of ``world`` ranks. Return the counts, and the numbers of calls, reads and bytes."""
        rank = world // 2
        shards = MadeUpRun(world, self.run.shapes).shards(rank)
        with Counts(self.folder) as counts, sparse_data(self.run.world):
            (work, held), calls = calls_of(lambda: plan_resume(self.folder, shards, rank, world))
        assert sum(transfer.into.nbytes for _, transfer in work) == held
        return counts, calls, len(work), held


def save(folder: Path, world: int, layers: int = 1, *, indexed: bool = True) -> Saved:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        if indexed:
            patch.setattr(dcp, "MIN_INDEXED", 0)  # few layers
        run = MadeUpRun(world, llama_shapes(layers))
        staging = StagingFolder(folder / "checkpoint-20")
        staging._create()
        run.write(staging)
        _, calls = calls_of(lambda: staging.commit(staging.read_records(world), run.manifest()))
    return Saved(staging.final, run, calls)


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, Saved]]:
    yield {world: save(tmp_path_factory.mktemp(str(world)), world) for world in (SMALL, LARGE)}


def test_resume_does_the_same_work_in_a_larger_world(worlds: dict[int, Saved]) -> None:
    small, large = (worlds[world].resume(world) for world in (SMALL, LARGE))
    assert large[0].reads <= small[0].reads + 20  # pages of the manifest's hashes
    assert len(large[0].opens) == len(small[0].opens)
    assert large[2] <= small[2]  # one read for each tensor
    files = 3 * (LARGE - SMALL)  # the manifest lists two data files and a random state for each rank
    assert large[1] - small[1] < 150 * files, "more calls than the manifest's list of files explains"


@pytest.mark.parametrize("resumed", [LARGE * 3 // 4, LARGE // 2 + 1, LARGE * 2])
def test_resume_in_another_world_reads_few_pieces(worlds: dict[int, Saved], resumed: int) -> None:
    counts, _, reads, _ = worlds[LARGE].resume(resumed)
    assert reads <= 4 * NUM_TENSORS
    assert counts.reads < 10 * NUM_TENSORS and len(counts.opens) < 10


def test_more_ranks_than_open_files_are_read(tmp_path: Path) -> None:
    """Without an index, as earlier versions and stock write it."""
    saved = save(tmp_path, 100, indexed=False)
    assert not [*saved.folder.rglob(INDEX_FILE)]
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 75, limits[1]))
    try:
        counts, _, reads, _ = saved.resume(75)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert len(counts.opens) > 200 and reads < 4 * NUM_TENSORS


def test_large_world_without_index_opens_few_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "MAX_EAGER", 0)
    counts, _, reads, _ = save(tmp_path, 100, indexed=False).resume(75)
    assert len(counts.opens) < 20 and counts.reads < 10 * NUM_TENSORS and reads < 4 * NUM_TENSORS


def test_resume_reads_little_but_its_own_bytes(worlds: dict[int, Saved]) -> None:
    small, large = (worlds[world].resume(world) for world in (SMALL, LARGE))
    assert large[0].num_bytes < 2 * small[0].num_bytes + 500 * 3 * (LARGE - SMALL)
    listed = sum(path.stat().st_size for path in worlds[LARGE].folder.rglob(DCP_METADATA))
    assert large[0].num_bytes < listed / 4


def test_index_and_manifest_stay_small(worlds: dict[int, Saved]) -> None:
    sizes = {
        world: [path.stat().st_size for path in sorted(saved.folder.rglob(INDEX_FILE))]
        for world, saved in worlds.items()
    }
    assert len(sizes[LARGE]) == 2
    assert all(large < small + 40 * (LARGE - SMALL) for small, large in zip(*sizes.values(), strict=True))
    assert (worlds[LARGE].folder / MANIFEST_NAME).stat().st_size < 10e6 / 10


def test_commit_has_no_loop_over_chunks(worlds: dict[int, Saved], tmp_path: Path) -> None:
    small, large = worlds[SMALL].commit_calls, worlds[LARGE].commit_calls
    assert large < 4.4 * small, "linear in the ranks"
    more = save(tmp_path, SMALL, layers=3)
    num_tensors = 3 * (len(more.run.shapes) - len(worlds[SMALL].run.shapes))
    assert more.commit_calls - small < 1000 * num_tensors, f"each has {SMALL} chunks"
