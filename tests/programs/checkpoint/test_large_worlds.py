"""Made-up checkpoints of 256 and 1,024 ranks: what resuming and committing cost must not be square in the ranks."""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from hf_fsdp_plugin.checkpoint.checking.inspection import summarize
from hf_fsdp_plugin.checkpoint.formats import dcp as reader
from hf_fsdp_plugin.checkpoint.names import DCP_METADATA, INDEX_FILE, MANIFEST_NAME
from hf_fsdp_plugin.checkpoint.writing import dcp_files
from hf_fsdp_plugin.checkpoint.writing.staging import StagingFolder
from tests.support.call_counts import calls_of
from tests.support.made_up_runs import Counts, MadeUpRun, llama_shapes, plan_resume, sparse_data

WORLDS = (256, 1024)
NUM_TENSORS = 3 * len(llama_shapes(1))
"""Parameters, and the moments of AdamW."""


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
        patch.setattr(dcp_files, "MIN_INDEXED", 0 if indexed else 1 << 40)
        run = MadeUpRun(world, llama_shapes(layers))
        staging = StagingFolder(folder / "checkpoint-20")
        staging._create()
        run.write(staging)
        _, calls = calls_of(lambda: staging.commit(staging.read_records(world), run.manifest()))
    return Saved(staging.final, run, calls)


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> tuple[Saved, Saved]:
    """A checkpoint of a large world, and one of a quarter of the ranks."""
    small, large = (save(tmp_path_factory.mktemp("w"), world) for world in WORLDS)
    return small, large


Worlds = tuple[Saved, Saved]


def test_resume_does_the_same_work_in_a_larger_world(worlds: Worlds) -> None:
    small, large = (saved.resume(saved.run.world) for saved in worlds)
    assert large[0].reads <= small[0].reads + 20  # pages of the manifest's hashes
    assert len(large[0].opens) == len(small[0].opens)
    assert large[2] <= small[2]  # one read for each tensor
    assert large[1] - small[1] < 150 * more_files(worlds), "more calls than the manifest's list of files explains"


def more_files(worlds: Worlds) -> int:
    """The manifest lists two data files and a random state for each rank."""
    return 3 * (worlds[1].run.world - worlds[0].run.world)


@pytest.mark.parametrize("share", [3 / 4, 0.501, 2])
def test_resume_in_another_world_reads_few_pieces(worlds: Worlds, share: float) -> None:
    counts, _, reads, _ = worlds[1].resume(int(worlds[1].run.world * share))
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


def test_resume_reads_little_but_its_own_bytes(worlds: Worlds) -> None:
    small, large = (saved.resume(saved.run.world)[0].num_bytes for saved in worlds)
    assert large < 2 * small + 500 * more_files(worlds)
    listed = sum(path.stat().st_size for path in worlds[1].folder.rglob(DCP_METADATA))
    assert not listed or large < listed / 4


def test_index_and_manifest_stay_small(worlds: Worlds) -> None:
    small, large = ([path.stat().st_size for path in sorted(w.folder.rglob(f"*{INDEX_FILE}"))] for w in worlds)
    assert len(large) == 2
    assert all(there < here + 20 * more_files(worlds) for here, there in zip(small, large, strict=True))
    assert (worlds[1].folder / MANIFEST_NAME).stat().st_size < 10e6 / 10


def test_inspect_has_no_loop_over_chunks(worlds: Worlds) -> None:
    (_, small), (summary, large) = (calls_of(partial(summarize, saved.folder)) for saved in worlds)
    assert summary.incomplete is None and summary.world_size == worlds[1].run.world
    assert large - small < 600 * more_files(worlds)


def test_commit_has_no_loop_over_chunks(worlds: Worlds, tmp_path: Path) -> None:
    small, large = worlds
    assert large.commit_calls < 4.4 * small.commit_calls, "linear in the ranks"
    more = save(tmp_path, small.run.world, layers=3)
    num_tensors = 3 * (len(more.run.shapes) - len(small.run.shapes))
    # At 256 ranks, each of them has 256 chunks.
    assert more.commit_calls - small.commit_calls < 1000 * num_tensors
