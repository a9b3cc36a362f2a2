"""What the recorder of fake tensors counts, against sums by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp  # registers the operators of FSDP2

from scripts.bench.traced_memory.private import FakeTensorMode, fake_tensor_group
from scripts.bench.traced_memory.recorder import Event, Recorder, ShardCopies

FLOAT, BF16 = 4, 2


def record(run: Callable[[], object]) -> list[Event]:
    recorder = Recorder(lambda: "here")
    with FakeTensorMode(), recorder:
        run()
        return recorder.finish()


def peak_and_rest(events: list[Event]) -> tuple[int, int]:
    """Return the largest number of bytes at any time, and the bytes at the end."""
    held = peak = 0
    for event in events:
        held += event.sign * event.block.size
        peak = max(peak, held)
    return peak, held


def test_step_of_a_linear_layer_equals_sum_by_hand():
    """Weight 6x4, input 2x4: forward keeps output and loss; backward needs the expanded gradient and the weight's."""

    def step() -> None:
        weight, inputs = torch.empty(6, 4, requires_grad=True), torch.empty(2, 4)
        loss = (inputs @ weight.T).square().sum()
        loss.backward()
        kept.append(weight)

    kept: list[torch.Tensor] = []
    weight, inputs, output = 24 * FLOAT, 8 * FLOAT, 12 * FLOAT
    forward = weight + inputs + 2 * output + FLOAT  # product, its square (freed after the sum), the loss
    events = record(step)
    assert events[0].block.size == weight
    # In backward of the square, grad * (2 * product**1): the power, twice the power, and the result.
    backward = weight + inputs + output + 2 * FLOAT + 3 * output
    peak, rest = peak_and_rest(events)
    assert peak == max(forward, backward)
    assert kept[0].grad is not None
    assert rest == 2 * weight


def test_gradients_of_two_branches_are_added_in_place():
    def step() -> None:
        x = torch.empty(1000, requires_grad=True)
        hidden = x * 2
        loss = (hidden * 3 + hidden * 5).sum()
        del hidden
        loss.backward()

    # Backward: gradients of both products. A sum out of place would be a third tensor.
    peak, _ = peak_and_rest(record(step))
    forward = 4 * 1000 * FLOAT  # x, hidden, and two products; one is replaced by the sum
    assert peak == forward + 1000 * FLOAT


@pytest.mark.parametrize(("left", "right", "scratch"), [(BF16, FLOAT, FLOAT), (FLOAT, FLOAT, 0), (BF16, BF16, 0)])
def test_operands_of_other_dtypes_are_cast_to_temporaries(left: int, right: int, scratch: int):
    dtypes = {BF16: torch.bfloat16, FLOAT: torch.float32}

    def multiply() -> None:
        one, other = torch.empty(100, dtype=dtypes[left]), torch.empty(100, dtype=dtypes[right])
        one * other

    peak, rest = peak_and_rest(record(multiply))
    assert peak == 100 * (left + right + max(left, right) + scratch)
    assert rest == 0


def test_copy_to_reduce_scatter_pads_uneven_gradients():
    def copy() -> None:
        even, uneven, out = torch.empty(6, 2), torch.empty(4, 2), torch.empty(3, 8)
        torch.ops.fsdp.chunk_cat([even], 0, 3, out=torch.empty(3, 4))
        torch.ops.fsdp.chunk_cat([even, uneven], 0, 3, out=out)

    kernels = [event.block.size for event in record(copy) if event.sign > 0]
    assert kernels[-1] == 6 * 2 * FLOAT  # 4 rows are padded to 6
    assert len(kernels) == 5  # four tensors, and the padded one


def test_resized_storage_is_gathered_memory():
    tensor = []

    def resize() -> None:
        tensor.append(torch.empty(10))
        tensor[0].untyped_storage().resize_(0)
        tensor[0].untyped_storage().resize_(400)

    first, freed, grown = record(resize)
    assert (first.block.size, freed.sign, grown.block.size, grown.block.label) == (40, -1, 400, "gathered")


def test_memory_moves_to_the_host_and_stays_there():
    recorder = Recorder(lambda: "here")
    with FakeTensorMode(), recorder:
        gradient = torch.empty(10)
        recorder.move_to_host([gradient, None])
        recorder.move_to_host([gradient])
        recorder.label([gradient], "grads")
        events = list(recorder.finish())
    assert [(event.sign, event.block.label) for event in events] == [(1, None), (1, "host"), (-1, None)]


def test_held_copies_are_freed_at_the_end():
    recorder = Recorder(lambda: "here")
    with FakeTensorMode(), recorder, recorder.hold(100):
        torch.empty(10)
    assert peak_and_rest(recorder.finish()) == (140, 0)


@pytest.mark.parametrize("copies", ["none", "until_gathered", "while_gathered"])
def test_offloaded_shards_are_copied_to_be_gathered(copies: ShardCopies):
    recorder = Recorder(lambda: "here", on_cpu=False, shard_copies=copies)
    with fake_tensor_group(2), FakeTensorMode(), recorder:
        shard, whole = torch.empty(10), torch.empty(20)
        recorder.label([shard], "params")
        dist.all_gather(list(whole.chunk(2)), shard)
        held = peak_and_rest(recorder.events)
        whole.untyped_storage().resize_(0)
        freed = peak_and_rest(recorder.finish())
    assert held == {"none": (120, 120), "until_gathered": (160, 120), "while_gathered": (160, 160)}[copies]
    assert freed[1] == 40


def test_views_and_results_in_place_need_no_memory():
    def work() -> None:
        tensor = torch.empty(8)
        tensor.view(2, 4)[0].add_(1)

    assert peak_and_rest(record(work)) == (32, 0)
