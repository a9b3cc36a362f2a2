"""Raise errors of one rank on all ranks, before the other ranks wait for it in a collective."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar

import torch
import torch.distributed as dist

from hf_fsdp_plugin.problems import CheckpointError, Problem, SpecError
from hf_fsdp_plugin.text import format_names
from hf_fsdp_plugin.torch_private.functions import supports_cpu

T = TypeVar("T")
_SHORT = 64
"""Maximum length of a text that is exchanged instead of its hash."""
_MAX_DISTINCT = 8
"""Maximum number of different objects that are broadcast one after the other."""
_Failure = tuple[str, str, tuple[Problem, ...]]
"""Class and message of an exception, and the problems of a :class:`SpecError`."""
_AGREED = "_hf_fsdp_agreed"
"""Attribute that marks an exception that all ranks raise, so that outer blocks do not exchange it again."""


def gather_objects(own: T) -> list[T]:
    """Return the object of every rank, in rank order. Collective."""
    if not dist.is_initialized():
        return [own]
    objects = [own] * dist.get_world_size()
    dist.all_gather_object(objects, own)
    return objects


def gather_equal_objects(own: T) -> list[T]:
    """Return the object of every rank, in rank order, where most ranks have equal objects. Collective.

    The ranks exchange hashes. Each different object is sent once, so that the bytes do not grow with the square of the
    ranks. Ranks with equal objects share one.
    """
    if not dist.is_initialized():
        return [own]
    hashes = gather_objects(_hash(pickle.dumps(own)))
    first = {found: hashes.index(found) for found in dict.fromkeys(hashes)}
    if len(first) > _MAX_DISTINCT:
        return gather_objects(own)
    objects = {found: broadcast_object(own, rank) if len(first) > 1 else own for found, rank in first.items()}
    return [objects[found] for found in hashes]


def broadcast_object(own: T, source: int = 0) -> T:
    """Return the object of the rank ``source``. Collective."""
    if not dist.is_initialized():
        return own
    objects = [own]
    dist.broadcast_object_list(objects, src=source)
    return objects[0]


def _hash(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


def same_on_all_ranks(what: str, value: str) -> None:
    """Check that ``value`` is the same on all ranks: ranks with different plans would wait in different collectives.

    Collective.

    Raises:
        SpecError: on all ranks, if any value differs.
    """
    values = gather_objects(value if len(value) <= _SHORT else _hash(value.encode()).hex())
    different = [rank for rank, other in enumerate(values) if other != values[0]]
    if different:
        message = f"{what} is not the same on all ranks. Ranks that differ from rank 0: {format_names(different)}."
        fix = "Start every rank with the same config, environment and model."
        raise SpecError([Problem(code="FSDP-E302", message=message, fix=fix)])


@contextmanager
def on_all_ranks(doing: str) -> Iterator[None]:
    """Run the block on every rank. If it fails on some ranks, raise on all ranks and name the failed ranks.

    The block must not contain collectives other than nested ``on_all_ranks`` blocks. A rank that fails between two
    inner blocks exchanges its failure in the next one, and then all ranks leave the outer block without another
    exchange. An exception that is the same on all ranks is raised unchanged.

    Args:
        doing: what the block does, for the message, such as ``reading checkpoint-5``.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        if getattr(error, _AGREED, False):
            raise
        failure = error
    if not _any_rank_failed(failure is not None):
        return
    own = None if failure is None else (type(failure).__name__, str(failure), getattr(failure, "problems", ()))
    failures: list[_Failure | None] = gather_objects(own)
    failed = {rank: other for rank, other in enumerate(failures) if other is not None}
    if not failed:
        return  # ranks whose process group has no collectives of CPU tensors
    if failure is not None and len(set(failures)) == 1:
        setattr(failure, _AGREED, True)
        raise failure
    problems = []
    for rank, (kind, text, own_problems) in failed.items():
        found = own_problems or (Problem(code="FSDP-E303", message=f"{kind} while {doing}: {text}"),)
        problems += [problem if problem.rank is not None else replace(problem, rank=rank) for problem in found]
    is_checkpoint = any(kind == CheckpointError.__name__ for kind, _, _ in failed.values())
    agreed = (CheckpointError if is_checkpoint else SpecError)(problems)
    setattr(agreed, _AGREED, True)
    raise agreed from failure


def _any_rank_failed(failed: bool) -> bool:
    """Return whether the block may have failed on any rank. Collective.

    Almost all blocks succeed. For one number, each rank sends two messages of gloo, for an object of each rank four per
    rank of the world. Without a process group for CPU tensors, the objects are exchanged at once.
    """
    group = dist.group.WORLD
    if group is None or not supports_cpu(group):
        return True
    flag = torch.tensor([failed], dtype=torch.int32, device="cpu")  # whatever the default device is
    dist.all_reduce(flag, dist.ReduceOp.MAX)
    return bool(flag)
