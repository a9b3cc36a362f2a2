"""Keeps the ranks together: they wait for each other before a collective, and errors of one rank are raised on all.

Errors: a rank that fails while the others go on would leave them in their next collective. So all ranks raise its error
after the block in which it has failed (:func:`on_all_ranks`), which exchanges that by a collective of its own.

Waits: a script that saves on one rank only (``if accelerator.is_main_process: model.save_pretrained(…)``) would wait in
a collective without end, because the other ranks never call it. Before such a collective, each rank registers its
arrival in the store of the process group, and waits until all ranks have arrived (:func:`wait_for_all_ranks`). If some
do not, the waiting ranks raise an error that names them. Only the store is used, so this works for every backend.

The ranks meet in rounds, which are numbered in the store. A round ends once: the last rank to arrive ends it as
complete, the first rank whose limit is over ends it as failed. A rank that arrives with another call than the first
one, or that waits for a rank whose script has ended, ends it as failed after a short time in which more ranks may
arrive. A rank that arrives at a failed round joins the next one, so a call can be repeated after a failure. Each rank
sends a constant number of messages per call; only the rank that ends a round sends one per rank.

::

    round               number of the current round
    <n>/first           the call of the first rank that arrived
    <n>/rank<r>         the call of rank r
    <n>/count/<call>    number of ranks that have made this call
    <n>/ended           1 if a rank has ended the round; the first increment decides
    <n>/result          JSON: the rank that has ended the round, its call, the missing ranks and their other calls
    left                set if a rank has ended its script
    left/rank<r>        set if rank r has
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any, Final, TypeVar

import torch
import torch.distributed as dist

from hf_fsdp_plugin.problems import CheckpointError, Problem, SpecError
from hf_fsdp_plugin.rank_variables import ARRIVAL_LIMIT_VARIABLE, arrival_limit
from hf_fsdp_plugin.state import process
from hf_fsdp_plugin.text import format_names, name_ranks
from hf_fsdp_plugin.torch_private.functions import default_store, supports_cpu

T = TypeVar("T")
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


def broadcast_object(own: T, source: int = 0) -> T:
    """Return the object of the rank ``source``. Collective."""
    if not dist.is_initialized():
        return own
    objects = [own]
    dist.broadcast_object_list(objects, src=source)
    return objects[0]


def same_on_all_ranks(what: str, value: str) -> None:
    """Check that ``value`` is the same on all ranks: ranks with different plans would wait in different collectives.

    Collective.

    Raises:
        SpecError: on all ranks, if any value differs.
    """
    values = gather_objects(hashlib.sha256(value.encode()).hexdigest())
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
    if not any_rank(failure is not None):  # almost all blocks succeed
        return
    own = None if failure is None else (type(failure).__name__, str(failure), getattr(failure, "problems", ()))
    failures: list[_Failure | None] = gather_objects(own)
    failed = {rank: other for rank, other in enumerate(failures) if other is not None}
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


def any_rank(flag: bool) -> bool:
    """Return whether the flag is set on any rank. Collective.

    For one number, each rank sends two messages of gloo, for an object of each rank four per rank of the world.
    """
    return any_rank_each([flag])[0]


def any_rank_each(own: Sequence[bool]) -> list[bool]:
    """Return for each of these flags, of which all ranks have as many, whether any rank has set it. Collective."""
    group = dist.group.WORLD
    if group is None or not supports_cpu(group):
        return [any(flags) for flags in zip(*gather_objects(list(own)), strict=True)]
    flags = torch.tensor(own, dtype=torch.int32, device="cpu")  # whatever the default device is
    dist.all_reduce(flags, dist.ReduceOp.MAX)
    return [bool(flag) for flag in flags.tolist()]


ON_ALL_RANKS: Final = "Call it on all ranks, outside of `if accelerator.is_main_process:`."
"""The remedy for a collective call that only some ranks make."""
DEFAULT_LIMIT: Final = 45.0
"""Seconds that a rank waits for the others. ``HF_FSDP_ARRIVAL_TIMEOUT`` replaces this and the limits below."""
TRAINING_LIMIT: Final = 540.0
"""Seconds for calls during training, before which ranks may load data, compile, evaluate or upload for different times.

