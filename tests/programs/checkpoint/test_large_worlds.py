"""Made-up checkpoints of many ranks: what resuming and committing cost must not be square in the ranks."""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from hf_fsdp_plugin.checkpoint.writing.staging_folder import StagingFolder
from hf_fsdp_plugin.tools.inspect.summary import summarize
from tests.support.call_counts import calls_of
from tests.support.made_up_runs import Counts, MadeUpRun, llama_shapes, plan_resume, sparse_data

WORLDS = (16, 64)
NUM_TENSORS = 3 * len(llama_shapes(1))
"""Parameters, and the moments of AdamW."""


@dataclass
class Saved:
    """A committed checkpoint, and the number of calls of its commit."""

    folder: Path
    run: MadeUpRun
    commit_calls: int

    def resume(self, world: int) -> tuple[Counts, int, int]:
        """Plan the reads of one of ``world`` ranks. Return the counts, and the numbers of calls and reads."""
        rank = world // 2
        shards = MadeUpRun(world, self.run.shapes).shards(rank)
        with Counts(self.folder) as counts, sparse_data(self.run.world):
            (work, held), calls = calls_of(lambda: plan_resume(self.folder, shards, rank, world))
        assert sum(transfer.into.nbytes for _, transfer in work) == held
        return counts, calls, len(work)


def save(folder: Path, world: int) -> Saved:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        run = MadeUpRun(world, llama_shapes(1))
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


def test_resume_reads_as_much_in_a_larger_world(worlds: Worlds) -> None:
    small, large = (saved.resume(saved.run.world) for saved in worlds)
    assert large[0].reads <= small[0].reads + 20  # pages of the manifest's hashes
    assert len(large[0].opens) == len(small[0].opens)
    assert large[2] <= small[2]  # one read for each tensor
    assert large[1] < 4.4 * small[1], "linear in the ranks"


@pytest.mark.parametrize("share", [3 / 4, 0.501, 2])
def test_resume_in_another_world_reads_few_pieces(worlds: Worlds, share: float) -> None:
    counts, _, reads = worlds[1].resume(int(worlds[1].run.world * share))
    assert reads <= 4 * NUM_TENSORS
    assert counts.reads < 15 * NUM_TENSORS and len(counts.opens) < 20


def test_more_ranks_than_open_files_are_read(tmp_path: Path) -> None:
    saved = save(tmp_path, 100)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 150, limits[1]))
    try:
        counts, _, _ = saved.resume(1)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert len(counts.opens) > 200


def test_commit_is_linear_in_the_ranks(worlds: Worlds) -> None:
    small, large = worlds
    assert large.commit_calls < 4.4 * small.commit_calls


def test_inspect_reads_no_headers_of_tensors(worlds: Worlds) -> None:
    found = []
    for saved in worlds:
        with Counts(saved.folder) as counts:
            summary, calls = calls_of(partial(summarize, saved.folder))
        assert summary.incomplete is None and summary.world_size == saved.run.world
        found.append((counts.reads, calls))
    (few, small_calls), (many, large_calls) = found
    assert many < few + 20 and large_calls < 4.4 * small_calls
