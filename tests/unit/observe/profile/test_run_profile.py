"""Several ranks together, computed from made-up ranks with known answers."""

from dataclasses import replace

import pytest

from hf_fsdp_plugin.tools.profile.rank_profile import RankProfile, TimedCollective, Times
from hf_fsdp_plugin.tools.profile.run_profile import merge_ranks

PLAN = {
    "backend": "fsdp2", "strategy": "full_shard", "model": "M", "prefetch.forward": False, "prefetch.backward": "pre",
    "activation.checkpointing": "none",
}  # fmt: skip


def call(unit: str, kind: str, phase: str, arrived: float, end: float) -> TimedCollective:
    return TimedCollective(kind, unit, 0, phase, arrived, end, end - arrived, end - arrived)


def rank_profile(
    rank: int, calls: list[TimedCollective], *, device: str = "cuda", host: str = "a", **more
) -> RankProfile:
    facts = {
        "plan": PLAN, "forwards_per_step": 1, "batch": [2, 16],
        "units": {name: {"bytes": 8_000_000, "reduce_dtype": "bf16", "group": "0:1:2"} for name in ("a", "b")},
        **more.pop("facts", {}),
    }  # fmt: skip
    times = {"forward": Times(seconds=0.5, compute=0.3), "backward": Times(seconds=0.5, compute=0.3)}
    return RankProfile(
        rank=rank, world_size=2, host=host, device=device, num_steps=1,
        times=more.pop("times", times), calls=calls, units=more.pop("units", {}), facts=facts,
        profiled=more.pop("profiled", (1.0,)), unprofiled=more.pop("unprofiled", (0.9,)), **more,
    )  # fmt: skip


def test_late_rank_is_named_with_the_time_the_others_wait():
    early = rank_profile(0, [call("a", "all_gather", "forward", 0.10, 0.32)])
    late = rank_profile(1, [call("a", "all_gather", "forward", 0.30, 0.32)])
    run = merge_ranks([early, late])
    assert [(rank["rank"], rank["late_seconds"], rank["last_share"]) for rank in run["ranks"]] == [
        (0, pytest.approx(0), 0.0),
        (1, pytest.approx(0.2), 1.0),
    ]
    gather = run["units"][0]["gather_forward"]
    assert gather["exposed"] == pytest.approx(0.12)
    assert gather["transfer"] == pytest.approx(0.02)  # without the waiting for rank 1


def test_clock_of_another_host_does_not_make_a_rank_late():
    one = rank_profile(0, [call("a", "all_gather", "forward", 0.1, 0.2)])
    other = rank_profile(1, [call("a", "all_gather", "forward", 5.1, 5.2)], host="b")
    run = merge_ranks([one, other])
    assert max(rank["late_seconds"] for rank in run["ranks"]) == pytest.approx(0, abs=1e-6)


def test_overhead_is_the_difference_of_the_wall_clock_steps():
    overhead = merge_ranks([rank_profile(0, []), rank_profile(1, [])])["overhead"]
    assert overhead == {"profiled_seconds": 1.0, "unprofiled_seconds": 0.9, "seconds": pytest.approx(0.1)}
    assert merge_ranks([replace(rank_profile(0, []), unprofiled=())])["overhead"]["seconds"] is None


def test_no_ranks_have_no_profile():
    with pytest.raises(ValueError, match="no rank"):
        merge_ranks([])