Shorter than the ten minutes after which NCCL ends a rank, if a script starts a process group of NCCL alone.
"""
PREPARATION_SHARE: Final = 0.9
"""Part of the process group's time-out for preparing a model, before which ranks load models and preprocess data."""
LEFT: Final = "left"
"""Key that a rank adds to the store at the end of its script, and its "call" in a round. It makes no call any more."""
_SETTLE: Final = 3.0
"""Seconds in which further ranks may arrive at a round that fails: at another call."""
_LONGEST_PAUSE: Final = 0.25
"""Seconds between two questions to the store. The pauses grow with the time waited."""
_PAUSE_PER_RANK: Final = 1e-3 / 16
"""Seconds of the first pause for each rank, and at least a millisecond: one process answers all ranks."""


def arrival_store() -> dist.Store:
    """Return the part of the process group's store in which the rounds are."""
    return dist.PrefixStore("hf_fsdp_arrivals", default_store())


def _has_other_ranks() -> bool:
    return dist.is_initialized() and dist.get_world_size() > 1


def preparation_limit() -> float:
    """Return the limit in seconds for the first collective of a model. Never shorter than that of other calls."""
    # init_process_group gives its time-out to the store.
    seconds = default_store().timeout.total_seconds() if dist.is_initialized() else 0.0
    return max(TRAINING_LIMIT, PREPARATION_SHARE * seconds)


def announce_end() -> None:
    """Announce that the script of this rank has ended, so that other ranks do not wait for it in a call."""
    if _has_other_ranks():
        with suppress(dist.DistError):  # the rank that hosts the store may have exited
            store = arrival_store()
            store.set(f"{LEFT}/rank{dist.get_rank()}", "1")
            store.set(LEFT, "1")


class WaitListener:
    """Receives the collective calls in which this rank waits for other ranks.

    Attributes:
        notify: called with the name of each call before the wait, then with ``None``.
    """

    def __init__(self) -> None:
        self.notify: Callable[[str | None], None] = lambda call: None


wait_listener = process.owns(WaitListener)


def wait_for_all_ranks(call: str, *, fix: str = ON_ALL_RANKS, limit: float = DEFAULT_LIMIT) -> None:
    """Wait until every rank has called this function with the same ``call``.

    Args:
        call: the collective call for messages, such as ``save_pretrained of LlamaForCausalLM``.
        fix: what to write instead of a call on some ranks.
        limit: seconds to wait, unless the environment variable sets another limit.

    Raises:
        SpecError: on each rank that waited, if some ranks did not arrive in time. It names these ranks.
    """
    if not _has_other_ranks():
        return
    limit = arrival_limit(limit)
    wait_listener().notify(call)
    try:
        missing = Round(arrival_store(), call).join(limit)
    finally:
        wait_listener().notify(None)
    if missing:
        message = f"{call} is a collective call: every rank must make it, because each has only a part of the weights. "
        message += f"{_describe(missing)}. The call waits for up to {limit:g} seconds ({ARRIVAL_LIMIT_VARIABLE})."
        raise SpecError([Problem(code="FSDP-E670", message=message, fix=fix)])


@contextmanager
def collective_call(call: str, *, fix: str = ON_ALL_RANKS, limit: float = DEFAULT_LIMIT) -> Iterator[None]:
    """Run the block, which contains collectives, after :func:`wait_for_all_ranks`. Inner blocks do not wait again."""
    nesting = _nesting()
    is_outermost = not nesting.is_inside
    if is_outermost:
        wait_for_all_ranks(call, fix=fix, limit=limit)
    nesting.is_inside = True
    try:
        yield
    finally:
        nesting.is_inside = not is_outermost


def collective_preparation(call: str, *, fix: str = ON_ALL_RANKS) -> AbstractContextManager[None]:
    """Return a :func:`collective_call` for what ranks call after they have loaded a model, each at its own time."""
    return collective_call(call, fix=fix, limit=preparation_limit())


class _Nesting(threading.local):
    """Whether a thread is in a :func:`collective_call`."""

    is_inside = False


_nesting = process.owns(_Nesting)


class FirstCalls:
    """Waits for all ranks at the first call of a kind, because scripts make such calls in each step.

    If a script makes a call on some ranks only (``if accelerator.is_main_process:``), the first call shows it.
    """

    def __init__(self) -> None:
        self._checked: set[str] = set()

    def wait(self, call: str, *, fix: str, limit: float = TRAINING_LIMIT) -> None:
        """Wait for all ranks as :func:`wait_for_all_ranks` does, if it is the first call with this name."""
        if call not in self._checked and _has_other_ranks() and not _nesting().is_inside:
            wait_for_all_ranks(call, fix=fix, limit=limit)
            self._checked.add(call)


