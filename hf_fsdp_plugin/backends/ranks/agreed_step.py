"""Agrees on a step after which all ranks do something that was asked of some of them, such as a save after a signal.

Until it is asked for, no rank waits: a thread of each rank looks for the request in the store of the process group. It
answers with the step in which its rank is, and the highest of these steps is the agreed one. No rank has ended it.
"""

from __future__ import annotations

import threading
import time
import uuid
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
    """

    def __init__(self, step: int) -> None:
        name = broadcast_object(f"hf_fsdp_agreed_step_{uuid.uuid4().hex}")
        self._store = dist.PrefixStore(name, default_store())
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self._step, self._agreed = step, 0
        self._has_answered = False
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._look, name="hf_fsdp_agreed_step", daemon=True)
        self._thread.start()

    def ask(self) -> None:
        """Ask all ranks for a step. Can be called on any rank, from any thread, and more than once."""
        self._store.set("asked", "1")

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

    def close(self) -> None:
        """Answer requests that other ranks may still make with the last step, and stop looking for them."""
        with self._lock, suppress(RuntimeError):  # the store may be gone
            self._answer()
        self._closed.set()
        self._thread.join()

    def _look(self) -> None:
        with suppress(RuntimeError):
            while not self._closed.wait(max(_PAUSE, self._world_size * _LOOK_COST)):
                if self._store.check(["asked"]):
                    with self._lock:  # answered before the training waits, because both use one connection
                        self._answer()
                    return

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
