"""The profile of a rank, computed from made-up intervals with known answers."""

import json
from dataclasses import asdict, replace

import pytest

from hf_fsdp_plugin.tools.profile.rank_profile import (
    BOUNDARY,
    GATHER,
    UNIT,
    WAIT,
    Event,
    RankProfile,
    Trace,
    profile_of,
)

MAIN = 1
RANK = {"rank": 0, "world_size": 2, "host": "a", "device": "cpu"}


def cpu_trace() -> Trace:
    """Two steps of 100 s each. Step: data 0-10, forward 10-40, loss 40-45, backward 45-80, optimizer 85-100."""
    trace = Trace()
    for step in (0, 100):
        trace.marks += [
            Event("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", step + 0, step + 10, MAIN),
            Event("hf_fsdp::forward", step + 10, step + 40, MAIN),
            Event(f"{GATHER}layers.0", step + 11, step + 20, MAIN),
            Event(WAIT, step + 13, step + 19, MAIN),
            Event(f"{UNIT}layers.0", step + 10, step + 40, MAIN),
            Event("hf_fsdp::backward", step + 45, step + 80, MAIN),
            Event(f"{UNIT}layers.0", step + 46, step + 56, MAIN),
            Event(WAIT, step + 71, step + 79, MAIN),
            Event("Optimizer.step#AdamW.step", step + 85, step + 100, MAIN),
            Event(BOUNDARY, step + 100, step + 100, MAIN),
        ]
        trace.ops += [
            Event("aten::addmm", step + 20, step + 38, MAIN),
            Event("aten::mul", step + 46, step + 70, MAIN),
            Event("aten::mul", step + 50, step + 60, MAIN),
            Event("aten::_foreach_add_", step + 86, step + 96, MAIN),
        ]
        trace.issues += [
            Event("c10d::_allgather_base_", step + 12, step + 13, MAIN),
            Event("c10d::_reduce_scatter_base_", step + 70, step + 71, MAIN),
        ]
    trace.marks.append(Event(BOUNDARY, 0, 0, MAIN))
    trace.marks.sort(key=lambda mark: mark.start)
    return trace


def test_phases_of_a_cpu_rank_have_known_times():
    profile = profile_of(cpu_trace(), **RANK)
    seconds = {phase: times.seconds for phase, times in profile.times.items()}
    assert seconds == pytest.approx({"data": 10, "forward": 35, "backward": 35, "other": 5, "optimizer": 15})
    forward, backward = profile.times["forward"], profile.times["backward"]
    assert (forward.compute, forward.communication, forward.exposed) == pytest.approx((18, 7, 7))
    assert (backward.compute, backward.communication, backward.exposed) == pytest.approx((24, 9, 9))
    assert forward.idle == pytest.approx(10)
    assert profile.total.seconds == pytest.approx(100)


def test_calls_have_unit_phase_and_exposed_part():
    profile = profile_of(cpu_trace(), **RANK)
    gather, reduce = [call for call in profile.calls if call.step == 1]
    assert (gather.kind, gather.unit, gather.phase) == ("all_gather", "layers.0", "forward")
    assert (reduce.kind, reduce.unit, reduce.phase) == ("reduce_scatter", None, "backward")
    assert (gather.exposed, reduce.exposed) == pytest.approx((7, 9))
    assert (gather.arrived, gather.seconds, gather.end) == pytest.approx((112, 7, 119))


def test_unit_inside_backward_is_recomputed():
    unit = profile_of(cpu_trace(), **RANK).units["layers.0"]
    assert (unit.forward, unit.recomputed) == pytest.approx((23, 10))


def test_warmup_steps_are_skipped_unless_there_are_no_others():
    assert profile_of(cpu_trace(), **RANK, skip=1).num_steps == 1
    assert min(call.arrived for call in profile_of(cpu_trace(), **RANK, skip=1).calls) > 100
    assert profile_of(cpu_trace(), **RANK, skip=5).num_steps == 1
    assert profile_of(cpu_trace(), **RANK, skip=0, most=1).num_steps == 1


def test_trace_without_a_complete_step_has_no_profile():
    trace = cpu_trace()
    trace.marks = [mark for mark in trace.marks if mark.name != BOUNDARY or mark.start == 0]
    assert profile_of(trace, **RANK).num_steps == 0


def test_profile_survives_its_file():
    profile = profile_of(cpu_trace(), **RANK)
    profile = replace(profile, profiled=[1.0], unprofiled=[])
    assert RankProfile.from_json(json.loads(json.dumps(asdict(profile)))) == profile


def test_names_of_units_are_those_of_the_model():
    """FSDP2 joins the modules of a unit by commas, and has names of wrappers in them."""
    trace = cpu_trace()
    trace.marks = [
        replace(mark, name="FSDP::all_gather (_orig_mod.norm, head)") if mark.name.startswith(GATHER) else mark
        for mark in trace.marks
    ]
    calls = profile_of(trace, **RANK, unit_names=["", "norm + head"]).calls
    assert {call.unit for call in calls if call.kind == "all_gather"} == {"norm + head"}


def device_trace() -> Trace:
    """One step of 100 s. The device runs behind the CPU, which has launched everything after 40 s."""
    return Trace(
        marks=[
            Event(BOUNDARY, 0, 0, MAIN),
            Event("hf_fsdp::forward", 0, 20, MAIN),
            Event("FSDP::all_gather (layers.0)", 1, 3, MAIN),
            Event("hf_fsdp::backward", 20, 35, MAIN),
            Event("Optimizer.step#AdamW.step", 35, 40, MAIN),
            Event(BOUNDARY, 40, 40, MAIN),
        ],
        kernels=[
            Event("ncclDevKernel_AllGather_RING_LL", 2, 12, launched=2),
            Event("gemm", 12, 40, launched=4),
            Event("gemm", 40, 80, launched=21),
            Event("ncclDevKernel_ReduceScatter_RING_LL", 70, 90, launched=22),
            Event("adam", 90, 100, launched=36),
        ],
    )


def test_phases_of_a_device_follow_its_kernels():
    profile = profile_of(device_trace(), **(RANK | {"device": "cuda"}))
    seconds = {phase: times.seconds for phase, times in profile.times.items()}
    assert seconds == {"forward": 40, "backward": 50, "optimizer": 10}
    forward, backward = profile.times["forward"], profile.times["backward"]
    assert (forward.compute, forward.communication, forward.exposed, forward.idle) == (28, 10, 10, 2)
    assert (backward.compute, backward.communication, backward.exposed) == (40, 20, 10)
    gather, reduce = profile.calls
    assert (gather.unit, gather.phase, gather.exposed) == ("layers.0", "forward", 10)
    assert (reduce.unit, reduce.phase, reduce.exposed) == (None, "backward", 10)
