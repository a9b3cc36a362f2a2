"""Where a rank is that does not move: in the store of the job, for ranks that wait for it in a call (FSDP-E670)."""

from __future__ import annotations

import contextlib
import json
import time
from typing import Any

from hf_fsdp_plugin.hangs.inquiries import JobStore, StoreLost
from hf_fsdp_plugin.hangs.places import current_stack, find_place
from hf_fsdp_plugin.hangs.rank_files import RankFiles
from hf_fsdp_plugin.hangs.record import record
from hf_fsdp_plugin.hangs.step_count import read_counts


class PlaceInStore:
    """Writes where this rank is to the store of the job, while it does not move: other ranks may wait for it in a call.

    Args:
        limit: seconds without a change after which the place is written.
    """

    def __init__(self, store: JobStore, rank: int, files: RankFiles, limit: float) -> None:
        self._store, self._rank, self._files, self._limit = store, rank, files, limit
        self._position: tuple[Any, ...] = ()
        self._since = self._next_poll = 0.0
        self._is_written = False

    def poll(self) -> None:
        now = time.monotonic()
        if now < self._next_poll:
            return
        self._next_poll = now + min(1.0, self._limit / 4)
        stack, position = current_stack(record.main)
        if position != self._position:
            self._position, self._since = position, now
            if self._is_written:
                self._is_written = False
                self._send(None)
        elif not self._is_written and now - self._since >= self._limit:
            self._is_written = True
            self._send(str(find_place(stack, read_counts(self._files.steps)) or ""))

    def _send(self, place: str | None) -> None:
        from hf_fsdp_plugin.backends.arrival_rounds import place_key, place_store

        key = place_key(self._rank)

        def request(store: Any) -> None:
            places = place_store(store)
            if place is None:
                places.delete_key(key)
            else:
                places.set(key, json.dumps({"place": place}))

        with contextlib.suppress(StoreLost):
            self._store.ask(request)
