"""Arms the diagnosis of hangs and failures in this process, if it is a rank. See :mod:`hf_fsdp_plugin.hangs`.

``install()`` does this under every launcher. It costs some microseconds per collective, and a thread that wakes up
twice per second.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
from pathlib import Path

from hf_fsdp_plugin.backends.ranks.cluster import slurm_variables
from hf_fsdp_plugin.backends.ranks.collective_entry import wait_listeners
from hf_fsdp_plugin.hangs import rank_files
from hf_fsdp_plugin.hangs.call_record import record
from hf_fsdp_plugin.hangs.rank_exit import exit_limit, hang_limit
from hf_fsdp_plugin.hangs.rank_stacks import stack_file
from hf_fsdp_plugin.integrations import call_hooks, resuming
from hf_fsdp_plugin.integrations.rank_process import RANK_VARIABLE, may_be_rank, rank_process
from hf_fsdp_plugin.integrations.session import session
from hf_fsdp_plugin.problems import Problem, SpecError
from hf_fsdp_plugin.rank_variables import variable_number
from hf_fsdp_plugin.runs.identity import attempt_folder, forget_run, identify_run
from hf_fsdp_plugin.runs.watch_thread import Watcher, has_failed, print_block


class Watch:
    """The diagnosis in this process.

    Attributes:
        files: the files of this rank; ``None`` while the diagnosis is not armed.
        has_launcher: whether ``hf-fsdp launch`` has started this rank, and prints what it reports.
    """

    def __init__(self) -> None:
        self.files: rank_files.RankFiles | None = None
        self.has_launcher = self._is_given = self._is_marked = self._knows_forks = False
        self._rank = self._pid = 0
        self._watcher: Watcher | None = None
        self._failed: BaseException | None = None

    def arm(self) -> None:
        """Arm the diagnosis. Does nothing in a process that is no rank, and little if it is armed.

        Raises:
            SpecError: a limit in the environment is no number of seconds (FSDP-E674).
        """
        if self.files is not None:
            self.follow_thread()
            return
        environ = {**os.environ, **slurm_variables(os.environ)}
        if not may_be_rank(environ):
            return
        try:
            (limit, is_strict), exit_seconds = hang_limit(), exit_limit()
        except ValueError as error:
            fix = "Set it to a number such as 300."
            raise SpecError([Problem(code="FSDP-E674", message=f"{error}", fix=fix)]) from None
        self._rank, world_size = int(environ["RANK"]), int(environ.get("WORLD_SIZE", "1"))
        self.has_launcher = bool(os.environ.pop(rank_files.LAUNCHER_VARIABLE, ""))
        given = os.environ.pop(rank_files.FILES_VARIABLE, "")
        self._is_given = bool(given)
        local_size = variable_number(environ, "LOCAL_WORLD_SIZE", world_size)
        try:
            own = attempt_folder(identify_run(environ, tuple(sys.argv)), environ) / f"rank_{self._rank}"
            files = rank_files.RankFiles(Path(given) if given else own)
            self._open(files, records=bool(limit) and world_size > 1, is_alone=local_size == 1)
        except OSError as error:
            print_block(f"hf-fsdp: rank {self._rank}: hangs are not diagnosed: {error.filename}: {error.strerror}")
            return
        self.files, self._pid = files, os.getpid()
        self._is_marked = RANK_VARIABLE in environ
        os.environ[RANK_VARIABLE] = rank_process(environ)
        atexit.register(self._at_exit)
        if not self._knows_forks:
            self._knows_forks = True
            os.register_at_fork(after_in_child=self._forget)
        self._watcher = Watcher(
            files=files,
            rank=self._rank,
            world_size=world_size,
            local_size=local_size,
            limit=limit if world_size > 1 else 0.0,
            is_strict=is_strict,
            exit_limit=exit_seconds,
            has_launcher=self.has_launcher,
            log_dir=Path(environ[rank_files.LOG_VARIABLE]) if environ.get(rank_files.LOG_VARIABLE) else None,
        )
        if world_size > 1 or self._is_given:
            self._watcher.start()

    def _open(self, files: rank_files.RankFiles, *, records: bool, is_alone: bool) -> None:
        if not self._is_given:
            rank_files.private_folder(files.stem.parent)
            rank_files.remove_files(files.stem)
            if all(peer.is_gone() for peer in rank_files.find_peers(files.stem.parent)):
                # The first rank. An earlier run, or the ranks before a change of the number of machines, had this name.
                for path in (files.hang, files.cause):
                    path.unlink(missing_ok=True)
        is_read = self.has_launcher or not is_alone
        stack_file.open(
            files.stacks,
            crashes="record" if is_read else "print",
            takes_over=self.has_launcher,
            holds_abort=records and not is_read,
        )
        session.in_flight_file = files.saving
        resuming.begin_attempt(files)
        if records:
            call_hooks.record_calls(files.calls)
        else:
            with contextlib.suppress(OSError):
                record.open(files.calls, calls=False)
        self.follow_thread()
        rank_files.register_rank(self._rank, files)

    def follow_thread(self) -> None:
        """Take the calling thread as the one that trains, which is not always the main thread of the process."""
        record.follow_thread()
        stack_file.follow_thread(threading.current_thread())

    def script_ended(self) -> None:
        """Record that the script has ended without an error. The report and the exit follow."""
        if self.files is not None:
            rank_files.write_atomically(self.files.ended, "")

    def failed(self, error: BaseException) -> None:
        """Record the exception that ends this rank. If it is a lost connection, look for the cause, and add it."""
        if self.files is None or self._watcher is None or self._pid != os.getpid() or self._failed is error:
            return
        self._failed = error
        note = self._watcher.record_failure(error)
        if self.files.hang.exists():
            self._watcher.exit_after_hang()
        if note:
            error.add_note(f"hf-fsdp: {note}")

    def _at_exit(self) -> None:
        files = self.files
        if files is None or self._pid != os.getpid():
            return
        has_ended = not files.failure.exists() and not has_failed()
        if has_ended:
            rank_files.write_atomically(files.ended, "")
        is_free = self._stop_watcher()
        peers = rank_files.find_peers(files.stem.parent)
        if not self._is_given and all(peer.files.ended.exists() for peer in peers):  # this rank is the last one
            for peer in peers:
                rank_files.remove_files(peer.files.stem)
            forget_run(files)
        if not is_free:
            # A thread cannot be stopped in a request to the store. When it returned from C++ code while the
            # interpreter ends, pybind11 would end the process with exit code 134.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0 if has_ended else 1)

    def _stop_watcher(self) -> bool:
        watcher, self._watcher = self._watcher, None
        return watcher is None or watcher.stop()

    def disarm(self) -> None:
        """Undo :meth:`arm`, and remove the files of this rank."""
        resuming.end_attempt()
        if self.files is None:
            return
        self._stop_watcher()
        atexit.unregister(self._at_exit)
        stack_file.close()
        wait_listeners.clear()
        record.close()
        if not self._is_given:
            rank_files.remove_files(self.files.stem)
            forget_run(self.files)
        if not self._is_marked:
            os.environ.pop(RANK_VARIABLE, None)
        self.files = self._failed = session.in_flight_file = None

    def _forget(self) -> None:
        """Leave the records to the parent of this forked process."""
        if self.files is not None:
            stack_file.close()
            record.forget()
            self.files = self._watcher = session.in_flight_file = None


watch = Watch()
"""The diagnosis of this process."""
