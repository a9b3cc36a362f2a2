"""Problems of a run that belong to no setting."""

from collections import Counter

import pytest
from torch import nn

from hf_fsdp_plugin.observe.first_step import FirstStep
from hf_fsdp_plugin.observe.report import BatchShape, difference_lines
from hf_fsdp_plugin.observe.report_builder import batch_of_ranks, check_training, observed_batch
from tests.unit.observe.live_models import make_run


def codes(*, changed: int | None = 3, steps: int = 2, prepared: bool = True) -> list[str]:
    first_step = FirstStep(num_steps=steps, num_forwards=2, has_rate=True)
    trained = None if changed is None else 4
    training = {"steps": steps, "changed_parameters": changed, "trained_parameters": trained}
    run = make_run(model=nn.Linear(1, 1), first_step=first_step)
    return [problem.code for problem in check_training(run, training, prepared=prepared)]


@pytest.mark.parametrize(("changed", "expected"), [(0, ["FSDP-E510"]), (1, []), (None, [])])
def test_steps_must_change_weights_of_some_rank(changed: int | None, expected: list[str]) -> None:
    assert codes(changed=changed) == expected


def test_forwards_need_a_step_of_a_prepared_optimizer() -> None:
    assert codes(steps=0, changed=None) == ["FSDP-E515"]
    assert codes(steps=0, changed=None, prepared=False) == []


BATCH = BatchShape(per_device=4, accumulation=2)


@pytest.mark.parametrize(
    ("rows", "forwards", "expected"),
    [
        ({4: 16}, {2: 8}, BATCH),
        ({2: 16}, {2: 8}, BatchShape(per_device=2, accumulation=2)),
        ({4: 16}, {1: 16}, BatchShape(per_device=4)),
        ({4: 15, 1: 1}, {2: 7, 1: 1}, BATCH),  # the end of an epoch
        ({2: 8, 4: 8}, {2: 8}, BATCH),  # no usual number
    ],
)
def test_smaller_batches_are_observed(rows: dict[int, int], forwards: dict[int, int], expected: BatchShape) -> None:
    first_step = FirstStep(batch_sizes=Counter(rows), accumulation=Counter(forwards))
    assert observed_batch(BATCH, first_step) == expected


def test_warnings_of_the_run_are_in_the_summary() -> None:
    _, problems = batch_of_ranks([(BATCH, BatchShape(per_device=2))], 1)
    [line] = difference_lines([], problems)
    assert line.startswith("WARNING") and "FSDP-W512" in line
