"""The diagnosis of hangs and failures in this process, if it is a rank. See :mod:`hf_fsdp_plugin.hangs`.

``install()`` arms it under every launcher. It costs some microseconds per collective, and a thread that wakes up twice
per second.

The thread of each rank records a heartbeat. The one of the lowest rank whose heartbeat is fresh looks for hangs of all
ranks of the machine, so that another rank takes over if that rank is stopped, or has a call that holds the
interpreter's lock. It asks the other machines (``hangs.hang_queries``), and ends all ranks if they hang. Without a
hang, it reads a few bytes of each rank of its machine, and one of each machine sends one message per second to the
store.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import torch.distributed as dist

import hf_fsdp_plugin.rank_variables as rank_variables
from hf_fsdp_plugin.backends.ranks.agreement import WaitListener
from hf_fsdp_plugin.backends.ranks.cluster import slurm_variables
from hf_fsdp_plugin.hangs import hang_queries, process_end, watch_files
from hf_fsdp_plugin.hangs.calls import RankCalls, read_header, record
from hf_fsdp_plugin.hangs.hang_watch import HangFinder, found_hang, write_hang
from hf_fsdp_plugin.hangs.python_stacks import HeldAbort, StackFile, format_stack, stack_file
from hf_fsdp_plugin.hangs.watch_files import FoundHang, Peer, RankFiles, write_if_possible
from hf_fsdp_plugin.integrations import call_hooks, resuming
from hf_fsdp_plugin.integrations.before_imports import RANK_VARIABLE, is_rank, may_be_rank, rank_process
from hf_fsdp_plugin.integrations.session import session
from hf_fsdp_plugin.problems import Problem, SpecError
from hf_fsdp_plugin.runs import failures
from hf_fsdp_plugin.runs.identity import attempt_folder, forget_run, identify_run
from hf_fsdp_plugin.state import process
from hf_fsdp_plugin.torch_private.functions import flight_record

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
_RECORD_SECONDS: Final = 5.0
"""Seconds for the flight record, after which the process is ended by a signal."""
_STOP_SECONDS: Final = 10.0


class Watch:
    """The diagnosis in this process: the records of its rank, and the thread.

    Attributes:
        files: the files of this rank.
        has_launcher: whether ``hf-fsdp launch`` has started this rank, and prints what it reports.
    """

    def __init__(self) -> None:
        self.files = RankFiles(Path())
        self.has_launcher = self._is_given = False
        self._is_marked = True
        self._pid = 0
        self._failed: BaseException | None = None

    @property
    def is_armed(self) -> bool:
        """Whether this process is a rank whose files are open. A process that is forked from a rank is none."""
        return self._pid == os.getpid()

    def arm(self) -> None:
        """Arm the diagnosis. Does nothing in a process that is no rank, and only :meth:`follow_thread` if it is armed.

        Raises:
            SpecError: a limit in the environment is no number of seconds (FSDP-E674).
        """
        if self.is_armed:
            self.follow_thread()
            return
        environ = {**os.environ, **slurm_variables(os.environ)}
        if not may_be_rank(environ):
            return
        try:
            (self._limit, self._is_strict), exit_seconds = rank_variables.hang_limit(), rank_variables.exit_limit()
        except ValueError as error:
            fix = "Set it to a number such as 300."
            raise SpecError([Problem(code="FSDP-E674", message=f"{error}", fix=fix)]) from None
        self._is_marked = RANK_VARIABLE in environ
        os.environ[RANK_VARIABLE] = rank_process(
            environ
        )  # before the files, without which children are no ranks either
        self._rank, self._world_size = int(environ["RANK"]), int(environ.get("WORLD_SIZE", "1"))
        self._local_size = rank_variables.variable_number(environ, "LOCAL_WORLD_SIZE", self._world_size)
        if self._world_size == 1:
            self._limit = 0.0
        self.has_launcher = bool(os.environ.pop(rank_variables.LAUNCHER_VARIABLE, ""))
        given = os.environ.pop(rank_variables.FILES_VARIABLE, "")
        self._is_given = bool(given)
        try:
            own = attempt_folder(identify_run(environ, tuple(sys.argv)), environ) / f"rank_{self._rank}"
            files = RankFiles(Path(given) if given else own)
            self._open(files, records=bool(self._limit), is_alone=self._local_size == 1)
        except OSError as error:
            text = f"hangs are not diagnosed: {error.filename}: {error.strerror}"
            process_end.print_block(f"hf-fsdp: rank {self._rank}: {text}")
            return
        self.files, self._pid = files, os.getpid()
        atexit.register(self._at_exit)
        os.register_at_fork(after_in_child=self._forget)  # does nothing if it is called again
        self._start(exit_seconds)

    def _open(self, files: RankFiles, *, records: bool, is_alone: bool) -> None:
        if not self._is_given:
            watch_files.private_folder(files.stem.parent)
            watch_files.remove_files(files.stem)
            if all(peer.is_gone() for peer in watch_files.find_peers(files.stem.parent)):
                # The first rank. An earlier run, or the ranks before a change of the number of machines, had this name.
                for path in (files.hang, files.standstill, files.cause):
                    path.unlink(missing_ok=True)
        is_read = self.has_launcher or not is_alone
        stack_file().open(
            files.stacks,
            crashes="record" if is_read else "print",
            takes_over=self.has_launcher,
            holds_abort=records and not is_read,
        )
        session().in_flight_file = files.saving
        resuming.attempt().begin(files)
        # A folder that a user has chosen may outlive the container, and the next attempt reads the record there.
        in_memory = self._is_given or "TMPDIR" not in os.environ
        if records:
            call_hooks.record_calls(files.calls, in_memory=in_memory)
        else:
            with contextlib.suppress(OSError):
                record().open(files.calls, calls=False, in_memory=in_memory)
        self.follow_thread()
        watch_files.register_rank(self._rank, files)

    def _start(self, exit_seconds: float) -> None:
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hf_fsdp_watch", daemon=True)
        self._exits = process_end.ExitWatch(exit_seconds, notice=self.notice, fail=self._fail)
        self._sigterm: process_end.HeldSigterm | None = None
        self._store = hang_queries.JobStore(hang_queries.watch_store, record().beat)
        self._place = hang_queries.PlaceInStore(self._store, self._rank)
        self._queries = hang_queries.HangQueries()
        self._peers: dict[int, Peer] = {}
        self._has_stood_still = False
        self._hangs: HangFinder | None = None
        self._group_since = self._last_turn = self._hold_until = 0.0
        if self._world_size > 1 or self._is_given:
            if not self.has_launcher and self._local_size > 1:
                self._sigterm = process_end.hold_sigterm(self.files.stacks)
            self._thread.start()

    def follow_thread(self) -> None:
        """Take the calling thread as the one that trains, which is not always the main thread of the process."""
        record().follow_thread()
        stack_file().follow_thread(threading.current_thread())

    def script_ended(self) -> None:
        """Record that the script has ended without an error. The report and the exit follow."""
        if self.is_armed:
            write_if_possible(self.files.ended, "")

    def failed(self, error: BaseException) -> None:
        """Record the exception that ends this rank. If it is a lost connection, look for the cause, and add it.

        Without ``hf-fsdp launch`` these are the steps from the failure to its summary; with it, the launcher does all
        but the first (``launcher.start_ranks``):

        1. write the failure to this rank's file (``process_end.failure_of``);
        2. find the first failure of all ranks: read the files of this machine, and ask the others if the connection
           to them was lost (``failures.find_first_cause``), whose text is that of the launcher's summary, in brief
           (``failures.tell_failure``);
        3. write message, frames and cause to the error file that torchrun prints (``process_end.write_error_file``);
        4. if the hang diagnosis has stopped the ranks, exit with its code;
        5. add the cause to the exception, whose traceback Python prints.
        """
        if not self.is_armed or self._failed is error:
            return
        self._failed = error
        note = self._record_failure(error)
        if self.files.hang.exists():
            self._exit_after_hang()
        if note:
            error.add_note(f"hf-fsdp: {note}")

    def _record_failure(self, error: BaseException) -> str:
        """Record the exception that ends this rank. Returns the cause of a lost connection; empty without one."""
        failure, note = process_end.failure_of(error), ""
        write_if_possible(self.files.failure, json.dumps(failure))
        if not self.has_launcher:
            with process_end.delayed_sigterm() as is_told:
                note = failures.find_first_cause(self._rank, self.files, self._ask_others, is_told)
        message = failure["message"] or f"exit code {getattr(error, 'code', 1)}"
        is_spec = failure["kind"] == "spec"  # all ranks have this error: one rank of each machine writes and prints it
        frames = [] if is_spec else format_stack(process_end.stack_of(failure))
        if not is_spec or rank_variables.launched_local_rank() == 0:
            cause = [f"hf-fsdp: {note}"] if note else []
            process_end.write_error_file(message, "\n".join([message, *frames, *cause]))
        return note

    def _fail(self, problem: Problem) -> None:
        self._record_failure(SpecError([problem]))
        if not self.has_launcher:
            process_end.print_block(f"hf-fsdp: {problem}")

    def notice(self, text: object) -> None:
        """Print a message for the user, or let the launcher print it."""
        if self.has_launcher:
            write_if_possible(self.files.notice, str(text))
        else:
            process_end.print_block(f"hf-fsdp: {text}")

    def _at_exit(self) -> None:
        if not self.is_armed:
            return
        files, self._pid = self.files, 0
        has_ended = not files.failure.exists() and not process_end.has_failed()
        if has_ended:
            write_if_possible(files.ended, "")
        is_free = self._stop()
        peers = watch_files.find_peers(files.stem.parent)
        if not self._is_given and all(peer.files.ended.exists() for peer in peers):  # this rank is the last one
            for peer in peers:
                watch_files.remove_files(peer.files.stem)
            forget_run(files)
        if not is_free:
            # A thread cannot be stopped in a request to the store. When it returned from C++ code while the
            # interpreter ends, pybind11 would end the process with exit code 134.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0 if has_ended else 1)

    def _stop(self) -> bool:
        """End the thread. Returns whether none is left that uses the store."""
        self._stopped.set()
        if self._sigterm is not None:
            self._sigterm.wake()
        self._store.close()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(_STOP_SECONDS)
        return self._store.join(_STOP_SECONDS)

    def close(self) -> None:
        """Undo :meth:`arm`, and remove the files of this rank."""
        process.end(resuming.ProcessAttempt)
        if not self._is_marked and is_rank():
            os.environ.pop(RANK_VARIABLE, None)
        if not self.is_armed:
            return
        self._stop()
        atexit.unregister(self._at_exit)
        process.end(StackFile)
        process.end(WaitListener)
        record().close()
        if not self._is_given:
            watch_files.remove_files(self.files.stem)
            forget_run(self.files)
        self._pid, self._failed, session().in_flight_file = 0, None, None

    def _forget(self) -> None:
        """Leave the records to the parent of this forked process."""
        if self._pid:
            process.end(StackFile)
            record().forget()
            self._pid, session().in_flight_file = 0, None

    def _run(self) -> None:
        try:
            while not self._pause():
                self._turn()
        except Exception as error:
            if not self._stopped.is_set():
                self.notice(f"rank {self._rank} is not watched any more: {type(error).__name__}: {error}")
        finally:
            if self._sigterm is not None:
                self._sigterm.release()

    def _pause(self) -> bool:
        """Wait for the next turn. Returns whether there is none."""
        pause = _PAUSE if self._group_since or not self._limit else _PAUSE_BEFORE_GROUP
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
        if cause := failures.cause_of_end(self.files):
            with contextlib.suppress(OSError):
                self.files.cause.touch(exist_ok=False)
                process_end.print_block(f"hf-fsdp: {cause}")

    def _turn(self) -> None:
        now = time.monotonic()
        if self._last_turn and now - self._last_turn > _FRESH:
            # All processes were suspended, or a call held the interpreter's lock, so the waits do not show a hang.
            self._hold_until, self._hangs = now + self._limit, None
        record().beat()
        if (held_abort := stack_file().held_abort) is not None and held_abort.has_begun():
            self._abort(held_abort)
        files = self.files
        if files.hang.exists():
            self._exit_after_hang()
        if files.standstill.exists() and not self._has_stood_still:
            self._has_stood_still = True
            self._write_flight_record()  # NCCL may end this process at its time-out
        if self._exits.poll() and not (files.failure.exists() or process_end.has_failed() or files.ended.exists()):
            write_if_possible(files.ended, "")
        if self._limit and dist.is_initialized():
            self._group_since = self._group_since or now
            self._place.poll()
            if now >= self._hold_until:
                self._look_for_hangs(now)
        record().beat()
        self._last_turn = time.monotonic()

    def _abort(self, held: HeldAbort) -> None:
        """Print why native code aborts this process, and end it."""
        stack_file().record()
        if cause := failures.cause_of_abort(self._rank, self.files, self._ask_others):
            process_end.write_error_file(cause)
            process_end.print_block(f"hf-fsdp: {cause}")
        held.end()

    def _look_for_hangs(self, now: float) -> None:
        """Look for hangs, if this rank is the one that does."""
        if len(self._peers) < self._local_size:
            for peer in watch_files.find_peers(self.files.stem.parent):
                if peer.rank not in self._peers and not peer.is_gone():  # otherwise it is one of an earlier run
                    self._peers[peer.rank] = peer
            if len(self._peers) < self._local_size and now - self._group_since < _MISSING_SECONDS:
                return
        peers = [self._peers[rank] for rank in sorted(self._peers)]
        if next((peer.rank for peer in peers if _beat_age(peer) < _FRESH), self._rank) != self._rank:
            self._hangs = None
            return
        if self._hangs is None:
            ranks = [peer.rank for peer in peers]
            self._queries = hang_queries.HangQueries(self._store, ranks=ranks, world_size=self._world_size)
            self._hangs = HangFinder(
                limit=self._limit, is_strict=self._is_strict, hang_queries=self._queries, notice=self.notice
            )
        if any(_age(peer.files.failure) < _FAILURE_SECONDS for peer in peers):
            self._hangs.answer(peers)
        elif (hang := self._hangs.poll(peers)) is not None and not self._stopped.is_set():
            log_dir = Path(os.environ.get(rank_variables.LOG_VARIABLE, ""))
            found = found_hang(hang, write_hang(hang, log_dir, limit=self._limit))
            self._end(self._queries.announce(found, socket.gethostname()))
        if self._queries.announced is not None:
            self._end(self._queries.announced)

    def _ask_others(self, ranks: Sequence[RankCalls]) -> list[RankCalls]:
        """Return the ranks of other machines after a failure. The thread that has failed calls it."""
        if not self._limit or not dist.is_initialized():
            return []
        store = hang_queries.JobStore(hang_queries.watch_store)
        own = [rank.rank for rank in ranks]
        queries = hang_queries.HangQueries(store, ranks=own, world_size=self._world_size)
        watches = threading.current_thread() is self._thread  # this thread has to answer other machines meanwhile
        found = queries.ask(ranks, _FAILURE_ANSWER_SECONDS, after_failure=True, answers=watches)
        store.join(_STOP_SECONDS)
        return found or []

    def _end(self, found: FoundHang) -> None:
        """End all ranks of this machine."""
        if not found.claim(self.files.hang):
            self._exit_after_hang()
        if not self.has_launcher:
            # The order matters: a launcher may end this process as soon as another one has exited. The error must be
            # from before the end of the ranks that are killed below.
            process_end.write_error_file(found.message, seconds_ago=1)
            process_end.print_block(found.text)
        process_end.ignore_sigterm()
        self._write_last_flight_record()
        for peer in self._peers.values():
            if peer.rank != self._rank and (watch_files.is_halted(peer.pid) or _beat_age(peer) > _FRESH):
                peer.send(signal.SIGKILL)
        process_end.exit_after_hang()

    def _exit_after_hang(self) -> None:
        """Exit because another rank has reported a hang."""
        self._write_last_flight_record()
        process_end.exit_after_hang(0.0 if self.has_launcher else _LEAD)

    def _write_last_flight_record(self) -> None:
        """Write the flight record before the process ends, which has no handlers at its exit."""
        if signal.getsignal(signal.SIGALRM) is signal.SIG_DFL:
            # The request holds the interpreter's lock, and may wait for a device that hangs.
            signal.setitimer(signal.ITIMER_REAL, _RECORD_SECONDS)
        self._write_flight_record()
        signal.setitimer(signal.ITIMER_REAL, 0)

    def _write_flight_record(self) -> None:
        if found := flight_record():
            name = f"fsdp_nccl_{time.strftime('%Y%m%d_%H%M%S')}_rank_{self._rank}.json"
            write_if_possible(Path(os.environ.get(rank_variables.LOG_VARIABLE, "")) / name, found.decode())


def _beat_age(peer: Peer) -> float:
    found = read_header(peer.files.calls)
    return found.beat if found is not None and not peer.is_gone() else float("inf")


def _age(path: Path) -> float:
    try:
        return time.time() - path.stat().st_mtime
    except OSError:
        return float("inf")


watch = process.owns(Watch)
"""The diagnosis of this process."""
