"""Tell the other ranks that this rank could not load a model, so that they do not wait for it.

A rank that fails to load a model announces its error in the store of the process group. All ranks that have the same
error raise it unchanged. If some ranks have loaded the model, such as from another copy of the files, they raise the
error when they prepare the model, and all ranks name the failed one. A rank is not waited for while it loads: a script
may load the model on some ranks only.

::

    failure             JSON: id, rank and problems of the first rank that failed
    count/<id>          number of ranks with the same problems
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from typing import Any, Final, NoReturn

import torch.distributed as dist

from hf_fsdp_plugin.problems import CheckpointError, Origin, Problem, SpecError
from hf_fsdp_plugin.torch_private.functions import default_store

_SETTLE: Final = 3.0
"""Seconds that a failed rank waits for ranks with the same error. It keeps the store of rank 0 alive meanwhile."""
_RECOVERY: Final = 5.0
"""Seconds that other ranks wait for the failed rank to continue, for example with another folder."""
_PAUSE: Final = 0.02


class LoadFailures:
    """The failed loads of this run, as far as this rank knows them."""

    def __init__(self) -> None:
        self._announced = False
        self._seen: tuple[float, dict[str, Any]] | None = None

    def raise_everywhere(self, error: SpecError) -> NoReturn:
        """Announce that this rank could not load a model, and raise the error. Not collective.

        Raises:
            SpecError: the error itself if all ranks have it; otherwise that of the first rank that failed.
        """
        if not _has_other_ranks():
            raise error
        store, problems = _store(), [_to_json(problem) for problem in error.problems]
        own = {"id": os.urandom(8).hex(), "rank": dist.get_rank(), "problems": problems}
        first = json.loads(store.compare_set("failure", "", json.dumps(own)))
        self._announced = first["id"] == own["id"]
        if first["problems"] == problems and self._all_ranks_failed(store, first["id"]):
            raise error
        raise _error_of(first) from error

    def _all_ranks_failed(self, store: dist.Store, name: str) -> bool:
        """Count this rank, and return whether all ranks have the same problems."""
        key, world_size = f"count/{name}", dist.get_world_size()
        count, deadline = store.add(key, 1), time.monotonic() + _SETTLE
        while count < world_size and time.monotonic() < deadline:
            time.sleep(_PAUSE)
            count = store.add(key, 0)
        if count == world_size:
            self.close()
        return count == world_size

    def raise_announced(self) -> bool:
        """Raise the error of a rank that could not load a model and has not continued. Not collective.

        Returns:
            False, so that this can be the ``given_up`` of a wait for all ranks, which it ends.
        """
        try:
            found = json.loads(_store().get("failure")) if _store().check(["failure"]) else None
        except dist.DistError:
            if self._seen is None:
                raise
            found, self._seen = self._seen[1], (0.0, self._seen[1])  # the failed rank was the host of the store
        if found is None:
            self._seen = None
        elif self._seen is None or self._seen[1]["id"] != found["id"]:
            self._seen = (time.monotonic(), found)
        elif time.monotonic() - self._seen[0] > _RECOVERY:
            self._seen = None
            raise _error_of(found)
        return False

    def close(self) -> None:
        """Withdraw what this rank has announced, because it continues."""
        if self._announced:
            self._announced = False
            if dist.is_initialized():
                _store().delete_key("failure")


load_failures = LoadFailures()
"""The failed loads of this run."""


def _has_other_ranks() -> bool:
    return dist.is_initialized() and dist.get_world_size() > 1


def _store() -> dist.Store:
    return dist.PrefixStore("hf_fsdp_load", default_store())


def _to_json(problem: Problem) -> list[Any]:
    return [problem.code, problem.origin.source if problem.origin is not None else None, problem.message, problem.fix]


def _error_of(failure: dict[str, Any]) -> CheckpointError:
    return CheckpointError(
        replace(
            Problem(code=code, message=message, fix=fix, rank=failure["rank"]),
            origin=None if source is None else Origin(source=source),
        )
        for code, source, message, fix in failure["problems"]
    )
