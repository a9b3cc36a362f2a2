"""This rank in the diagnosis: the record of its failure, its watching thread, and how it ends.

The thread of each rank records a heartbeat. The one of the lowest rank whose heartbeat is fresh looks for hangs of all
ranks of the machine, so that another rank takes over if that rank is stopped, or has a call that holds the
interpreter's lock. It asks the other machines (``hangs.hang_queries``), and ends all ranks if they hang. Without a
hang, it reads a few bytes of each rank of its machine, and one of each machine sends one message per second to the
store.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

import hf_fsdp_plugin.rank_variables as rank_variables
import hf_fsdp_plugin.time_limits as time_limits
from hf_fsdp_plugin.hangs import process_end, watch_files
from hf_fsdp_plugin.hangs.calls import read_header, record
from hf_fsdp_plugin.hangs.hang_queries import HangQueries, JobStore, watch_store
from hf_fsdp_plugin.hangs.hang_texts import found_hang
from hf_fsdp_plugin.hangs.hang_watch import HangFinder, write_hang
from hf_fsdp_plugin.hangs.python_stacks import format_stack
from hf_fsdp_plugin.hangs.watch_files import FoundHang, Peer, RankFiles, write_if_possible
from hf_fsdp_plugin.problems import Problem, SpecError
from hf_fsdp_plugin.runs.failures import find_first_cause
from hf_fsdp_plugin.torch_private.functions import flight_record


@dataclass(frozen=True, kw_only=True, slots=True)
class WatchedRank:
    """This process, as a rank.

    Attributes:
        local_size: number of ranks of this machine.
        has_launcher: whether ``hf-fsdp launch`` has started this rank, and prints what it reports.
        hang_limit: seconds that a rank may wait in a collective; 0 switches the diagnosis of hangs off.
        is_strict: whether this limit also holds for ranks that are busy.
        exit_limit: seconds for which threads may keep this process running after its script has ended.
    """

    rank: int
    world_size: int
    local_size: int
    files: RankFiles
    has_launcher: bool
    hang_limit: float
    is_strict: bool
    exit_limit: float

    def notice(self, text: object) -> None:
        """Print a message for the user, or let the launcher print it."""
        if self.has_launcher:
            write_if_possible(self.files.notice, str(text))
        else:
            process_end.print_block(f"hf-fsdp: {text}")

    def record_failure(self, error: BaseException) -> str:
        """Record the exception that ends this rank. Returns the cause of a lost connection; empty without one.

        With ``hf-fsdp launch``, which does the rest (``launcher.start_ranks``), only the first of these steps:

        1. write the failure to this rank's file (``process_end.failure_of``);
        2. find the first failure of the ranks of this machine, if the connection was lost
           (``runs.failures.find_first_cause``), whose text is that of the launcher's summary, in brief
           (``runs.failures.tell_failure``);
        3. write message, frames and cause to the error file that torchrun prints (``process_end.write_error_file``).
        """
        failure, note = process_end.failure_of(error), ""
        write_if_possible(self.files.failure, json.dumps(failure))
        if not self.has_launcher:
            is_main = threading.current_thread() is threading.main_thread()
            if has_default := is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
                # A launcher sends it as soon as another rank has exited. This process exits by itself.
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
            note = find_first_cause(self.rank, self.files)
            if has_default:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
        message = failure["message"] or f"exit code {getattr(error, 'code', 1)}"
        is_spec = failure["kind"] == "spec"  # all ranks have this error: one rank of each machine writes and prints it
        frames = [] if is_spec else format_stack(process_end.stack_of(failure))
        if not is_spec or rank_variables.launched_local_rank() == 0:
            cause = [f"hf-fsdp: {note}"] if note else []
            process_end.write_error_file(message, "\n".join([message, *frames, *cause]))
        return note

    def record_problem(self, problem: Problem) -> None:
        """Record a problem that ends this rank, and print it."""
        self.record_failure(SpecError([problem]))
        if not self.has_launcher:
            process_end.print_block(f"hf-fsdp: {problem}")

    def exit_after_hang(self) -> None:
        """Exit because another rank has reported a hang."""
        process_end.ignore_sigterm()  # a launcher sends it as soon as that rank has exited
        self.write_last_flight_record()
        process_end.exit_after_hang(0.0 if self.has_launcher else time_limits.LEAD)

    def write_last_flight_record(self) -> bool:
        """Write the flight record before the process ends, which has no handlers at its exit; ``False`` without one."""
        if signal.getsignal(signal.SIGALRM) is signal.SIG_DFL:
            # The request holds the interpreter's lock, and may wait for a device that hangs.
            signal.setitimer(signal.ITIMER_REAL, time_limits.FLIGHT_RECORD)
        is_written = self.write_flight_record()
        signal.setitimer(signal.ITIMER_REAL, 0)
        return is_written

    def write_flight_record(self) -> bool:
        """Write torch's record of the collectives of an accelerator; ``False`` without one."""
        if found := flight_record():
            name = f"fsdp_nccl_{time.strftime('%Y%m%d_%H%M%S')}_rank_{self.rank}.json"
            write_if_possible(log_folder() / name, found.decode())
        return bool(found)


