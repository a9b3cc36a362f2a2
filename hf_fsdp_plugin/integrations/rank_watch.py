"""Arms the diagnosis of hangs and failures in this process, if it is a rank. See :mod:`hf_fsdp_plugin.hangs`.

``install()`` does this under every launcher. It costs some microseconds per collective, and a thread that wakes up
twice per second.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import sys
import threading
from pathlib import Path

from hf_fsdp_plugin.backends.ranks.cluster import slurm_variables
from hf_fsdp_plugin.backends.ranks.collective_entry import collective_waits
from hf_fsdp_plugin.hangs.call_record import record, step_count
from hf_fsdp_plugin.hangs.calls import HANG_LIMIT_VARIABLE
from hf_fsdp_plugin.hangs.hang_finder import hang_limit
from hf_fsdp_plugin.hangs.rank_exit import EXIT_LIMIT_VARIABLE as EXIT_VARIABLE
from hf_fsdp_plugin.hangs.rank_exit import (
    ExitWatch,
    delayed_sigterm,
    exit_limit,
    failure_of,
    stack_of,
    write_error_file,
)
from hf_fsdp_plugin.hangs.rank_files import (
    FILES_VARIABLE,
    LAUNCHER_VARIABLE,
    LOG_VARIABLE,
    RankFiles,
    find_peers,
    private_folder,
    register_rank,
    remove_files,
    write_atomically,
)
from hf_fsdp_plugin.hangs.rank_stacks import format_stack, stack_file
from hf_fsdp_plugin.hangs.watch_thread import Watched, Watcher, has_failed, print_block
from hf_fsdp_plugin.integrations.call_hooks import record_calls
from hf_fsdp_plugin.integrations.rank_process import RANK_VARIABLE, may_be_rank, rank_process
from hf_fsdp_plugin.integrations.resuming import begin_attempt, end_attempt
from hf_fsdp_plugin.integrations.session import session
from hf_fsdp_plugin.problems import Problem, SpecError
from hf_fsdp_plugin.rank_variables import launched_local_rank, variable_number
from hf_fsdp_plugin.runs.failure_summary import cause_of_abort, cause_of_end, find_first_cause
from hf_fsdp_plugin.runs.identity import attempt_folder, forget_run, identify_run


class Watch:
    """The diagnosis in this process.

    Attributes:
        files: the files of this rank; ``None`` while the diagnosis is not armed.
        has_launcher: whether ``hf-fsdp launch`` has started this rank, and prints what it reports.
    """

    def __init__(self) -> None:
        self.files: RankFiles | None = None
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
        limit, is_strict, exit_seconds = _limits()
        self._rank, world_size = int(environ["RANK"]), int(environ.get("WORLD_SIZE", "1"))
        self.has_launcher = bool(os.environ.pop(LAUNCHER_VARIABLE, ""))
        given = os.environ.pop(FILES_VARIABLE, "")
        self._is_given = bool(given)
        local_size = variable_number(environ, "LOCAL_WORLD_SIZE", world_size)
        try:
            own = attempt_folder(identify_run(environ, tuple(sys.argv)), environ) / f"rank_{self._rank}"
            files = RankFiles(Path(given) if given else own)
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
        if world_size > 1 or self._is_given:
            watched = Watched(
                files=files,
                rank=self._rank,
                world_size=world_size,
                local_size=local_size,
                limit=limit if world_size > 1 else 0.0,
                is_strict=is_strict,
                has_launcher=self.has_launcher,
                log_dir=Path(environ[LOG_VARIABLE]) if environ.get(LOG_VARIABLE) else None,
            )
            self._watcher = Watcher(
                watched,
                functools.partial(self._exit_watch, exit_seconds),
                cause_of_end=functools.partial(cause_of_end, files),
                cause_of_abort=functools.partial(cause_of_abort, self._rank, files),
            )
            self._watcher.start()

    def _open(self, files: RankFiles, *, records: bool, is_alone: bool) -> None:
        if not self._is_given:
            private_folder(files.stem.parent)
            remove_files(files.stem)
            if all(peer.is_gone() for peer in find_peers(files.stem.parent)):
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
        begin_attempt(files)
        if records:
            record_calls(files.calls)
        self.follow_thread()
        register_rank(self._rank, files)

    def follow_thread(self) -> None:
        """Take the calling thread as the one that trains, which is not always the main thread of the process."""
        record.follow_thread()
        stack_file.follow_thread(threading.current_thread())

    def _exit_watch(self, limit: float, watcher: Watcher) -> ExitWatch:
        def fail(problem: Problem) -> None:
            self._record(SpecError([problem]))
            if not self.has_launcher:
                print_block(f"hf-fsdp: {problem}")

        return ExitWatch(limit, notice=watcher.notice, fail=fail)

    def script_ended(self) -> None:
        """Record that the script has ended without an error."""
        if self.files is not None:
            write_atomically(self.files.ended, "")

    def failed(self, error: BaseException) -> None:
        """Record the exception that ends this rank. If it is a lost connection, look for the cause, and add it."""
        if self.files is None or self._pid != os.getpid() or self._failed is error:
            return
        self._failed = error
        note = self._record(error)
        if self.files.hang.exists() and self._watcher is not None:
            self._watcher.exit_after_hang()
        if note and not self.has_launcher:
            error.add_note(f"hf-fsdp: {note}")

    def _record(self, error: BaseException) -> str:
        if self.files is None:
            return ""
        failure, note = failure_of(error), ""
        write_atomically(self.files.failure, json.dumps(failure))
        if not self.has_launcher and self._watcher is not None:
            with delayed_sigterm() as is_told:
                note = find_first_cause(self._rank, self.files, self._watcher.ask_others, is_told)
        message = failure["message"] or f"exit code {getattr(error, 'code', 1)}"
        is_spec = failure["kind"] == "spec"  # all ranks have this error: one rank of each machine writes and prints it
        frames = [] if is_spec else format_stack(stack_of(failure))
        if not is_spec or launched_local_rank() == 0:
            write_error_file(message, "\n".join([message, *frames, *([f"hf-fsdp: {note}"] if note else [])]))
        return note

    def _at_exit(self) -> None:
        files = self.files
        if files is None or self._pid != os.getpid():
            return
        has_ended = not files.failure.exists() and not has_failed()
        if has_ended:
            write_atomically(files.ended, "")
        is_free = self._stop_watcher()
        peers = find_peers(files.stem.parent)
        if not self._is_given and all(peer.files.ended.exists() for peer in peers):  # this rank is the last one
            for peer in peers:
                remove_files(peer.files.stem)
            _remove_folders(files.stem.parent)
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
        end_attempt()
        if self.files is None:
            return
        self._stop_watcher()
        atexit.unregister(self._at_exit)
        stack_file.close()
        collective_waits.listen(lambda call: None)
        record.close()
        step_count.close()
        if not self._is_given:
            remove_files(self.files.stem)
            for path in (self.files.hang, self.files.cause):
                path.unlink(missing_ok=True)
            _remove_folders(self.files.stem.parent)
        if not self._is_marked:
            os.environ.pop(RANK_VARIABLE, None)
        self.files = self._failed = session.in_flight_file = None

    def _forget(self) -> None:
        """Leave the records to the parent of this forked process."""
        if self.files is not None:
            stack_file.close()
            record.forget()
            step_count.forget()
            self.files = self._watcher = session.in_flight_file = None


watch = Watch()
"""The diagnosis of this process."""


def _limits() -> tuple[float, bool, float]:
    """Return the limit of hangs, whether it is strict, and the limit of the exit."""
    name = HANG_LIMIT_VARIABLE
    try:
        limit, is_strict = hang_limit(None)
        name = EXIT_VARIABLE
        return limit, is_strict, exit_limit()
    except ValueError:
        message = f"{name}={os.environ.get(name)} is not a number of seconds."
        raise SpecError([Problem(code="FSDP-E674", message=message, fix="Set it to a number such as 300.")]) from None


def _remove_folders(folder: Path) -> None:
    """Remove the folders of the attempt, of the run and of this user, if they are empty."""
    with contextlib.suppress(OSError):
        forget_run(folder)
        for each in (folder, *folder.parents[:2]):
            each.rmdir()
