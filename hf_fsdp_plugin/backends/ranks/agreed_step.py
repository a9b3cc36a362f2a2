"""Agrees on a step after which all ranks do something that was asked of some of them, such as a save after a signal.

Until it is asked for, no rank waits: a thread of each rank looks for the request in the store of the process group. It
answers with the step in which its rank is, and the highest of these steps is the agreed one. No rank has ended it.
What was asked for is then done, and :meth:`AgreedStep.begin_round` lets the ranks look for the next request.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from typing import Final

import torch.distributed as dist

from hf_fsdp_plugin.backends.ranks.agreement import broadcast_object
from hf_fsdp_plugin.problems import Problem, SpecError
from hf_fsdp_plugin.text import name_ranks
from hf_fsdp_plugin.torch_private.functions import default_store

_PAUSE: Final = 0.5
"""Seconds between two looks of a rank for a request."""
_LOOK_COST: Final = 5e-4
"""Seconds for each rank between two looks, because one process answers all of them."""
_POLL_INTERVAL: Final = 0.02
ANSWER_LIMIT: Final = 60.0
"""Seconds that a rank waits for the answers of the others, whose threads do not depend on their training."""


class AgreedStep:
    """The step on which the ranks agree. Created and closed on all ranks. Collective only when it is created.

    Args:
        step: the step that comes next.
        find_reason: called by the thread of each rank between two looks. Returns why the ranks are asked, or ``""``.
    """

    def __init__(self, step: int, find_reason: Callable[[], str] = lambda: "") -> None:
        self._name = broadcast_object(f"hf_fsdp_agreed_step_{uuid.uuid4().hex}")
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self._round, self._find_reason = 0, find_reason
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self.begin_round(step)
        self._thread = threading.Thread(target=self._look, name="hf_fsdp_agreed_step", daemon=True)
        self._thread.start()

    def begin_round(self, step: int) -> None:
        """Look for the next request. Call it on all ranks when what was asked for is done.

        Until then, nothing is asked for: the file that asked may still exist.

        Args:
            step: the step that comes next.
        """
        with self._lock:
            self._round += 1  # its keys in the store are its own
            self._store = dist.PrefixStore(f"{self._name}_{self._round}", default_store())
            self._step, self._agreed, self._has_answered = step, 0, False

    def ask(self, reason: str = "asked") -> None:
        """Ask all ranks for a step. Can be called on any rank, from any thread, and more than once."""
        self._store.compare_set("asked", "", reason)  # the first reason stays

    def is_reached(self, step: int) -> bool:
        """Return whether ``step``, which this rank has ended, is the agreed one. Called after each step.

        Raises:
            SpecError: other ranks do not answer.
        """
        with self._lock:
            if not self._has_answered:
                self._step = step + 1
                return False
        self._agreed = self._agreed or self._highest_step()
        return step == self._agreed

    def reason(self) -> str:
        """Return why the ranks were asked for the agreed step, by the rank that was first to ask."""
        return self._store.get("asked").decode()

    def close(self) -> None:
        """Answer requests that other ranks may still make with the last step, and stop looking for them."""
        with self._lock, suppress(RuntimeError):  # the store may be gone
            self._answer()
        self._closed.set()
        self._thread.join()

    def _look(self) -> None:
        with suppress(RuntimeError):
            while not self._closed.wait(max(_PAUSE, self._world_size * _LOOK_COST)):
                if self._has_answered:  # until the next round
                    continue
                if reason := self._find_reason():
                    self.ask(reason)
                if self._store.check(["asked"]):
                    with self._lock:  # answered before the training waits, because both use one connection
                        self._answer()

    def _answer(self) -> None:
        if not self._has_answered:
            self._store.set(f"step{self._rank}", str(self._step))
            self._has_answered = True

    def _highest_step(self) -> int:
        keys = [f"step{rank}" for rank in range(self._world_size)]
        deadline = time.monotonic() + ANSWER_LIMIT
        while not self._store.check(keys):
            if time.monotonic() > deadline:
                silent = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
                message = f"{name_ranks(silent)} did not report a step within {ANSWER_LIMIT:g} seconds, in which all "
                message += "ranks were asked to save and stop."
                fix = "Look at the processes of these ranks; resume from the previous checkpoint."
                raise SpecError([Problem(code="FSDP-E427", message=message, fix=fix)])
            time.sleep(_POLL_INTERVAL)
        return max(int(answer) for answer in self._store.multi_get(keys))