def log_folder() -> Path:
    """Return the folder of ``--log_dir``; by default the working directory."""
    return Path(os.environ.get(rank_variables.LOG_VARIABLE, ""))


class WatchThread:
    """The thread of a rank.

    Args:
        own: this rank.
    """

    def __init__(self, own: WatchedRank) -> None:
        self._own, self._files = own, own.files
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hf_fsdp_watch", daemon=True)
        self._exits = process_end.ExitWatch(own.exit_limit, notice=own.notice, fail=own.record_problem)
        self._store = JobStore(watch_store, record().beat)
        self._queries = HangQueries()
        self._peers: dict[int, Peer] = {}
        self._has_stood_still = False
        self._hangs: HangFinder | None = None
        self._group_since = self._last_turn = self._hold_until = 0.0
        self._thread.start()

    def stop(self) -> bool:
        """End the thread, and its request to the store. Returns whether none of both is left after a time limit."""
        self._stopped.set()
        self._store.close()
        if self._thread is not threading.current_thread():
            self._thread.join(time_limits.STOP)
        return self._store.join(time_limits.STOP)

    def _run(self) -> None:
        try:
            while not self._stopped.wait(self._pause):
                self._turn()
        except Exception as error:
            if not self._stopped.is_set():
                self._own.notice(f"rank {self._own.rank} is not watched any more: {type(error).__name__}: {error}")

    @property
    def _pause(self) -> float:
        """Seconds until the next turn."""
        return time_limits.TURN if self._group_since or not self._own.hang_limit else time_limits.FIRST_TURN

    def _turn(self) -> None:
        now, files = time.monotonic(), self._files
        if self._last_turn and now - self._last_turn > time_limits.FRESH:
            # All processes were suspended, or a call held the interpreter's lock, so the waits do not show a hang.
            self._hold_until, self._hangs = now + self._own.hang_limit, None
        record().beat()
        if files.hang.exists():
            self._own.exit_after_hang()
        if files.standstill.exists() and not self._has_stood_still:
            self._has_stood_still = True
            self._own.write_flight_record()  # NCCL may end this process at its time-out
        if self._exits.poll() and not (files.failure.exists() or process_end.has_failed() or files.ended.exists()):
            write_if_possible(files.ended, "")
        if self._own.hang_limit and dist.is_initialized():
            self._group_since = self._group_since or now
            if now >= self._hold_until:
                self._look_for_hangs(now)
        record().beat()
        self._last_turn = time.monotonic()

    def _look_for_hangs(self, now: float) -> None:
        """Look for hangs, if this rank is the one that does."""
        own = self._own
        if len(self._peers) < own.local_size:
            found = watch_files.find_peers(self._files.stem.parent)
            self._peers |= {peer.rank: peer for peer in found if not peer.is_gone()}  # others are of an earlier run
            if len(self._peers) < own.local_size and now - self._group_since < time_limits.MISSING:
                return
        peers = [self._peers[rank] for rank in sorted(self._peers)]
        if next((peer.rank for peer in peers if _beat_age(peer) < time_limits.FRESH), own.rank) != own.rank:
            self._hangs = None
            return
        if self._hangs is None:
            ranks = [peer.rank for peer in peers]
            self._queries = HangQueries(self._store, ranks=ranks, world_size=own.world_size)
            self._hangs = HangFinder(
                limit=own.hang_limit, is_strict=own.is_strict, hang_queries=self._queries, notice=own.notice
            )
        if any(_age(peer.files.failure) < time_limits.FAILED for peer in peers):
            self._hangs.answer(peers)
        elif (hang := self._hangs.poll(peers)) is not None and not self._stopped.is_set():
            dump = write_hang(hang, log_folder(), limit=own.hang_limit)
            self._end(self._queries.announce(found_hang(hang, dump), socket.gethostname()))
        if self._queries.announced is not None:
            self._end(self._queries.announced)

    def _end(self, found: FoundHang) -> None:
        """End all ranks of this machine."""
        if not found.claim(self._files.hang):
            self._own.exit_after_hang()
        if not self._own.has_launcher:
            # The order matters: a launcher may end this process as soon as another one has exited. The error must be
            # from before the end of the ranks that are killed below.
            process_end.write_error_file(found.message, seconds_ago=1)
            process_end.print_block(found.text)
        process_end.ignore_sigterm()
        is_recorded = self._own.write_last_flight_record()
        for peer in self._peers.values():
            is_late = watch_files.is_halted(peer.pid) or _beat_age(peer) > time_limits.FRESH
            if peer.rank != self._own.rank and is_late:
                peer.send(signal.SIGKILL)
        # Until the other ranks have seen the hang, and write their records: a launcher ends them after this exit.
        process_end.exit_after_hang(time_limits.TURN if is_recorded else 0.0)


def _beat_age(peer: Peer) -> float:
    found = read_header(peer.files.calls)
    return found.beat if found is not None and not peer.is_gone() else float("inf")


def _age(path: Path) -> float:
    try:
        return time.time() - path.stat().st_mtime
    except OSError:
        return float("inf")
