"""Problems of a run that belong to no setting."""

import pytest

from hf_fsdp_plugin.observe.first_step import FirstStep
from hf_fsdp_plugin.observe.structure import StructureComparison
from hf_fsdp_plugin.observe.tables import difference_lines
from hf_fsdp_plugin.observe.training_checks import check_training


def codes(*, frozen: tuple[str, ...] = (), changed: tuple[bool | None, ...] = (True,), batches: str = "") -> list[str]:
    first_step = FirstStep(num_steps=2)
    for number in batches:
        first_step.batch_sizes.add(int(number))
    return [problem.code for problem in check_training(first_step, StructureComparison(frozen=frozen), changed)]


@pytest.mark.parametrize(
    ("changed", "expected"),
    [((False, False), ["FSDP-E510"]), ((False, True), []), ((None, False), ["FSDP-E510"]), ((None, None), [])],
)
def test_steps_must_change_weights_of_some_rank(changed: tuple[bool | None, ...], expected: list[str]) -> None:
    assert codes(changed=changed) == expected


def test_frozen_parameters_and_changed_batches_are_warnings() -> None:
    assert codes(frozen=("0.weight",)) == ["FSDP-W511"]
    assert codes(batches="44442222") == ["FSDP-W512"]
    assert codes(batches="44424442") == []


def test_warnings_of_the_run_are_in_the_summary() -> None:
    problems = check_training(FirstStep(), StructureComparison(frozen=("0.weight",)), [True])
    [line] = difference_lines([], problems)
    assert line.startswith("WARNING") and "FSDP-W511" in line