def _describe(missing: Sequence[tuple[int, str]]) -> str:
    absent = [rank for rank, call in missing if not call]
    left = [rank for rank, call in missing if call == LEFT]
    other = [f"rank {rank} called {call}" for rank, call in missing if call and call != LEFT]
    parts = [f"{name_ranks(absent)} did not call it"] if absent else []
    parts += [f"{name_ranks(left)} did not call it and ended the script"] if left else []
    return "; ".join([*parts, *other[:3]])


class Round:
    """One rank's part in the rounds of a store.

    Args:
        store: a store that all ranks share.
        rank, world_size: rank of this process, and number of ranks; by default those of the default process group.
    """

    def __init__(self, store: dist.Store, call: str, rank: int | None = None, world_size: int | None = None) -> None:
        self._store, self._call = store, call
        self._rank = dist.get_rank() if rank is None else rank
        self._world_size = dist.get_world_size() if world_size is None else world_size

    def join(self, limit: float) -> list[tuple[int, str]]:
        """Arrive, and wait for at most ``limit`` seconds.

        Returns:
            The ranks that did not arrive, each with the call that it made instead; empty if all arrived.
        """
        while True:
            number = self._store.add("round", 0)
            if self._ended(number):
                continue  # the rank that ended it is about to start the next round
            self._store.set(f"{number}/rank{self._rank}", self._call)
            try:
                if self._store.compare_set(f"{number}/first", "", self._call).decode() != self._call:
                    limit = min(limit, _SETTLE)
                if self._store.add(f"{number}/count/{self._call}", 1) == self._world_size:
                    self._end(number, complete=True)
                elif not self._wait(number, limit):
                    self._end(number, complete=False)
            except BaseException:  # for example KeyboardInterrupt: this rank must not be counted twice if it retries
                self._end(number, complete=False)
                raise
            self._store.wait([f"{number}/result"], timedelta(seconds=60))
            result: dict[str, Any] = json.loads(self._store.get(f"{number}/result"))
            missing = [(rank, call) for rank, call in result["missing"]]
            mine = dict(missing).get(self._rank)
            if mine is None:
                return missing
            if mine == self._call:  # this rank arrived in time, but made another call
                return [(result["rank"], result["call"])]
            # The round failed while this rank was arriving.

    def _ended(self, number: int) -> bool:
        return bool(self._store.check([f"{number}/result"]))

    def _wait(self, number: int, limit: float) -> bool:
        """Return whether the round ended within ``limit`` seconds."""
        deadline = time.monotonic() + limit
        while (remaining := deadline - time.monotonic()) > 0:
            if remaining > _SETTLE and self._store.check([LEFT]):
                deadline = time.monotonic() + min(remaining, _SETTLE)
            if self._ended(number):
                return True
            # Not store.wait: it prints a warning when its time is over, and handles no signals.
            waited = limit - remaining
            first = max(0.001, self._world_size * _PAUSE_PER_RANK)
            time.sleep(min(max(first, waited / 20), _LONGEST_PAUSE, remaining))
        return self._ended(number)

    def _end(self, number: int, *, complete: bool) -> None:
        """End the round, unless another rank ends it."""
        if self._store.add(f"{number}/ended", 1) != 1:
            return
        missing = [] if complete else self._missing(number)
        self._store.add("round", 1)
        result = {"rank": self._rank, "call": self._call, "missing": missing}
        self._store.set(f"{number}/result", json.dumps(result))
        if complete and number:  # every rank is in this round, so none reads the previous one
            keys = [f"rank{rank}" for rank in range(self._world_size)]
            for key in (*keys, "first", f"count/{self._call}", "ended", "result"):
                self._store.delete_key(f"{number - 1}/{key}")

    def _missing(self, number: int) -> list[tuple[int, str]]:
        calls = []
        for rank in range(self._world_size):
            has_called, has_left = (self._store.check([f"{where}/rank{rank}"]) for where in (number, LEFT))
            call = self._store.get(f"{number}/rank{rank}").decode() if has_called else LEFT if has_left else ""
            calls.append((rank, call))
        return [(rank, call) for rank, call in calls if call != self._call]
