"""The diagnosis of hangs from made-up records: which rank is late or differs, and in which collective."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import pytest

from hf_fsdp_plugin.hangs.calls import ARRIVALS, POINT_TO_POINT, Call, Counts, GroupCalls, RankCalls, Wait
from hf_fsdp_plugin.hangs.hang_cause import compare_calls, diagnose_hang
from hf_fsdp_plugin.hangs.hang_texts import describe_busy, describe_standstill, hang_problem
from hf_fsdp_plugin.hangs.hang_watch import has_worked
from hf_fsdp_plugin.hangs.watch_files import ProcessorUse

GROUP = "0 of ranks 0-3"
LIMIT = 4.0


def gather(layer: int, num_elements: int = 64) -> Call:
    return Call("all-gather", num_elements, "float32", f"layers.{layer}")


STEP = tuple(gather(layer) for layer in range(6)) + tuple(Call("reduce-scatter", 128, "float32", "x") for _ in range(6))


def rank_calls(
    rank: int, calls: Sequence[Call], *, last: int = 0, waits: float = 0.0, world_size: int = 4, group: str = GROUP
) -> RankCalls:
    """Return a rank that has made calls, and waits in the last one."""
    last = last or len(calls)
    wait = Wait(group, last, calls[-1], waits) if waits else None
    written = group.partition(" of ranks ")[2]
    ranks = tuple(map(int, written.split(","))) if "," in written else tuple(range(world_size))
    groups = {group: GroupCalls(ranks, last, tuple(calls))} if calls else {}
    return RankCalls(rank=rank, groups=groups, wait=wait, idle=waits or 60.0, place=f"at line {rank}")


def others_wait(late: RankCalls, *, seconds: float = 5.0) -> list[RankCalls]:
    return [rank_calls(rank, STEP, waits=seconds) for rank in range(4) if rank != late.rank] + [late]


def test_late_rank_and_the_unit_that_others_wait_for_are_named() -> None:
    late = rank_calls(2, STEP[:5])
    found = diagnose_hang(others_wait(late), limit=LIMIT)
    assert found is not None and (found.kind, found.ranks) == ("late", (2,))
    assert found.waiting.ranks == (0, 1, 3) and found.waiting.call == STEP[-1]
    problem = hang_problem(found)
    assert problem.code == "FSDP-E728"
    assert (
        "rank 2 is late" in problem.message and "at line 2" in problem.message and "reduce-scatter" in problem.message
    )


def test_rank_without_any_collective_is_late() -> None:
    found = diagnose_hang(others_wait(RankCalls(rank=1)), limit=LIMIT)
    assert found is not None and found.ranks == (1,)


@pytest.mark.parametrize("seconds", [0.0, 3.9])
def test_wait_below_the_limit_is_no_hang(seconds: float) -> None:
    assert diagnose_hang(others_wait(rank_calls(2, STEP[:5]), seconds=seconds), limit=LIMIT) is None


@pytest.mark.parametrize("state", ["halted", "exited", "unreachable", "ended"])
def test_state_of_the_late_rank_is_in_the_message(state: str) -> None:
    late = replace(rank_calls(2, STEP[:5]), state=state, detail="machine 1")
    known = others_wait(late)
    found = diagnose_hang(known, limit=LIMIT)
    assert found is not None and found.ranks == (2,)
    text = hang_problem(found).message
    words = {"halted": "SIGSTOP", "exited": "had exited", "unreachable": "does not answer", "ended": "had ended"}
    assert words[state] in text


def test_rank_that_was_stopped_inside_the_collective_is_named() -> None:
    halted = replace(rank_calls(2, STEP, waits=5.0), state="halted")
    found = diagnose_hang(others_wait(halted), limit=LIMIT)
    assert found is not None and (found.kind, found.ranks) == ("late", (2,))


def test_skipped_layer_is_found_although_sizes_are_equal() -> None:
    skips = (*STEP[:2], *STEP[3:])
    known = [rank_calls(rank, STEP, waits=5.0) for rank in (0, 1, 3)] + [rank_calls(2, skips, waits=5.0)]
    found = diagnose_hang(known, limit=LIMIT)
    assert found is not None and (found.kind, found.ranks) == ("different", (2,))
    assert found.difference is not None and found.difference.number == 3
    assert found.difference.reason == " Rank 2 left out all-gather of layers.2 (64 × fp32)."
    problem = hang_problem(found)
    assert problem.code == "FSDP-E729" and "Rank 2 left out all-gather of layers.2 (64 × fp32)" in problem.message


@pytest.mark.parametrize("skips", [0, 1])
def test_skipping_rank_of_two_is_found(skips: int) -> None:
    calls = {skips: (*STEP[:2], *STEP[4:]), 1 - skips: STEP}
    known = [rank_calls(rank, calls[rank], waits=5.0, group="0 of ranks 0,1") for rank in (0, 1)]
    found = diagnose_hang(known, limit=LIMIT)
    assert found is not None and found.difference is not None
    assert found.ranks == (skips,)
    assert found.difference.reason == f" Rank {skips} left out {gather(2)} and 1 more call."


@pytest.mark.parametrize("skips", [0, 1])
def test_earlier_steps_show_who_skipped_before_a_wait(skips: int) -> None:
    """The other rank waits for the second of the calls that were left out: it has made none that follows them."""
    past = (*STEP, *STEP[:2])
    calls = {1 - skips: (*past, *STEP[2:4]), skips: (*past, *STEP[4:6])}
    found = compare_calls([rank_calls(rank, calls[rank]) for rank in (0, 1)])
    assert found.endswith(f" Rank {skips} left out {gather(2)} and 1 more call.")


@pytest.mark.parametrize("skips", [0, 1])
def test_earlier_steps_show_who_skipped_before_a_failure(skips: int) -> None:
    """gloo ends the ranks at the first difference if the sizes differ, so that no later call can be compared."""
    past = (*STEP, *STEP[:2])
    calls = {1 - skips: (*past, STEP[2]), skips: (*past, STEP[4])}
    found = compare_calls([rank_calls(rank, calls[rank]) for rank in (0, 1)])
    assert found.endswith(f" Rank {skips} left out {gather(2)} and 1 more call.")


def two_ranks(calls: Sequence[Call], other: Sequence[Call], *forwards: int) -> list[RankCalls]:
    """Two ranks that wait in their last calls."""
    found = [rank_calls(rank, each, waits=5.0, group="0 of ranks 0,1") for rank, each in enumerate((calls, other))]
    counts = [Counts(2, count) for count in forwards] or [None, None]
    return [replace(rank, counts=each) for rank, each in zip(found, counts, strict=True)]


@pytest.mark.parametrize("past", [STEP * 3, ()], ids=["later", "first step"])
def test_rank_of_two_that_calls_the_model_alone_is_named(past: tuple[Call, ...]) -> None:
    """Its forward is mixed with that of the other rank, which then calls backward where it calls forward again."""
    known = two_ranks((*past, *STEP[:6], STEP[0]), (*past, *STEP[:7]), 6, 5)
    found = diagnose_hang(known, limit=LIMIT)
    assert found is not None and (found.kind, found.ranks) == ("different", (0,))
    text = hang_problem(found).message
    assert "Rank 0 had called the model 6 times, the others 5 times." in text and "left out" not in text


def test_rank_that_leaves_a_forward_out_is_named() -> None:
    alone = replace(rank_calls(2, STEP[:7], waits=5.0), counts=Counts(0, 1))
    calls = (*STEP[:6], STEP[0])
    known = [replace(rank_calls(rank, calls, waits=5.0), counts=Counts(0, 2)) for rank in (0, 1, 3)] + [alone]
    found = diagnose_hang(known, limit=LIMIT)
    assert found is not None and found.ranks == (2,)
    assert "Rank 2 had called the model once, the others twice." in hang_problem(found).message


@pytest.mark.parametrize("odd", [0, 1])
@pytest.mark.parametrize("call", [Call("barrier"), Call("all-gather", 1, "float32")])
def test_rank_of_two_with_an_unusual_call_is_named(odd: int, call: Call) -> None:
    calls = [(*STEP * 2, *STEP[:3])] * 2
    calls[odd] = (*STEP * 2, *STEP[:2], call)
    forwards = [3, 3]
    forwards[1 - odd] = 4  # the other rank has begun its next forward
    known = two_ranks(*calls, *forwards)
    found = diagnose_hang(known, limit=LIMIT)
    assert found is not None and found.ranks == (odd,)
    text = hang_problem(found).message
    assert f"In earlier steps, the call before was not followed by that of rank {odd}." in text


@pytest.mark.parametrize(("call", "forwards"), [(STEP[0], (1, 1)), (Call("barrier"), (2, 1))])
def test_both_are_named_if_nothing_decides(call: Call, forwards: tuple[int, int]) -> None:
    known = two_ranks(STEP[:7], (*STEP[:6], call), *forwards)
    found = diagnose_hang(known, limit=LIMIT)
    assert found is not None and found.ranks == (0, 1)


@pytest.mark.parametrize(
    "other",
    [
        gather(3)._replace(num_elements=65),
        gather(3)._replace(dtype="bfloat16"),
        gather(3)._replace(operation="all-reduce"),
        gather(3)._replace(unit="layers.4"),
    ],
)
def test_each_attribute_of_a_call_is_compared(other: Call) -> None:
    calls = (*STEP[:3], other, *STEP[4:])
    known = [rank_calls(rank, STEP, waits=5.0) for rank in range(3)] + [rank_calls(3, calls, waits=5.0)]
    found = diagnose_hang(known, limit=LIMIT)
    assert found is not None and found.ranks == (3,)
    assert found.difference is not None and [call for call, _ in found.difference.calls] == [gather(3), other]


def test_sizes_of_uneven_operations_are_not_compared() -> None:
    lists = [(*STEP, Call("all-gather (list)", 8 + rank, "int64")) for rank in range(4)]
    assert compare_calls(rank_calls(rank, lists[rank], waits=5.0) for rank in range(4)) == ""
    found = diagnose_hang([rank_calls(rank, lists[rank], waits=5.0) for rank in range(4)], limit=LIMIT)
    assert found is not None and (found.kind, found.ranks) == ("stuck", ())
    assert hang_problem(found).code == "FSDP-E731"


def test_dtypes_of_uneven_operations_are_compared() -> None:
    """A Trainer with fewer steps gathers its loss, while the other rank gathers the number of tokens of a batch."""
    dtypes = ["int64", "float32"]
    calls = [(*STEP, Call("all-gather (list)", 1, dtype)) for dtype in dtypes]
    text = compare_calls(rank_calls(rank, calls[rank], group="0 of ranks 0,1") for rank in range(2))
    assert "rank 0: all-gather (list) (1 × int64); rank 1: all-gather (list) (1 × fp32)" in text
    empty = [(*STEP, Call("all-to-all", size, dtype)) for size, dtype in ((4, "float32"), (0, ""))]
    assert compare_calls(rank_calls(rank, empty[rank], group="0 of ranks 0,1") for rank in range(2)) == ""


def test_cause_is_followed_through_groups() -> None:
    """Hybrid shard: ranks 2 and 3 wait for rank 1 in their shard group; rank 0 waits for rank 2 across replicas."""
    shard = {0: "1 of ranks 0,1", 1: "1 of ranks 0,1", 2: "2 of ranks 2,3", 3: "2 of ranks 2,3"}
    replicas = "3 of ranks 1,3"
    known = [
        rank_calls(0, STEP, waits=9.0, group=shard[0]),
        rank_calls(1, STEP[:-1], group=shard[1]),
        rank_calls(2, STEP, waits=8.0, group=shard[2]),
        rank_calls(3, STEP[:-1], group=shard[3]),
    ]
    waits_for_1 = Wait(replicas, 7, Call("all-reduce", 8, "float32"), 8.0)
    known[3] = replace(known[3], wait=waits_for_1, groups={**known[3].groups, replicas: GroupCalls((1, 3), 7)})
    found = diagnose_hang(sorted(known, key=lambda rank: -rank.rank), limit=LIMIT)
    assert found is not None and (found.kind, found.ranks) == ("late", (1,))
    assert len(found.others) == 2


def test_ranks_that_wait_for_each_other_are_a_circle() -> None:
    save = replace(
        rank_calls(0, STEP[:5]),
        wait=Wait(ARRIVALS, 1, Call("Accelerator.save_state"), 5.0),
    )
    save = replace(save, groups={**save.groups, ARRIVALS: GroupCalls((), 1, (Call("Accelerator.save_state"),))})
    known = [save, *(rank_calls(rank, STEP[:6], waits=5.0) for rank in (1, 2, 3))]
    found = diagnose_hang(known, limit=LIMIT)
    assert found is not None and (found.kind, found.ranks) == ("circle", (0, 1, 2, 3))
    problem = hang_problem(found)
    assert problem.code == "FSDP-E730" and "Accelerator.save_state" in problem.message and "layers.5" in problem.message


def test_peer_of_a_receive_is_late() -> None:
    receive = Wait(POINT_TO_POINT, 1, Call("recv from rank 3", peer=3), 5.0)
    known = [RankCalls(rank=0, wait=receive), *(rank_calls(rank, STEP) for rank in (1, 2, 3))]
    found = diagnose_hang(known, limit=LIMIT)
    assert found is not None and (found.kind, found.ranks) == ("late", (3,))


@pytest.mark.parametrize("is_busy", [False, True])
def test_late_rank_with_progress_is_busy(is_busy: bool) -> None:
    late = replace(rank_calls(2, STEP[:5]), is_busy=is_busy)
    found = diagnose_hang(others_wait(late), limit=LIMIT)
    assert found is not None and found.is_busy == is_busy
    problem = describe_busy(found, 540.0)
    assert problem.code == "FSDP-W732" and "540 s" in str(problem)


def enqueued(rank: int, calls: Sequence[Call], *, idle: float, enqueues: bool = True) -> RankCalls:
    group = GroupCalls((0, 1, 2, 3), len(calls), tuple(calls), enqueues)
    return RankCalls(rank=rank, groups={GROUP: group}, idle=idle)


def test_rank_behind_in_enqueued_collectives_is_late() -> None:
    known = [enqueued(rank, STEP, idle=9.0) for rank in range(3)] + [enqueued(3, STEP[:4], idle=10.0)]
    found = diagnose_hang(known, limit=LIMIT)
    assert found is not None and (found.kind, found.ranks) == ("late", (3,))
    assert found.waiting.call == STEP[4]
    assert diagnose_hang([replace(rank, idle=3.0) for rank in known], limit=LIMIT) is None


def test_rank_behind_that_does_not_enqueue_is_no_hang() -> None:
    """On CPU, a rank waits in each collective: one that is in none is loading data, and nobody waits for it."""
    known = [enqueued(rank, STEP, idle=9.0, enqueues=False) for rank in range(3)]
    assert diagnose_hang([*known, enqueued(3, STEP[:4], idle=9.0, enqueues=False)], limit=LIMIT) is None


def test_comparison_after_a_failure_names_who_had_begun() -> None:
    known = [rank_calls(0, STEP[:4]), rank_calls(1, STEP[:5]), rank_calls(2, STEP[:4]), rank_calls(3, STEP[:5])]
    assert compare_calls(known) == (
        "only ranks 1, 3 had begun all-gather of layers.4 (64 × fp32), number 5 of process group 0 of ranks 0-3."
    )
    assert compare_calls([rank_calls(rank, STEP) for rank in range(4)]) == ""


def test_thousand_ranks_take_seconds_and_name_one() -> None:
    world_size, group = 1024, "0 of ranks 0-1023"
    calls = [gather(number % 40) for number in range(512)]
    skips = [*calls[:300], *calls[301:], gather(511 % 40 + 1)]
    known = [
        rank_calls(rank, skips if rank == 517 else calls, last=90_000, waits=200.0, world_size=world_size, group=group)
        for rank in range(world_size)
    ]
    began = time.process_time()
    found = diagnose_hang(known, limit=120.0)
    assert time.process_time() - began < 20.0
    assert found is not None and (found.kind, found.ranks) == ("different", (517,))
    assert found.difference is not None
    assert found.difference.number == 90_000 - 511 + 300
    assert found.difference.reason == f" Rank 517 left out {calls[300]}."


def test_standstill_names_the_places() -> None:
    problem = describe_standstill([rank_calls(rank, STEP) for rank in range(2)], 600.0)
    assert problem.code == "FSDP-W733" and problem.severity == "warning"
    assert "rank 0 was at line 0; rank 1 was at line 1" in problem.message and "600 s" in problem.message


@pytest.mark.parametrize(
    ("cpu", "of_children", "faults", "on_cpu", "on_accelerator"),
    [
        (1.0, 0.0, 5, True, False),
        (1.4, 0.4, 5, True, True),
        (0.01, 0.0, 500, False, True),
        (0.01, 0.0, 5, False, False),
    ],
)
def test_own_cpu_time_is_no_progress_on_accelerator(
    cpu: float, of_children: float, faults: int, on_cpu: bool, on_accelerator: bool
) -> None:
    """A thread that waits for its GPU in a loop uses a core. Workers of a data loader do not wait for the GPU."""
    old, new = ProcessorUse(5.0, 1.0, 100), ProcessorUse(5.0 + cpu, 1.0 + of_children, 100 + faults)
    assert [has_worked(old, new, 1.0, each) for each in (False, True)] == [on_cpu, on_accelerator]
