"""Several ranks together, and the suggestions, computed from made-up ranks with known answers."""

from dataclasses import replace

import pytest

from hf_fsdp_plugin.tools.profile.rank_profile import RankProfile, TimedCollective, Times, UnitSeconds
from hf_fsdp_plugin.tools.profile.run_profile import merge_ranks, suggest

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


def both(calls: list[TimedCollective], **more) -> dict[str, float]:
    more = {"unprofiled": (1.0,), **more}
    ranks = [rank_profile(0, calls, **more), rank_profile(1, calls, **more)]
    return {each.setting: each.seconds for each in suggest(merge_ranks(ranks), ranks[0].facts)}


def test_forward_prefetch_hides_at_most_the_preceding_unit():
    calls = [call("a", "all_gather", "forward", 0.0, 0.1), call("b", "all_gather", "forward", 0.2, 0.3)]
    units = {"a": UnitSeconds(forward=0.04), "b": UnitSeconds(forward=0.5)}
    assert both(calls, units=units)["prefetch.forward"] == pytest.approx(0.04)
    assert "prefetch.forward" not in both(calls, units=units, device="cpu")  # gloo blocks the thread
    enabled = {"plan": PLAN | {"prefetch.forward": True}}
    assert "prefetch.forward" not in both(calls, units=units, facts=enabled)


def test_backward_prefetch_is_suggested_if_it_is_off():
    calls = [call("b", "all_gather", "backward", 0.5, 0.6), call("a", "all_gather", "backward", 0.7, 0.8)]
    facts = {"plan": PLAN | {"prefetch.backward": "none", "strategy": "shard_grad_op"}}
    assert both(calls, facts=facts)["prefetch.backward"] == pytest.approx(0.1)
    assert "prefetch.backward" not in both(calls)


def test_gathers_in_backward_can_be_saved_for_memory():
    calls = [call("a", "all_gather", "backward", 0.5, 0.6)]
    assert both(calls)["sharding.strategy"] == pytest.approx(0.1)
    rank = rank_profile(0, calls, unprofiled=(1.0,))
    (suggestion,) = suggest(merge_ranks([rank]), rank.facts)
    assert suggestion.more_bytes == 8_000_000 and "more memory" in str(suggestion)


def test_reduction_in_bf16_halves_its_time_on_devices():
    calls = [call("a", "reduce_scatter", "backward", 0.5, 0.6)]
    facts = {"units": {"a": {"bytes": 8, "reduce_dtype": "fp32"}}}
    assert both(calls, facts=facts)["precision.reduce"] == pytest.approx(0.05)
    assert "precision.reduce" not in both(calls) and "precision.reduce" not in both(calls, facts=facts, device="cpu")


def test_reduction_of_each_micro_batch_is_found_by_its_calls():
    once = [call("a", "reduce_scatter", "backward", 0.5, 0.6)]
    each = [*once, call("a", "reduce_scatter", "backward", 0.7, 0.8)]
    facts = {"forwards_per_step": 2}
    assert both(each, facts=facts)["training.sync_each_batch"] == pytest.approx(0.1)
    assert "training.sync_each_batch" not in both(once, facts=facts)


def test_larger_micro_batch_halves_the_gathers():
    calls = [call("a", "all_gather", "forward", at, at + 0.1) for at in (0.0, 0.4)]
    assert both(calls, facts={"forwards_per_step": 2})["training.per_device_train_batch_size"] == pytest.approx(0.1)
    assert "training.per_device_train_batch_size" not in both(calls)


def test_promise_is_a_part_of_the_step_without_the_profiler():
    data = {"times": {"data": Times(seconds=0.4)}}
    assert both([], profiled=(2.0,), unprofiled=(1.0,), **data) == {
        "training.dataloader_num_workers": pytest.approx(0.2)
    }
    assert both([], profiled=(1.0,), unprofiled=(1.1,), **data) == {
        "training.dataloader_num_workers": pytest.approx(0.4)
    }


def test_recomputation_and_data_loading_have_their_seconds():
    times = {"data": Times(seconds=0.2), "backward": Times(seconds=0.5), "forward": Times(seconds=0.3)}
    found = both([], times=times, units={"a": UnitSeconds(recomputed=0.15)})
    assert found == {"training.dataloader_num_workers": 0.2, "activation.checkpointing": pytest.approx(0.15)}


def test_gain_below_a_hundredth_of_a_step_is_not_suggested():
    assert both([call("a", "all_gather", "backward", 0.5, 0.505)]) == {}


def test_no_ranks_have_no_profile():
    with pytest.raises(ValueError, match="no rank"):
        merge_ranks([])
