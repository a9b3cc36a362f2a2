"""Finds ranks that wait for each other in different calls, under launchers that do not watch the ranks.

A thread of each rank samples where the main thread is. Nothing is sent while that changes. A rank whose main thread has
not moved for half of the limit writes its place to the store of the process group; after the limit it counts itself.
The rank that completes the count reads the places of all ranks, once: see :func:`find_cause`.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist

from hf_fsdp_plugin.backends.arrival_rounds import place_key, place_store
from hf_fsdp_plugin.backends.arrivals import arrival_limit, arrivals
from hf_fsdp_plugin.hangs.calls import LIMIT_VARIABLE
from hf_fsdp_plugin.hangs.places import Frame, RanksAt, find_place, merged
from hf_fsdp_plugin.hangs.step_count import Counts
from hf_fsdp_plugin.integrations.session import session
from hf_fsdp_plugin.problems import Problem
from hf_fsdp_plugin.text import format_names

EXIT_CODE: Final = os.EX_TEMPFAIL
"""The exit code of a rank that ends the run, as that of ``hf-fsdp launch`` after a hang."""
_MODEL_CALLS: Final = ("forward", "backward", "optimizer.step", "clip_grad_norm_")
_BUSY_SHARE: Final = 0.05
"""Share of one core from which on a process may be receiving a message, or computing."""
_STOP_SECONDS: Final = 2.0
"""Longest wait for an answer of the store, whose host may have exited."""
_MAX_PLACES: Final = 8
_DISTRIBUTED: Final = os.path.join("torch", "distributed", "")
_ROUND: Final = os.path.join("backends", "arrival_rounds.py")
_FIX: Final = (
    "Call the model, and everything that reads its weights, on all ranks, outside of "
    "`if accelerator.is_main_process:`. Only print, log and write files on the main process."
)


@dataclass(frozen=True, kw_only=True, slots=True)
class RankState:
    """Where a rank has stopped.

    Attributes:
        place: as text, with the counts.
        call: the library function that it is in, such as ``forward``; empty outside of known ones.
        arrival: the collective call before which it waits for all ranks (``backends.arrivals``); empty if for none.
        model: class of the model whose forward it has begun last.
        waits: whether its main thread is in a collective, and its process is idle.
        steps, forwards: optimizer steps, and forwards of sharded models that it has begun.
    """

    place: str
    call: str
    arrival: str
    model: str
    waits: bool
    steps: int
    forwards: int


def find_cause(states: Mapping[int, RankState], limit: float) -> Problem | None:
    """Return why no rank moves, if the ranks have made different calls; ``None`` if the calls do not differ.

    An error, if all ranks wait in collectives that cannot complete: some are in a call that needs all ranks while
    others are not, or some have called the model more often than others, which are in the same optimizer step or
    outside of the model. A warning, if only the numbers of forwards differ.
    """
    most = max(state.forwards for state in states.values())
    behind = {rank: state for rank, state in states.items() if state.forwards < most}
    arrived = [rank for rank, state in states.items() if state.arrival]
    differs = 0 < len(arrived) < len(states)
    if not behind and not differs:
        return None
    is_certain = all(state.waits for state in states.values())
    same_steps = len({state.steps for state in states.values()}) == 1
    left_model = all(state.call not in _MODEL_CALLS for state in behind.values())
    message = f"no rank has moved for {limit:g} s, because they made different calls: {_places(states)}."
    if behind:
        ahead = [rank for rank in states if rank not in behind]
        numbers = sorted({state.forwards for state in behind.values()})
        message += (
            f" {_ranks(ahead).capitalize()} called {states[ahead[0]].model} {most:,} times, {_ranks(list(behind))} "
            f"{' or '.join(f'{number:,}' for number in numbers[:3])} times."
        )
    if is_certain and (differs or same_steps or left_model):
        return Problem(code="FSDP-E790", message=message, fix=_FIX)
    return Problem(code="FSDP-W791", message=message, fix=f"The run continues. {_FIX}")


class RankWatch:
    """Watches this process, from its first prepared model on."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._stopped = threading.Event()
        self._counts = Counts(0, 0)
        self._model = self._arrival = ""

    def start(self, model: torch.nn.Module, name: str) -> None:
        """Count the forwards of a model, and watch. Does nothing for a single rank, or if the launcher watches.

        Raises:
            SpecError: the limit is not a positive number (FSDP-E674).
        """
        is_off = os.environ.get(LIMIT_VARIABLE, "").strip() == "0"
        if session.in_flight_file is not None or is_off or not dist.is_initialized() or dist.get_world_size() == 1:
            return
        model.register_forward_pre_hook(partial(self._add_forward, name), prepend=True)
        if self._thread is None or not self._thread.is_alive():
            self._stopped.clear()
            arrivals.listen(self._on_arrival)
            sampler = _Sampler(arrival_limit(), self._state, self._stopped)
            self._thread = threading.Thread(target=sampler.run, name="hf_fsdp_watch", daemon=True)
            self._thread.start()

    def watch_steps(self, optimizer: torch.optim.Optimizer) -> None:
        """Count the steps of an optimizer."""
        if self._thread is not None:
            optimizer.register_step_post_hook(self._add_step)

    def stop(self) -> None:
        """Stop watching. A thread that uses the store while Python shuts down would end the process with an error."""
        if self._thread is not None:
            self._stopped.set()
            self._thread.join(_STOP_SECONDS)
            self._thread = None
            arrivals.listen(lambda call: None)

    def _add_forward(self, name: str, *_: Any) -> None:
        if not torch.compiler.is_compiling():
            self._model = name
            self._counts = replace(self._counts, forwards=self._counts.forwards + 1)

    def _add_step(self, *_: Any) -> None:
        self._counts = replace(self._counts, steps=self._counts.steps + 1)

    def _on_arrival(self, call: str | None) -> None:
        self._arrival = call or ""

    def _state(self, stack: Sequence[Frame]) -> RankState:
        """Return the state of a main thread with this stack, which is idle if it is in a collective."""
        place, innermost = find_place(stack, self._counts), stack[-1].file if stack else ""
        return RankState(
            place=str(place or ""),
            call=place.call if place is not None else "",
            arrival=self._arrival,
            model=self._model,
            waits=bool(self._arrival) or _DISTRIBUTED in innermost,
            steps=self._counts.steps,
            forwards=self._counts.forwards,
        )


