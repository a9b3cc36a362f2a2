"""The thread of each rank that watches the ranks of its machine, and ends them all if they hang.

Each watcher records a heartbeat. The one of the lowest rank whose heartbeat is fresh looks for hangs of all ranks of
the machine, so that another rank takes over if that rank is stopped, or has a call that holds the interpreter's lock.
It asks the other machines (``hang_queries``). Without a hang, a watcher reads a few bytes of each rank of its
machine, and one of each machine sends one message per second to the store.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch.distributed as dist

from hf_fsdp_plugin.hangs import rank_exit, rank_files
from hf_fsdp_plugin.hangs.call_record import read_header, record
from hf_fsdp_plugin.hangs.calls import RankCalls
from hf_fsdp_plugin.hangs.hang_finder import HangFinder
from hf_fsdp_plugin.hangs.hang_queries import HangQueries, JobStore, PlaceInStore
from hf_fsdp_plugin.hangs.hang_report import FoundHang, found_hang, write_hang
from hf_fsdp_plugin.hangs.rank_files import Peer, RankFiles, write_atomically
from hf_fsdp_plugin.hangs.rank_stacks import HeldAbort, format_stack, stack_file
from hf_fsdp_plugin.problems import Problem, SpecError
from hf_fsdp_plugin.rank_variables import launched_local_rank
from hf_fsdp_plugin.runs.failures import cause_of_abort, cause_of_end, find_first_cause
from hf_fsdp_plugin.torch_private.functions import default_store

_PAUSE: Final = 0.5
_PAUSE_BEFORE_GROUP: Final = 0.1
"""Seconds between two looks for the process group: a rank may be stopped half a second after it was made."""
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


@dataclass(kw_only=True, eq=False)
class Watcher:
    """The watcher of this process: what it knows of its rank, and the thread.

    Attributes:
        local_size: ranks of this machine.
        limit: seconds that a rank may wait in a collective; 0 for any time.
        is_strict: see :class:`HangFinder`.
        exit_limit: seconds for which threads may keep the process running after the script has ended.
        has_launcher: whether ``hf-fsdp launch`` has started the rank, and prints what it reports.
        log_dir: folder of the dump of a hang; ``None`` for the working directory.
    """

    files: RankFiles
    rank: int
    world_size: int
    local_size: int
    limit: float
    is_strict: bool
    exit_limit: float
    has_launcher: bool
    log_dir: Path | None = None

    def __post_init__(self) -> None:
        self._exits = rank_exit.ExitWatch(self.exit_limit, notice=self.notice, fail=self._fail)
        self._sigterm: rank_exit.HeldSigterm | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hf_fsdp_watch", daemon=True)
        self._store = JobStore(_watch_store, record.beat)
        self._peers: dict[int, Peer] = {}
        self._hangs: HangFinder | None = None
        self._queries = HangQueries()
        self._group_since = self._last_turn = self._hold_until = 0.0
        self._place = PlaceInStore(self._store, self.rank)

    def start(self) -> None:
        if not self.has_launcher and self.local_size > 1:
            self._sigterm = rank_exit.hold_sigterm(self.files.stacks)
        self._thread.start()

    def stop(self) -> bool:
        """Stop watching. Returns whether no thread is left that uses the store."""
        self._stopped.set()
        if self._sigterm is not None:
            self._sigterm.wake()
        self._store.close()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(_STOP_SECONDS)
        return self._store.join(_STOP_SECONDS)

    def notice(self, text: object) -> None:
        """Print a message for the user, or let the launcher print it."""
        if self.has_launcher:
            write_atomically(self.files.notice, str(text))
        else:
            print_block(f"hf-fsdp: {text}")

    def record_failure(self, error: BaseException) -> str:
        """Record the exception that ends this rank. Returns the cause of a lost connection; empty without one."""
        failure, note = rank_exit.failure_of(error), ""
        write_atomically(self.files.failure, json.dumps(failure))
        if not self.has_launcher:
            with rank_exit.delayed_sigterm() as is_told:
                note = find_first_cause(self.rank, self.files, self.ask_others, is_told)
        message = failure["message"] or f"exit code {getattr(error, 'code', 1)}"
        is_spec = failure["kind"] == "spec"  # all ranks have this error: one rank of each machine writes and prints it
        frames = [] if is_spec else format_stack(rank_exit.stack_of(failure))
        if not is_spec or launched_local_rank() == 0:
            cause = [f"hf-fsdp: {note}"] if note else []
            rank_exit.write_error_file(message, "\n".join([message, *frames, *cause]))
        return note

    def _fail(self, problem: Problem) -> None:
        self.record_failure(SpecError([problem]))
        if not self.has_launcher:
            print_block(f"hf-fsdp: {problem}")

    def _run(self) -> None:
        try:
            while not self._pause():
                self._turn()
        except Exception as error:
            if not self._stopped.is_set():
                self.notice(f"rank {self.rank} is not watched any more: {type(error).__name__}: {error}")
        finally:
            if self._sigterm is not None:
                self._sigterm.release()

    def _pause(self) -> bool:
        """Wait for the next turn. Returns whether there is none."""
        pause = _PAUSE if self._group_since or not self.limit else _PAUSE_BEFORE_GROUP
        if self._sigterm is None:
            return self._stopped.wait(pause)
        if self._sigterm.wait(pause) and not self._stopped.is_set():
            self._say_why()
            return True
        return self._stopped.is_set()

    def _say_why(self) -> None:
        """Print why this process is ended, if the files of its machine show it, and no rank has said it."""
        if any(path.exists() for path in (self.files.failure, self.files.ended, self.files.hang)):
            return
        if cause := cause_of_end(self.files):
            with contextlib.suppress(OSError):
                self.files.cause.touch(exist_ok=False)
                print_block(f"hf-fsdp: {cause}")

    def _turn(self) -> None:
        now = time.monotonic()
        if self._last_turn and now - self._last_turn > _FRESH:
            # All processes were suspended, or a call held the interpreter's lock, so the waits do not show a hang.
            self._hold_until, self._hangs = now + self.limit, None
        record.beat()
        if stack_file.held_abort is not None and stack_file.held_abort.has_begun():
            self._abort(stack_file.held_abort)
        files = self.files
        if files.hang.exists():
            self.exit_after_hang()
        if self._exits.poll() and not files.failure.exists() and not has_failed() and not files.ended.exists():
            write_atomically(files.ended, "")
        if self.limit and dist.is_initialized():
            self._group_since = self._group_since or now
            self._place.poll()
            if now >= self._hold_until:
                self._watch(now)
        record.beat()
        self._last_turn = time.monotonic()

    def _abort(self, held: HeldAbort) -> None:
        """Print why native code aborts this process, and end it."""
        stack_file.record()
        if cause := cause_of_abort(self.rank, self.files, functools.partial(self.ask_others, answers=True)):
            rank_exit.write_error_file(cause)
            print_block(f"hf-fsdp: {cause}")
        held.end()

    def _watch(self, now: float) -> None:
        """Look for hangs, if this rank is the one that does."""
        if len(self._peers) < self.local_size:
            for peer in rank_files.find_peers(self.files.stem.parent):
                if peer.rank not in self._peers and not peer.is_gone():  # otherwise it is one of an earlier run
                    self._peers[peer.rank] = peer
            if len(self._peers) < self.local_size and now - self._group_since < _MISSING_SECONDS:
                return
        peers = [self._peers[rank] for rank in sorted(self._peers)]
        if next((peer.rank for peer in peers if _beat_age(peer) < _FRESH), self.rank) != self.rank:
            self._hangs = None
            return
        if self._hangs is None:
            self._queries = self._make_queries(self._store, [peer.rank for peer in peers])
            self._hangs = HangFinder(
                limit=self.limit, is_strict=self.is_strict, hang_queries=self._queries, notice=self.notice
            )
        if any(_age(peer.files.failure) < _FAILURE_SECONDS for peer in peers):
            self._hangs.answer(peers)
        elif (hang := self._hangs.poll(peers)) is not None and not self._stopped.is_set():
            found = found_hang(hang, write_hang(hang, self.log_dir, limit=self.limit))
            self._end(self._queries.announce(found, socket.gethostname()))
        if self._queries.announced is not None:
            self._end(self._queries.announced)

    def ask_others(self, ranks: Sequence[RankCalls], *, answers: bool = False) -> list[RankCalls]:
        """Return the ranks of other machines after a failure. The thread that has failed calls it.

        Args:
            answers: whether the calling thread is the one that watches, which has to answer other machines meanwhile.
        """
        if not self.limit or not dist.is_initialized():
            return []
        store = JobStore(_watch_store)
        found = self._make_queries(store, [rank.rank for rank in ranks]).ask(
            ranks, _FAILURE_ANSWER_SECONDS, after_failure=True, answers=answers
        )
        store.join(_STOP_SECONDS)
        return found or []

    def _make_queries(self, store: JobStore, ranks: Sequence[int]) -> HangQueries:
        if len(ranks) >= self.world_size:
            return HangQueries()
        host, machine = socket.gethostname(), os.environ.get("GROUP_RANK") or os.environ.get("SLURM_NODEID")
        name = f"machine {machine} ({host})" if machine else f"machine {host}"
        return HangQueries(store, name=name, ranks=ranks, world_size=self.world_size)

    def _end(self, found: FoundHang) -> None:
        """End all ranks of this machine."""
        if not found.claim(self.files.hang):
            self.exit_after_hang()
        if not self.has_launcher:
            # The order matters: a launcher may end this process as soon as another one has exited. The error must be
            # from before the end of the ranks that are killed below.
            rank_exit.write_error_file(found.message, seconds_ago=1)
            print_block(found.text)
        _ignore_sigterm()
        for peer in self._peers.values():
            if peer.rank != self.rank and (rank_files.is_halted(peer.pid) or _beat_age(peer) > _FRESH):
                peer.send(signal.SIGKILL)
        _exit()

    def exit_after_hang(self) -> None:
        """Exit because another rank has reported a hang."""
        if not self.has_launcher:
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


def _ignore_sigterm() -> None:
    """Keep the exit code of this process, to which a launcher sends SIGTERM as soon as another rank has been killed.

    Python's own ``signal.signal`` works in the main thread only, which may never return.
    """
    libc = ctypes.CDLL(None)
    libc.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
    libc.signal(signal.SIGTERM, signal.SIG_IGN.value)


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
    os._exit(rank_files.HANG)


def _watch_store() -> dist.Store:
    """Return a connection of its own to the store of the default process group."""
    return dist.PrefixStore(f"hf_fsdp_watch/{os.environ.get(rank_files.RUN_ID_VARIABLE, '')}", default_store().clone())


def _beat_age(peer: Peer) -> float:
    found = read_header(peer.files.calls)
    return found.beat if found is not None and not peer.is_gone() else float("inf")


def _age(path: Path) -> float:
    try:
        return time.time() - path.stat().st_mtime
    except OSError:
        return float("inf")
