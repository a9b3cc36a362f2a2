"""The thread of each rank that watches the ranks of its machine, and ends them all if they hang.

Each watcher records a heartbeat. The one of the lowest rank whose heartbeat is fresh looks for hangs of all ranks of
the machine, so that another rank takes over if that rank is stopped, or has a call that holds the interpreter's lock.
It asks the other machines (``hang_queries``). Without a hang, a watcher reads a few bytes of each rank of its
machine, and one of each machine sends one message per second to the store.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from hf_fsdp_plugin.hangs.call_record import read_header, record
from hf_fsdp_plugin.hangs.calls import RankCalls
from hf_fsdp_plugin.hangs.hang_finder import HangFinder
from hf_fsdp_plugin.hangs.hang_queries import HangQueries, JobStore, PlaceInStore
from hf_fsdp_plugin.hangs.hang_report import FoundHang, Hang, found_hang, write_hang
from hf_fsdp_plugin.hangs.rank_exit import ExitWatch, HeldSigterm, hold_sigterm, write_error_file
from hf_fsdp_plugin.hangs.rank_files import (
    HANG,
    RUN_ID_VARIABLE,
    Peer,
    RankFiles,
    find_peers,
    is_halted,
    write_atomically,
)
from hf_fsdp_plugin.hangs.rank_stacks import HeldAbort, stack_file
from hf_fsdp_plugin.problems import SpecError

_PAUSE: Final = 0.5
_FRESH: Final = 5.0
"""Seconds after the last heartbeat from which on another rank watches the machine."""
_MISSING_SECONDS: Final = 60.0
"""Seconds from the start of the process group until ranks that have not registered are not waited for."""
_FAILURE_SECONDS: Final = 30.0
"""Seconds that the ranks have to exit after the exception of one, before a hang is looked for again."""
_FAILURE_ANSWER_SECONDS: Final = 4.0
"""Seconds that other machines have to answer after a failure: a rank that has failed too exits soon."""
_LEAD: Final = 1.0
"""Seconds that the rank which reports a hang exits before the others: a launcher reports what exits first."""
_FLUSH_SECONDS: Final = 1.0
_STOP_SECONDS: Final = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Watched:
    """What a watcher knows of its rank.

    Attributes:
        local_size: ranks of this machine.
        limit: seconds that a rank may wait in a collective; 0 for any time.
        is_strict: see :class:`HangFinder`.
        has_launcher: whether ``hf-fsdp launch`` has started the rank, and prints what it reports.
        log_dir: folder of the dump of a hang; ``None`` for the working directory.
    """

    files: RankFiles
    rank: int
    world_size: int
    local_size: int
    limit: float
    is_strict: bool
    has_launcher: bool
    log_dir: Path | None = None


class Watcher:
    """The watcher of this process.

    Args:
        exits: watches the exit of this process.
        cause_of_end: returns why another rank has exited, if the files of this machine show it.
        cause_of_abort: returns why native code aborts this process. It may ask the other machines.
    """

    def __init__(
        self,
        watched: Watched,
        exits: Callable[[Watcher], ExitWatch],
        *,
        cause_of_end: Callable[[], str] = str,
        cause_of_abort: Callable[[Callable[[Sequence[RankCalls]], Sequence[RankCalls]]], str] = lambda ask_others: "",
    ) -> None:
        self._watched = watched
        self._exits = exits(self)
        self._cause_of_end = cause_of_end
        self._cause_of_abort = cause_of_abort
        self._sigterm: HeldSigterm | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hf_fsdp_watch", daemon=True)
        self._questions = JobStore(_store_of_questions, self._beat)
        self._places = JobStore(_clone_of_store, self._beat)
        self._peers: dict[int, Peer] = {}
        self._hangs: HangFinder | None = None
        self._queries = HangQueries()
        self._group_since = self._last_turn = self._hold_until = 0.0
        self._place: PlaceInStore | None = None

    def start(self) -> None:
        if not self._watched.has_launcher and self._watched.local_size > 1:
            self._sigterm = hold_sigterm(self._watched.files.stacks)
        self._thread.start()

    def stop(self) -> bool:
        """Stop watching. Returns whether no thread is left that uses the store."""
        self._stopped.set()
        if self._sigterm is not None:
            self._sigterm.wake()
        self._questions.close()
        self._places.close()
        if self._thread is not threading.current_thread():
            self._thread.join(_STOP_SECONDS)
        return self._questions.join(_STOP_SECONDS) and self._places.join(_STOP_SECONDS)

    def notice(self, text: object) -> None:
        """Print a message for the user, or let the launcher print it."""
        if self._watched.has_launcher:
            write_atomically(self._watched.files.notice, str(text))
        else:
            print_block(f"hf-fsdp: {text}")

    def _run(self) -> None:
        try:
            while not self._pause():
                self._turn()
        except Exception as error:
            if not self._stopped.is_set():
                self.notice(f"rank {self._watched.rank} is not watched any more: {type(error).__name__}: {error}")
        finally:
            if self._sigterm is not None:
                self._sigterm.release()

    def _pause(self) -> bool:
        """Wait for the next turn. Returns whether there is none."""
        if self._sigterm is None:
            return self._stopped.wait(_PAUSE)
        if self._sigterm.wait(_PAUSE) and not self._stopped.is_set():
            self._say_why()
            return True
        return self._stopped.is_set()

    def _say_why(self) -> None:
        """Print why this process is ended, if the files of its machine show it, and no rank has said it."""
        files = self._watched.files
        if any(path.exists() for path in (files.failure, files.ended, files.hang)):
            return
        if cause := self._cause_of_end():
            with contextlib.suppress(OSError):
                files.cause.touch(exist_ok=False)
                print_block(f"hf-fsdp: {cause}")

    def _turn(self) -> None:
        now = time.monotonic()
        if self._last_turn and now - self._last_turn > _FRESH:
            # All processes were suspended, or a call held the interpreter's lock, so the waits do not show a hang.
            self._hold_until, self._hangs = now + self._watched.limit, None
        self._beat()
        if stack_file.held_abort is not None and stack_file.held_abort.has_begun():
            self._abort(stack_file.held_abort)
        files = self._watched.files
        if files.hang.exists():
            self.exit_after_hang()
        if self._exits.poll() and not files.failure.exists() and not has_failed() and not files.ended.exists():
            write_atomically(files.ended, "")
        if self._watched.limit and _has_group():
            self._group_since = self._group_since or now
            self._write_place()
            if now >= self._hold_until:
                self._watch(now)
        self._beat()
        self._last_turn = time.monotonic()

    def _abort(self, held: HeldAbort) -> None:
        """Print why native code aborts this process, and end it."""
        stack_file.record()
        if cause := self._cause_of_abort(functools.partial(self.ask_others, answers=True)):
            write_error_file(cause)
            print_block(f"hf-fsdp: {cause}")
        held.end()

    def _beat(self) -> None:
        record.beat()

    def _write_place(self) -> None:
        if self._place is None:
            from hf_fsdp_plugin.backends.ranks.collective_entry import DEFAULT_LIMIT, arrival_limit

            limit = DEFAULT_LIMIT
            with contextlib.suppress(SpecError):  # the first call that needs it raises this error
                limit = arrival_limit()
            self._place = PlaceInStore(self._places, self._watched.rank, self._watched.files, limit / 2)
        self._place.poll()

    def _watch(self, now: float) -> None:
        """Look for hangs, if this rank is the one that does."""
        watched = self._watched
        if len(self._peers) < watched.local_size:
            for peer in find_peers(watched.files.stem.parent):
                if peer.rank not in self._peers and not peer.is_gone():  # otherwise it is one of an earlier run
                    self._peers[peer.rank] = peer
            if len(self._peers) < watched.local_size and now - self._group_since < _MISSING_SECONDS:
                return
        peers = [self._peers[rank] for rank in sorted(self._peers)]
        if next((peer.rank for peer in peers if _beat_age(peer) < _FRESH), watched.rank) != watched.rank:
            self._hangs = None
            return
        if self._hangs is None:
            self._queries = self._make_queries(self._questions, [peer.rank for peer in peers])
            self._hangs = HangFinder(
                limit=watched.limit, is_strict=watched.is_strict, hang_queries=self._queries, notice=self.notice
            )
        is_failing = any(_age(peer.files.failure) < _FAILURE_SECONDS for peer in peers)
        hang = None
        if is_failing:
            self._hangs.answer(peers)
        else:
            hang = self._hangs.poll(peers)
        if hang is not None and not self._stopped.is_set():
            self._report(hang)
        if self._queries.announced:
            self._end(self._announced_hang())

    def ask_others(self, ranks: Sequence[RankCalls], *, answers: bool = False) -> list[RankCalls]:
        """Return the ranks of other machines after a failure. The thread that has failed calls it.

        Args:
            answers: whether the calling thread is the one that watches, which has to answer other machines meanwhile.
        """
        if not self._watched.limit or not _has_group():
            return []
        store = JobStore(_store_of_questions)
        found = self._make_queries(store, [rank.rank for rank in ranks]).ask(
            ranks, _FAILURE_ANSWER_SECONDS, after_failure=True, answers=answers
        )
        store.join(_STOP_SECONDS)
        return found or []

    def _make_queries(self, store: JobStore, ranks: Sequence[int]) -> HangQueries:
        if len(ranks) >= self._watched.world_size:
            return HangQueries()
        host, machine = socket.gethostname(), os.environ.get("GROUP_RANK") or os.environ.get("SLURM_NODEID")
        name = f"machine {machine} ({host})" if machine else f"machine {host}"
        return HangQueries(store, name=name, ranks=ranks, world_size=self._watched.world_size)

    def _report(self, hang: Hang) -> None:
        dump = write_hang(hang, self._watched.log_dir, limit=self._watched.limit)
        found = found_hang(hang, dump)
        announced = {"machine": socket.gethostname(), "text": found.message, "code": found.code, "same": found.same_as}
        if not self._queries.announce(announced):
            found = self._announced_hang()
        self._end(found)

    def _announced_hang(self) -> FoundHang:
        told = self._queries.announced
        message = f"{told.get('machine', 'another machine')}: {told.get('text', '')}"
        return FoundHang(
            text=f"hf-fsdp: the ranks of this machine were stopped because another failed: {message}",
            message=message,
            code=told.get("code", ""),
            same_as=told.get("same", ""),
            elsewhere=True,
        )

    def _end(self, found: FoundHang) -> None:
        """End all ranks of this machine."""
        if not found.claim(self._watched.files.hang):
            self.exit_after_hang()
        if not self._watched.has_launcher:
            # The order matters: a launcher may end this process as soon as another one has exited.
            write_error_file(found.message, seconds_ago=1)  # before the end of the ranks that are killed below
            print_block(found.text)
        for peer in self._peers.values():
            if peer.rank != self._watched.rank and (is_halted(peer.pid) or _beat_age(peer) > _FRESH):
                peer.send(signal.SIGKILL)
        _exit()

    def exit_after_hang(self) -> None:
        """Exit because another rank has reported a hang."""
        if not self._watched.has_launcher:
            time.sleep(_LEAD)
        _exit()


def print_block(text: str) -> None:
    """Print lines to stderr in one piece, also if another thread has stopped while it printed."""
    content = f"{text}\n".encode(errors="backslashreplace")
    with contextlib.suppress(OSError):
        while content:
            content = content[os.write(2, content) :]


def has_failed() -> bool:
    """Return whether the script has ended with an exception."""
    return getattr(sys, "last_type", None) is not None


def _exit() -> None:
    def flush() -> None:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()

    flushing = threading.Thread(target=flush, daemon=True)  # the main thread may hold the locks of the streams
    flushing.start()
    flushing.join(_FLUSH_SECONDS)
    for child in multiprocessing.active_children():  # such as a worker of a data loader that never returns
        child.kill()
    os._exit(HANG)


def _has_group() -> bool:
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and bool(getattr(distributed, "is_initialized", bool)())


def _store_of_questions() -> Any:
    import torch.distributed as dist

    return dist.PrefixStore(f"hf_fsdp_watch/{os.environ.get(RUN_ID_VARIABLE, '')}", _clone_of_store())


def _clone_of_store() -> Any:
    """Return a connection of its own to the store of the default process group."""
    from hf_fsdp_plugin.torch_private.functions import default_store

    return default_store().clone()


def _beat_age(peer: Peer) -> float:
    found = read_header(peer.files.calls)
    return found.beat if found is not None and not peer.is_gone() else float("inf")


def _age(path: Path) -> float:
    try:
        return time.time() - path.stat().st_mtime
    except OSError:
        return float("inf")