class _Sampler:
    """The loop of the thread.

    Args:
        limit: seconds without a change after which a rank counts itself as stopped.
        state_of: returns the state for the stack of the main thread.
    """

    def __init__(
        self, limit: float, state_of: Callable[[Sequence[Frame]], RankState], stopped: threading.Event
    ) -> None:
        self._limit, self._state_of, self._stopped = limit, state_of, stopped
        self._pause = min(1.0, limit / 8)
        self._store = place_store()
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self._state = RankState(place="", call="", arrival="", model="", waits=False, steps=0, forwards=0)
        self._position: tuple[Any, ...] = ()
        self._since, self._cpu = 0.0, 0.0
        self._is_written = self._is_counted = False

    def run(self) -> None:
        # The process group is destroyed, or the rank that hosts the store has exited.
        with contextlib.suppress(dist.DistError, RuntimeError, ValueError):
            while not self._stopped.wait(self._pause):
                self._sample()

    def _sample(self) -> None:
        stack, position = _main_stack()
        now, state = time.monotonic(), self._state_of(stack)
        if (position, state) != (self._position, self._state):
            self._position, self._state = position, state
            self._since, self._cpu = now, time.process_time()
            self._withdraw()
            return
        seconds = now - self._since
        if not self._is_written and seconds >= self._limit / 2:
            is_idle = (time.process_time() - self._cpu) / seconds < _BUSY_SHARE
            state = replace(state, waits=state.waits and is_idle)
            self._store.set(place_key(self._rank), json.dumps(asdict(state)))
            self._is_written = True
        # A rank that waits for the arrival of others raises its own error at the limit.
        if not self._is_counted and seconds >= self._limit + 2 * self._pause:
            self._is_counted = True
            if self._store.add("stopped", 1) == self._world_size:
                self._diagnose()

    def _withdraw(self) -> None:
        if self._is_counted:
            self._store.add("stopped", -1)
        if self._is_written:
            self._store.delete_key(place_key(self._rank))
        self._is_written = self._is_counted = False

    def _diagnose(self) -> None:
        keys = [place_key(rank) for rank in range(self._world_size)]
        if not self._store.check(keys):
            return  # a rank moves again
        states = {rank: RankState(**json.loads(self._store.get(key))) for rank, key in enumerate(keys)}
        problem = find_cause(states, self._limit)
        if problem is None:
            return
        print(f"hf-fsdp: {'hang: ' if problem.severity == 'error' else ''}{problem}", file=sys.stderr, flush=True)
        if problem.severity == "error":
            # The main thread is in a collective that does not end, so no exception can be raised in it.
            print("hf-fsdp: this rank ends the run", file=sys.stderr, flush=True)
            os._exit(EXIT_CODE)


rank_watch = RankWatch()
"""The watch of this process."""


def _main_stack() -> tuple[list[Frame], tuple[Any, ...]]:
    """Return the stack of the main thread, outermost frame first, and what changes when the thread moves."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    stack: list[Frame] = []
    position: list[tuple[int, int]] = []
    while frame is not None:
        file = frame.f_code.co_filename
        if file.endswith(_ROUND):  # the loop that waits for other ranks
            stack.clear()
            position.clear()
        else:
            position.append((id(frame), frame.f_lasti))
        stack.append(Frame(file, frame.f_lineno or 0, frame.f_code.co_name))
        frame = frame.f_back
    return stack[::-1], tuple(position)


def _places(states: Mapping[int, RankState]) -> str:
    found = merged(RanksAt((rank,), "", state.place) for rank, state in states.items())
    more = f"; and {len(found) - _MAX_PLACES} more places" if len(found) > _MAX_PLACES else ""
    return "; ".join(str(place) for place in found[:_MAX_PLACES]) + more


def _ranks(numbers: Sequence[int]) -> str:
    return f"rank {numbers[0]}" if len(numbers) == 1 else f"ranks {format_names(numbers, 16)}"
