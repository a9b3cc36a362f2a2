"""Problems of a run that belong to no setting."""

import pytest
from torch import nn

from hf_fsdp_plugin.observe.first_step import FirstStep
from hf_fsdp_plugin.observe.report import difference_lines
from hf_fsdp_plugin.observe.run_checks import check_training
from hf_fsdp_plugin.observe.units import StructureComparison
from tests.unit.observe.live_models import make_run


def codes(
    *, frozen: tuple[str, ...] = (), changed: int | None = 3, batches: str = "", steps: int = 2, prepared: bool = True
) -> list[str]:
    first_step = FirstStep(num_steps=steps, num_backwards=2)
    for number in batches:
        first_step.batch_sizes.add(int(number))
    trained = None if changed is None else 4
    training = {"steps": steps, "changed_parameters": changed, "trained_parameters": trained}
    run = make_run(model=nn.Linear(1, 1), first_step=first_step, structure=StructureComparison(frozen=frozen))
    problems = check_training(run, training, prepared=prepared)
    return [problem.code for problem in problems]


@pytest.mark.parametrize(("changed", "expected"), [(0, ["FSDP-E510"]), (1, []), (None, [])])
def test_steps_must_change_weights_of_some_rank(changed: int | None, expected: list[str]) -> None:
    assert codes(changed=changed) == expected


def test_backwards_need_a_step_of_a_prepared_optimizer() -> None:
    assert codes(steps=0, changed=None) == ["FSDP-E515"]
    assert codes(steps=0, changed=None, prepared=False) == []


def test_frozen_parameters_and_changed_batches_are_warnings() -> None:
    assert codes(frozen=("0.weight",)) == ["FSDP-W511"]
    assert codes(batches="44442222") == ["FSDP-W512"]
    assert codes(batches="44424442") == []


def test_warnings_of_the_run_are_in_the_summary() -> None:
    run = make_run(structure=StructureComparison(frozen=("0.weight",)))
    problems = check_training(run, {"steps": 0, "changed_parameters": None, "trained_parameters": None}, prepared=True)
    [line] = difference_lines([], problems)
    assert line.startswith("WARNING") and "FSDP-W511" in line
