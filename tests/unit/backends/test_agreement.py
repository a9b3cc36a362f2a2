"""Errors of one rank are raised on all ranks. The other rank is simulated."""

import hashlib
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from hf_fsdp_plugin.backends.ranks.agreement import on_all_ranks, same_on_all_ranks
from hf_fsdp_plugin.problems import CheckpointError, Problem, SpecError

PROBLEM = Problem(code="FSDP-E203", message="no ranks")


@pytest.fixture
def as_rank_0(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """``as_rank_0(other)``: this process is rank 0 of two, and rank 1 contributes ``other`` to every all-gather."""

    def simulate(other: Any) -> None:
        def all_gather_object(gathered: list[Any], own: Any) -> None:
            # Whether there is an error to exchange is asked first, with a list of flags.
            gathered[:] = [own, [other is not None] if isinstance(own, list) else other]

        monkeypatch.setattr(dist, "is_initialized", lambda: True)
        monkeypatch.setattr(dist, "get_world_size", lambda: 2)
        monkeypatch.setattr(dist, "all_gather_object", all_gather_object)

    return simulate


def test_equal_values_are_accepted(as_rank_0: Callable[[Any], None]):
    same_on_all_ranks("the plan", "a")  # without a process group
    as_rank_0(hashlib.sha256(b"a").hexdigest())
    same_on_all_ranks("the plan", "a")


def test_different_values_are_refused(as_rank_0: Callable[[Any], None]):
    as_rank_0(hashlib.sha256(b"b").hexdigest())
    with pytest.raises(SpecError, match=r"rank 0: 1\..*FSDP-E302"):
        same_on_all_ranks("the plan", "a")


def test_long_values_are_compared_by_their_hash(as_rank_0: Callable[[Any], None]):
    as_rank_0(hashlib.sha256(b"a" * 1000).hexdigest())
    with pytest.raises(SpecError, match="FSDP-E302"):
        same_on_all_ranks("the plan", "b" * 1000)
    as_rank_0(hashlib.sha256(b"b" * 1000).hexdigest())
    same_on_all_ranks("the plan", "b" * 1000)


def test_successful_block_raises_nothing(as_rank_0: Callable[[Any], None]):
    as_rank_0(None)
    with on_all_ranks("reading"):
        pass


@pytest.mark.parametrize(
    ("other", "error", "code"),
    [
        (("OSError", "disk full", ()), SpecError, "FSDP-E303"),
        (("CheckpointError", "", (PROBLEM,)), CheckpointError, PROBLEM.code),
    ],
)
def test_error_of_other_rank_is_raised(as_rank_0: Callable[[Any], None], other: Any, error: type, code: str):
    as_rank_0(other)
    with pytest.raises(error) as refusal, on_all_ranks("reading"):
        pass
    (problem,) = refusal.value.problems
    assert (type(refusal.value), problem.code, problem.rank) == (error, code, 1)
    assert code == PROBLEM.code or all(part in problem.message for part in ("OSError", "reading", "disk full"))


def test_error_of_all_ranks_is_raised_unchanged(as_rank_0: Callable[[Any], None]):
    error = SpecError([PROBLEM])
    as_rank_0(("SpecError", str(error), (PROBLEM,)))
    with pytest.raises(SpecError) as refusal, on_all_ranks("outer"), on_all_ranks("inner"):
        raise error
    assert refusal.value is error


def test_error_without_process_group_is_raised_unchanged():
    with pytest.raises(KeyError), on_all_ranks("reading"):
        raise KeyError("a")
