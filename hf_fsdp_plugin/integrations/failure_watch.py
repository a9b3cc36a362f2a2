"""Arms the diagnosis of hangs and failures in this process, if it is a rank. See :mod:`hf_fsdp_plugin.hangs`.

``install()`` calls it under every launcher. It costs some microseconds per collective, and a thread that wakes up twice
per second (``integrations.watch_thread``).
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import hf_fsdp_plugin.rank_variables as rank_variables
from hf_fsdp_plugin.backends.ranks.agreement import WaitListener
from hf_fsdp_plugin.backends.ranks.cluster import slurm_variables
from hf_fsdp_plugin.hangs import process_end, watch_files
from hf_fsdp_plugin.hangs.calls import record
from hf_fsdp_plugin.hangs.python_stacks import StackFile, stack_file
from hf_fsdp_plugin.hangs.watch_files import RankFiles, write_if_possible
from hf_fsdp_plugin.integrations import collective_hooks, resuming
from hf_fsdp_plugin.integrations.before_imports import RANK_VARIABLE, is_rank, may_be_rank, rank_process
from hf_fsdp_plugin.integrations.session import session
from hf_fsdp_plugin.integrations.watch_thread import WatchedRank, WatchThread
from hf_fsdp_plugin.messages import print_error
from hf_fsdp_plugin.problems import SpecError
from hf_fsdp_plugin.runs.identity import attempt_folder, forget_run, identify_run
from hf_fsdp_plugin.state import process


class Watch:
    """Registers this process as a rank: its files, handlers and thread, until its end or :meth:`close`.

    Attributes:
        own: this rank, once it is armed.
    """

    def __init__(self) -> None:
        self.own: WatchedRank | None = None
        self._thread: WatchThread | None = None
        self._is_marked = True
        self._pid = 0
        self._failed: BaseException | None = None
        self._previous_hook: Callable[..., object] | None = None

    @property
    def armed(self) -> WatchedRank | None:
        """This rank, if its files are open. A process that is forked from a rank is none."""
        return self.own if self._pid == os.getpid() else None

    @property
    def has_launcher(self) -> bool:
        """Whether ``hf-fsdp launch`` has started this rank, and prints what it reports."""
        return self.own is not None and self.own.has_launcher

    def arm(self) -> None:
        """Arm the diagnosis. In a process that is no rank, only the hook for exceptions is installed.

        Raises:
            SpecError: a limit in the environment is no number of seconds (FSDP-E674).
        """
        if self._previous_hook is None:
            self._previous_hook, sys.excepthook = sys.excepthook, self._excepthook
        if self.armed is not None:
            self.follow_thread()
            return
        environ = {**os.environ, **slurm_variables(os.environ)}
        if not may_be_rank(environ):
            return
        (limit, is_strict), exit_limit = rank_variables.hang_limit(), rank_variables.exit_limit()
        self._is_marked = RANK_VARIABLE in environ
        # Before the files, without which children are no ranks either.
        os.environ[RANK_VARIABLE] = rank_process(environ)
        rank, world_size = int(environ["RANK"]), int(environ.get("WORLD_SIZE", "1"))
        given = os.environ.pop(rank_variables.FILES_VARIABLE, "")
        stem = attempt_folder(identify_run(environ, tuple(sys.argv)), environ) / f"rank_{rank}"
        self.own = WatchedRank(
            rank=rank,
            world_size=world_size,
            local_size=rank_variables.variable_number(environ, "LOCAL_WORLD_SIZE", world_size),
            files=RankFiles(Path(given) if given else stem),
            has_launcher=bool(given),
            hang_limit=limit if world_size > 1 else 0.0,
            is_strict=is_strict,
            exit_limit=exit_limit,
        )
        try:
            self._open(self.own)
        except OSError as error:
            text = f"hangs are not diagnosed: {error.filename}: {error.strerror}"
            process_end.print_block(f"hf-fsdp: rank {rank}: {text}")
            return
        self._pid = os.getpid()
        atexit.register(self._at_exit)
        os.register_at_fork(after_in_child=self._forget)  # does nothing if it is called again
        if world_size > 1 or given:
            self._thread = WatchThread(self.own)

    def _open(self, own: WatchedRank) -> None:
        files = own.files
        if not own.has_launcher:
            for folder in (*reversed(files.stem.parents[1:3]), files.stem.parent):
                folder.mkdir(mode=0o700, exist_ok=True)
            watch_files.remove_files(files.stem)
            if all(peer.is_gone() for peer in watch_files.find_peers(files.stem.parent)):
                # The first rank. An earlier run, or the ranks before a change of the number of machines, had this name.
                watch_files.remove_files(files.stem, of_all=True)
        stack_file().open(files.stacks, records_crashes=own.has_launcher)
        session().in_flight_file = files.saving
        resuming.attempt().begin(files)
        if own.hang_limit:
            collective_hooks.record_calls(files.calls)
        else:
            with contextlib.suppress(OSError):
                record().open(files.calls, calls=False)
        self.follow_thread()
        watch_files.register_rank(own.rank, files)

    def follow_thread(self) -> None:
        """Take the calling thread as the one that trains, which is not always the main thread of the process."""
        record().follow_thread()
        stack_file().follow_thread(threading.current_thread())

    def _excepthook(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Record the exception that ends the script, and print a ``SpecError`` without a traceback."""
        self.failed(error)
        if isinstance(error, SpecError):
            print_error(error)
            for note in getattr(error, "__notes__", ()):
                process_end.print_block(note)
        else:
            (self._previous_hook or sys.__excepthook__)(kind, error, trace)

    def failed(self, error: BaseException) -> None:
        """Take the steps from the exception that ends this rank to its message. ``docs/failures.md`` shows all steps.

        1. add the remedy of an error of torch that concerns shards (``torch_functions.add_remedy``);
        2. record the failure, and find the cause of a lost connection (``WatchedRank.record_failure``);
        3. if the diagnosis of hangs has stopped the ranks, exit with its code;
        4. add the cause to the exception, whose traceback Python prints.
        """
        from hf_fsdp_plugin.integrations.run_metrics import run_metrics
        from hf_fsdp_plugin.integrations.torch_functions import add_remedy  # imports FSDP

        add_remedy(error)
        first = (str(error).splitlines() or [""])[0]
        run_metrics().end(f"failed: {type(error).__name__}: {first}")
        own = self.armed
        if own is None or self._failed is error:
            return
        self._failed = error
        note = own.record_failure(error)
        if own.files.hang.exists():
            own.exit_after_hang()
        if note:
            error.add_note(f"hf-fsdp: {note}")

    def script_ended(self) -> None:
        """Record that the script has ended without an error. The report and the exit follow."""
        if (own := self.armed) is not None:
            write_if_possible(own.files.ended, "")

    def _at_exit(self) -> None:
        own = self.armed
        if own is None:
            return
        self._pid = 0
        has_ended = not own.files.failure.exists() and not process_end.has_failed()
        if has_ended:
            write_if_possible(own.files.ended, "")
        is_free = self._stop()
        peers = watch_files.find_peers(own.files.stem.parent)
        if not own.has_launcher and all(peer.files.ended.exists() for peer in peers):  # this rank is the last one
            for peer in peers:
                watch_files.remove_files(peer.files.stem)
            forget_run(own.files)
        if not is_free:
            # A thread cannot be stopped in a request to the store. If the request returned while the interpreter ends,
            # pybind11 would end a run that has succeeded with exit code 134.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0 if has_ended else 1)

    def _stop(self) -> bool:
        """End the watching thread. Returns whether none is left that uses the store."""
        thread, self._thread = self._thread, None
        return thread is None or thread.stop()

    def close(self) -> None:
        """Undo :meth:`arm`, and remove the files of this rank."""
        process.end(resuming.ProcessAttempt)
        if self._previous_hook is not None and sys.excepthook == self._excepthook:
            sys.excepthook = self._previous_hook
        self._previous_hook = None
        if not self._is_marked and is_rank():
            os.environ.pop(RANK_VARIABLE, None)
        own = self.armed
        if own is None:
            return
        self._stop()
        atexit.unregister(self._at_exit)
        process.end(StackFile)
        process.end(WaitListener)
        record().close()
        if not own.has_launcher:
            watch_files.remove_files(own.files.stem)
            forget_run(own.files)
        self._pid, self._failed, session().in_flight_file = 0, None, None

    def _forget(self) -> None:
        """Leave the records to the parent of this forked process."""
        if self._pid:
            process.end(StackFile)
            record().forget()
            self._pid, session().in_flight_file = 0, None


watch = process.owns(Watch)
