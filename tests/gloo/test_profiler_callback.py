"""``ProfilerCallback`` in Trainers on two ranks: results, resumed and short runs, full disks, and failures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.gloo import cases_profiling as cases
from tests.support.matrices import slow
from tests.support.ranks import Ranks

COMPLETE = ["profile.json", "ranks/rank_0.json", "ranks/rank_1.json", "traces/rank_0.json.gz", "traces/rank_1.json.gz"]


def settings(version: int) -> dict[str, Any]:
    return {"fsdp": "full_shard auto_wrap", "fsdp_config": {"version": version}}


@pytest.mark.parametrize("version", [slow(1), 2])
def test_profile_of_whole_resumed_and_short_runs(two_ranks: Ranks, tmp_path: Path, version: int) -> None:
    ranks = two_ranks.run(cases.profile_parts, str(tmp_path), **settings(version))
    whole, resumed, fewer, none = (ranks[0][name] for name in ("whole", "resumed", "fewer", "none"))
    for run, each in (("whole", whole), ("resumed", resumed)):
        assert each["files"] == COMPLETE, each["printed"]
        # The profile's step ends inside both intervals, however late the machine lets a rank continue.
        ends = [rank[run]["ends"] for rank in ranks]
        shortest = sum(end["before"][2] - end["after"][1] for end in ends) / 2
        longest = sum(end["after"][2] - end["before"][1] for end in ends) / 2
        assert shortest < each["seconds"] < longest
        assert {"forward", "backward", "optimizer", "clipping"} <= set(each["phases"])
        layers = [calls for name, calls in each["units"].items() if "layers" in name]
        assert len(layers) == 3 and set(layers) == {(1, 1)}
        assert each["facts"]["plan"]["backend"] == f"fsdp{version}"
    assert f"profile: {tmp_path}/profile/profile.json" in whole["printed"]  # printed once for a folder
    assert (len(whole["losses"]), whole["num_steps"], resumed["num_steps"]) == (10, 4, 4)
    assert resumed["losses"] == whole["losses"]
    assert fewer["files"] == COMPLETE and fewer["num_steps"] == 2 and "[FSDP-W771]" in fewer["printed"]
    assert "no profile" in none["printed"] and "[FSDP-E770]" in none["printed"]
    assert "profile.json" not in none["files"]


def test_failed_profile_leaves_training_and_no_files(two_ranks: Ranks, tmp_path: Path) -> None:
    for rank in two_ranks.run(cases.profile_with_failures, str(tmp_path), **settings(2)):
        for run in ("full", "one"):
            assert rank[run]["losses"] == rank["plain"], run
        assert rank["full"]["files"] == [] == rank["one"]["files"] == rank["failed"]
        assert rank["was_active"] and rank["is_over"]
        assert rank["after"]["files"] == COMPLETE
        if rank["rank"] == 0:
            assert "[FSDP-E772]" in rank["full"]["printed"] and "TMPDIR" in rank["full"]["printed"]
            assert "rank 1" in rank["one"]["printed"] and "[FSDP-E772]" in rank["one"]["printed"]
