"""Data loaders that give the ranks different numbers of batches are reported."""

from __future__ import annotations

from typing import Any

import pytest
from accelerate.data_loader import prepare_data_loader
from torch.utils.data import DataLoader

from hf_fsdp_plugin.integrations.accelerate.batches import check_even_batches


def prepared(num_samples: int, *, rank: int = 0, even_batches: bool = False, **loading: Any) -> Any:
    """The loader of one of four ranks. Each batch of the dataset has two samples."""
    loader = DataLoader(range(num_samples), batch_size=2, **loading)  # type: ignore[arg-type]
    return prepare_data_loader(loader, num_processes=4, process_index=rank, even_batches=even_batches)


@pytest.mark.parametrize(
    ("num_samples", "message"),
    [(26, "rank 0 has 4 batches, the others 3."), (28, "the first 2 ranks have 4 batches, the others 3.")],
)
def test_different_numbers_of_batches_are_reported(num_samples: int, message: str) -> None:
    problem = check_even_batches(prepared(num_samples))
    assert problem is not None and problem.code == "FSDP-W690" and message in problem.message
    lengths = [len(list(prepared(num_samples, rank=rank))) for rank in range(4)]
    assert (max(lengths), min(lengths)) == (4, 3)


@pytest.mark.parametrize(
    ("num_samples", "arguments"),
    [(24, {}), (26, {"even_batches": True}), (26, {"drop_last": True})],
    ids=["divisible", "even", "dropped"],
)
def test_equal_numbers_of_batches_are_not_reported(num_samples: int, arguments: dict[str, Any]) -> None:
    assert check_even_batches(prepared(num_samples, **arguments)) is None
    assert len({len(list(prepared(num_samples, rank=rank, **arguments))) for rank in range(4)}) == 1


def test_other_objects_are_not_reported() -> None:
    assert check_even_batches(DataLoader(range(3))) is None  # type: ignore[arg-type]
    assert check_even_batches(object()) is None
