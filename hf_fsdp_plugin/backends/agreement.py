"""Errors of one rank raised on all of them, before a collective can hang."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch.distributed as dist

from hf_fsdp_plugin.problems import CheckpointError, Problem, SpecError

# On an exception that all ranks raise, so that nobody asks the others about it again.
_AGREED = "_hf_fsdp_agreed"


def same_on_all_ranks(what: str, value: str) -> None:
    """Raise ``SpecError`` on all ranks unless ``value`` is the same on all of them. Collective.

    Ranks that shard by different plans would wait in different collectives for ever.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    values: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(values, value)
    others = [rank for rank, theirs in enumerate(values) if theirs != values[0]]
    if others:
        message = (
            f"{what} is not the same on all ranks: {', '.join(f'rank {rank}' for rank in others)} and rank 0 differ."
        )
        fix = "Give every rank the same config, environment and model."
        raise SpecError([Problem(severity="error", message=message, fix=fix)])


@contextmanager
def on_all_ranks(doing: str) -> Iterator[None]:
    """Run the block on every rank; if it fails on some, raise on all, with the ranks named.

    The block itself must not contain collectives, but for agreements like this one: a rank that fails between two of
    them meets the others in their next, and all of them leave the outer block without another. A ``SpecError`` that
    all ranks share is raised as it is.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        if getattr(error, _AGREED, False):
            raise
        failure = error
    if not dist.is_initialized() or dist.get_world_size() == 1:
        if failure is not None:
            raise failure
        return
    failures: list[tuple[str, str, tuple[Problem, ...]] | None] = [None] * dist.get_world_size()
    mine = None if failure is None else (type(failure).__name__, str(failure), getattr(failure, "problems", ()))
    dist.all_gather_object(failures, mine)
    failed = {rank: theirs for rank, theirs in enumerate(failures) if theirs is not None}
    if not failed:
        return
    if failure is not None and len(set(failures)) == 1:
        setattr(failure, _AGREED, True)
        raise failure
    problems = [problem for rank, theirs in failed.items() for problem in _problems(rank, theirs, doing)]
    about_a_checkpoint = any(kind == CheckpointError.__name__ for kind, _, _ in failed.values())
    agreed = (CheckpointError if about_a_checkpoint else SpecError)(problems)
    setattr(agreed, _AGREED, True)
    raise agreed from failure


def _problems(rank: int, failure: tuple[str, str, tuple[Problem, ...]], doing: str) -> list[Problem]:
    """What one rank complains of, in the words that all ranks use."""
    kind, text, problems = failure
    if problems:
        return [problem if problem.rank is not None else replace(problem, rank=rank) for problem in problems]
    return [Problem(severity="error", rank=rank, message=f"{kind} while {doing}: {text}")]
