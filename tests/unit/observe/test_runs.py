"""A number that is constant, except for single exceptions, has one value."""

import pytest

from hf_fsdp_plugin.observe.first_step import StableValues


@pytest.mark.parametrize(
    ("numbers", "values"),
    [
        ([4] * 9, [4]),
        ([4, 4, 4, 1] * 3, [4]),
        ([4, 4, 4, 2, 2, 2, 4, 4, 4], [4, 2]),
        ([3, 1, 4, 1, 5, 9], []),
        ([number for number in range(20) for _ in range(3)], list(range(8))),
    ],
)
def test_runs_have_the_values_of_three_equal_numbers(numbers: list[int], values: list[int]) -> None:
    runs = StableValues()
    for number in numbers:
        runs.add(number)
    assert runs.values == values
