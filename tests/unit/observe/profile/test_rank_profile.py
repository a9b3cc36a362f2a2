"""The profile of a rank, computed from made-up intervals with known answers."""

import json
from dataclasses import replace

import pytest

from hf_fsdp_plugin.estimate.results import Moment
from hf_fsdp_plugin.observe.profile.activity import DeviceClock, on_device, read_boundaries, read_steps
from hf_fsdp_plugin.observe.profile.rank_profile import RankProfile, canonical_units, profile_of
from hf_fsdp_plugin.observe.profile.trace import (
    BOUNDARY,
    GATHER,
    UNIT,
    WAIT,
    Event,
    Issue,
    Kernel,
    Trace,
    Work,
)

MAIN, GLOO = 1, 2
RANK = {"rank": 0, "world_size": 2, "host": "a", "device": "cpu"}


def cpu_trace() -> Trace:
    """Two steps of 100 s each. Step: data 0-10, forward 10-40, loss 40-45, backward 45-80, optimizer 85-100."""
    trace = Trace()
    for step in (0, 100):
        trace.marks += [
            Event(step + 0, step + 10, MAIN, name="enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"),
            Event(step + 10, step + 40, MAIN, name="hf_fsdp::forward"),
            Event(step + 11, step + 20, MAIN, name=f"{GATHER}layers.0"),
            Event(step + 13, step + 19, MAIN, name=WAIT),
            Event(step + 10, step + 40, MAIN, name=f"{UNIT}layers.0"),
            Event(step + 45, step + 80, MAIN, name="hf_fsdp::backward"),
            Event(step + 46, step + 56, MAIN, name=f"{UNIT}layers.0"),
            Event(step + 71, step + 79, MAIN, name=WAIT),
            Event(step + 85, step + 100, MAIN, name="Optimizer.step#AdamW.step"),
            Event(step + 100, step + 100, MAIN, name=BOUNDARY),
        ]
        trace.ops += [
            Event(step + 20, step + 38, MAIN, name="aten::addmm"),
            Event(step + 46, step + 70, MAIN, name="aten::mul"),
            Event(step + 50, step + 60, MAIN, name="aten::mul"),
            Event(step + 86, step + 96, MAIN, name="aten::_foreach_add_"),
        ]
        trace.issues += [
            Issue(step + 12, step + 13, MAIN, kind="all_gather", elements=1000),
            Issue(step + 70, step + 71, MAIN, kind="reduce_scatter", elements=500, item_bytes=4),
        ]
        trace.works += [
            Work(step + 12.5, step + 18, GLOO, item_bytes=2),
            Work(step + 72, step + 78, GLOO, item_bytes=4),
        ]
    trace.marks.append(Event(0, 0, MAIN, name=BOUNDARY))
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


def test_calls_have_unit_phase_bytes_and_exposed_part():
    profile = profile_of(cpu_trace(), **RANK)
    gather, reduce = [call for call in profile.calls if call.step == 1]
    assert (gather.kind, gather.unit, gather.phase, gather.bytes) == ("all_gather", "layers.0", "forward", 2000)
    assert (reduce.kind, reduce.unit, reduce.phase, reduce.bytes) == ("reduce_scatter", None, "backward", 2000)
    assert (gather.exposed, reduce.exposed) == pytest.approx((7, 9))
    assert (gather.issued, gather.start, gather.end) == pytest.approx((112, 112.5, 118))


def test_unit_inside_backward_is_recomputed():
    unit = profile_of(cpu_trace(), **RANK).units["layers.0"]
    assert (unit.forward, unit.recomputed) == pytest.approx((23, 10))


def test_warmup_steps_are_skipped_unless_there_are_no_others():
    assert profile_of(cpu_trace(), **RANK, skip=1).num_steps == 1
    assert profile_of(cpu_trace(), **RANK, skip=1).began == pytest.approx(100)
    assert profile_of(cpu_trace(), **RANK, skip=5).num_steps == 1
    assert profile_of(cpu_trace(), **RANK, skip=0, most=1).num_steps == 1


def test_trace_without_a_complete_step_has_no_profile():
    trace = cpu_trace()
    trace.marks = [mark for mark in trace.marks if mark.name != BOUNDARY or mark.start == 0]
    assert profile_of(trace, **RANK) is None


def test_profile_survives_its_file():
    profile = profile_of(cpu_trace(), **RANK)
    moment = Moment(where="forward", bytes_by_kind={"params": 1}, seconds=0.5)
    profile = replace(profile, memory=(moment,), profiled=[1.0], unprofiled=[])
    assert RankProfile.from_json(json.loads(json.dumps(profile.to_json()))) == profile


def test_names_of_units_are_those_of_the_model():
    """FSDP2 joins the modules of a unit by commas; gloo gathers FSDP1's units into lists, without their whole size."""
    profile = profile_of(cpu_trace(), **RANK)
    calls = [replace(call, unit="_orig_mod.norm, head", bytes=1000) for call in profile.calls[:1]]
    memory = [Moment(where=where, bytes_by_kind={}) for where in ("forward of norm, head", "optimizer")]
    named = canonical_units(replace(profile, calls=calls, memory=memory), ["norm + head"], {"norm + head": 4})
    assert [(call.unit, call.bytes) for call in named.calls] == [("norm + head", 4000)]
    assert [moment.where for moment in named.memory] == ["forward of norm + head", "optimizer"]


def device_trace() -> Trace:
    """One step of 100 s. The device runs behind the CPU, which has launched everything after 40 s."""
    return Trace(
        marks=[
            Event(0, 0, MAIN, name=BOUNDARY),
            Event(0, 20, MAIN, name="hf_fsdp::forward"),
            Event(1, 3, MAIN, name="FSDP::all_gather (layers.0)"),
            Event(20, 35, MAIN, name="hf_fsdp::backward"),
            Event(35, 40, MAIN, name="Optimizer.step#AdamW.step"),
            Event(40, 40, MAIN, name=BOUNDARY),
        ],
        kernels=[
            Kernel("ncclDevKernel_AllGather_RING_LL", 2, 12, 2, "all_gather", False, 64),
            Kernel("gemm", 12, 40, 4),
            Kernel("gemm", 40, 80, 21),
            Kernel("ncclDevKernel_ReduceScatter_RING_LL", 70, 90, 22, "reduce_scatter", False, 64),
            Kernel("adam", 90, 100, 36),
        ],
    )


def test_phases_of_a_device_follow_its_kernels():
    profile = profile_of(device_trace(), **(RANK | {"device": "cuda"}))
    trace = device_trace()
    (step,) = read_steps(trace, read_boundaries(trace))
    segments = [(s.phase, s.start, s.end) for s in on_device(step, DeviceClock(trace))]
    assert segments == [("forward", 0, 40), ("backward", 40, 90), ("optimizer", 90, 100)]
    forward, backward = profile.times["forward"], profile.times["backward"]
    assert (forward.compute, forward.communication, forward.exposed, forward.idle) == (28, 10, 10, 2)
    assert (backward.compute, backward.communication, backward.exposed) == (40, 20, 10)
    gather, reduce = profile.calls
    assert (gather.unit, gather.phase, gather.exposed) == ("layers.0", "forward", 10)
    assert (reduce.unit, reduce.phase, reduce.exposed) == (None, "backward", 10)
