"""This rank in the diagnosis: its files, the record of its failure with the cause on other ranks, and how it ends."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import hf_fsdp_plugin.rank_variables as rank_variables
import hf_fsdp_plugin.time_limits as time_limits
from hf_fsdp_plugin.hangs import process_end
from hf_fsdp_plugin.hangs.python_stacks import format_stack
from hf_fsdp_plugin.hangs.watch_files import RankFiles, write_if_possible
from hf_fsdp_plugin.problems import Problem, SpecError
from hf_fsdp_plugin.runs.exits import find_first_cause
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
           (``runs.exits.find_first_cause``), whose text is that of the launcher's summary, in brief
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
        self.write_last_flight_record()
        process_end.exit_after_hang(0.0 if self.has_launcher else time_limits.LEAD)

    def write_last_flight_record(self) -> None:
        """Write the flight record before the process ends, which has no handlers at its exit."""
        if signal.getsignal(signal.SIGALRM) is signal.SIG_DFL:
            # The request holds the interpreter's lock, and may wait for a device that hangs.
            signal.setitimer(signal.ITIMER_REAL, time_limits.FLIGHT_RECORD)
        self.write_flight_record()
        signal.setitimer(signal.ITIMER_REAL, 0)

    def write_flight_record(self) -> None:
        """Write torch's record of the collectives of an accelerator."""
        if found := flight_record():
            name = f"fsdp_nccl_{time.strftime('%Y%m%d_%H%M%S')}_rank_{self.rank}.json"
            write_if_possible(log_folder() / name, found.decode())


def log_folder() -> Path:
    """Return the folder of ``--log_dir``; by default the working directory."""
    return Path(os.environ.get(rank_variables.LOG_VARIABLE, ""))
