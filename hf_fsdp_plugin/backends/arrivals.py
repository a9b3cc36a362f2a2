"""Wait until every rank has made the same collective call, with a time limit.

A script that saves on one rank only (``if accelerator.is_main_process: model.save_pretrained(…)``) would wait in a
collective without end, because the other ranks never call it. Before such a collective, each rank registers its arrival
in the store of the process group, and waits until all ranks have arrived. If some do not, the waiting ranks raise an
error that names them. Only the store is used, so this works for every backend.

The rounds in which the ranks meet are in :mod:`arrival_rounds`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any, Final

import torch.distributed as dist

from hf_fsdp_plugin.backends.arrival_rounds import LEFT, Round, arrival_store, place_key, place_store
from hf_fsdp_plugin.problems import Problem, SpecError
from hf_fsdp_plugin.text import format_names
from hf_fsdp_plugin.torch_private.functions import default_store

LIMIT_VARIABLE: Final = "HF_FSDP_ARRIVAL_TIMEOUT"
"""Environment variable with the time in seconds that a rank waits for the others. It replaces both limits below."""
DEFAULT_LIMIT: Final = 45.0
TRAINING_LIMIT: Final = 540.0
"""Seconds for calls during training, before which ranks may load data, compile, evaluate or upload for different times.

Shorter than the ten minutes after which NCCL ends a rank that waits in a collective.
"""
PREPARATION_SHARE: Final = 0.9
"""Part of the process group's time-out for preparing a model, before which ranks load models and preprocess data."""
_STEPPED: Final = "stepped"
"""Key that a rank adds to the store at its first optimizer step."""


def arrival_limit(default: float = DEFAULT_LIMIT) -> float:
    """Return the limit in seconds. Raises ``SpecError`` if the environment variable is not a positive number."""
    text = os.environ.get(LIMIT_VARIABLE, "").strip()
    try:
        limit = float(text) if text else default
    except ValueError:
        limit = 0.0
    if limit > 0:
        return limit
    message = f"{LIMIT_VARIABLE}={text} is not a positive number of seconds."
    raise SpecError([Problem(code="FSDP-E674", message=message, fix=f"Set it to a number such as {DEFAULT_LIMIT:g}.")])


def preparation_limit() -> float:
    """Return the limit in seconds for the first collective of a model. Never shorter than that of other calls."""
    # init_process_group gives its time-out to the store.
    seconds = default_store().timeout.total_seconds() if dist.is_initialized() else 0.0
    return max(TRAINING_LIMIT, PREPARATION_SHARE * seconds)


def announce_end() -> None:
    """Announce that the script of this rank has ended, so that other ranks do not wait for it in a call."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        with suppress(dist.DistError):  # the rank that hosts the store may have exited
            store = arrival_store()
            store.set(f"{LEFT}/rank{dist.get_rank()}", "1")
            store.set(LEFT, "1")


def wait_for_all_ranks(
    call: str, *, fix: str = "", limit: float = DEFAULT_LIMIT, given_up: Callable[[], bool] = lambda: False
) -> None:
    """Wait until every rank has called this function with the same ``call``.

    Args:
        call: the collective call for messages, such as ``save_pretrained of LlamaForCausalLM``.
        fix: what to write instead of a call on some ranks.
        limit: seconds to wait, unless the environment variable sets another limit.
        given_up: returns whether some rank will not make the call, so that waiting for it is useless.

    Raises:
        SpecError: on each rank that waited, if some ranks did not arrive in time. It names these ranks.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    limit = arrival_limit(limit)
    arrivals.begin(call)
    try:
        missing = Round(arrival_store(), call, given_up=given_up).join(limit)
    finally:
        arrivals.end()
    if missing:
        message = (
            f"{call} is a collective call: every rank must make it, because each rank has only a part of the weights. "
            f"{_describe(missing)}. The call waits for up to {limit:g} seconds ({LIMIT_VARIABLE})."
        )
        raise SpecError([Problem(code="FSDP-E670", message=message, fix=fix or "Make the call on all ranks.")])


class Arrivals:
    """Reports to a listener for which call this rank waits."""

    def __init__(self) -> None:
        self._listener: Callable[[str | None], None] = lambda call: None

    def listen(self, listener: Callable[[str | None], None]) -> None:
        """Call ``listener`` with the name of each call before this rank waits for the others, then with ``None``."""
        self._listener = listener

    def begin(self, call: str) -> None:
        self._listener(call)

    def end(self) -> None:
        self._listener(None)


arrivals = Arrivals()
"""The waits of this process."""


class FirstCalls:
    """Waits for all ranks at the first call of a kind, because scripts make such calls in each step.

    A script that makes them on some ranks only, such as in ``if accelerator.is_main_process:``, does so at the first.
    """

    def __init__(self) -> None:
        self._checked: set[str] = set()

    def wait(self, call: str, *, fix: str, limit: float = TRAINING_LIMIT, before_step: bool = False) -> None:
        """See :func:`wait_for_all_ranks`.

        Args:
            before_step: whether all ranks make the call before their first optimizer step. A rank that has made a step
                will then not make the call, so the others do not wait for it any longer.
        """
        if call in self._checked or not dist.is_initialized() or dist.get_world_size() == 1 or _inside.get():
            return
        if before_step and not first_step.is_made:
            wait_for_all_ranks(call, fix=fix, limit=limit, given_up=lambda: bool(arrival_store().check([_STEPPED])))
        else:
            wait_for_all_ranks(call, fix=fix, limit=limit)
        self._checked.add(call)


class FirstStep:
    """Announces the first optimizer step of this process.

    Attributes:
        is_made: whether it was made.
    """

    def __init__(self) -> None:
        self.is_made = False

    def announce(self, *_: Any) -> None:
        """Announce a step, if it is the first one. A pre-hook of optimizers."""
        if not self.is_made:
            self.is_made = True
            if dist.is_initialized() and dist.get_world_size() > 1:
                arrival_store().set(_STEPPED, "1")


first_step = FirstStep()
"""The first optimizer step of this process."""


@contextmanager
def together(
    call: str, *, fix: str = "", limit: float = DEFAULT_LIMIT, given_up: Callable[[], bool] = lambda: False
) -> Iterator[None]:
    """Run the block, which contains collectives, after :func:`wait_for_all_ranks`. Inner blocks do not wait again."""
    if not _inside.get():
        wait_for_all_ranks(call, fix=fix, limit=limit, given_up=given_up)
    token = _inside.set(True)
    try:
        yield
    finally:
        _inside.reset(token)


_inside: ContextVar[bool] = ContextVar("hf_fsdp_together", default=False)


def _describe(missing: Sequence[tuple[int, str]]) -> str:
    absent = [rank for rank, call in missing if not call]
    places = [f"rank {rank} was {place}" for rank in absent[:3] if (place := _place_of(rank))]
    left = [rank for rank, call in missing if call == LEFT]
    other = [f"rank {rank} called {call}" for rank, call in missing if call and call != LEFT]
    parts = [f"{_ranks(absent)} did not call it"] if absent else []
    parts += [f"{_ranks(left)} did not call it and ended the script"] if left else []
    return "; ".join([*parts, *places, *other[:3]])


def _place_of(rank: int) -> str:
    """Return where a rank has waited, if it has written that; see ``hangs.place_in_store``."""
    store, key = place_store(), place_key(rank)
    return str(json.loads(store.get(key))["place"]) if store.check([key]) else ""


def _ranks(numbers: Sequence[int]) -> str:
    return f"rank {numbers[0]}" if len(numbers) == 1 else f"ranks {format_names(list(numbers), 8)}"
