"""This rank in the diagnosis: its files, the record of its failure with the cause on other ranks, and how it ends."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch.distributed as dist

import hf_fsdp_plugin.rank_variables as rank_variables
import hf_fsdp_plugin.time_limits as time_limits
from hf_fsdp_plugin.hangs import process_end
from hf_fsdp_plugin.hangs.calls import RankCalls
from hf_fsdp_plugin.hangs.hang_queries import HangQueries, JobStore, watch_store
from hf_fsdp_plugin.hangs.python_stacks import format_stack
from hf_fsdp_plugin.hangs.watch_files import RankFiles, write_if_possible
from hf_fsdp_plugin.problems import Problem, SpecError
from hf_fsdp_plugin.runs.exits import cause_of_abort, cause_of_end, find_first_cause
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
        2. find the first failure of all ranks: read the files of this machine, and ask the others if the connection
           to them was lost (``runs.exits.find_first_cause``), whose text is that of the launcher's summary, in brief
           (``runs.failures.tell_failure``);
        3. write message, frames and cause to the error file that torchrun prints (``process_end.write_error_file``).
        """
        failure, note = process_end.failure_of(error), ""
        write_if_possible(self.files.failure, json.dumps(failure))
        if not self.has_launcher:
            with process_end.delayed_sigterm() as is_told:
                note = find_first_cause(self.rank, self.files, partial(self._ask_others, answers=False), is_told)
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

    def tell_end(self) -> None:
        """Print why this process is ended, if the files of its machine show it, and no rank has printed it."""
        if any(path.exists() for path in (self.files.failure, self.files.ended, self.files.hang)):
            return
        if cause := cause_of_end(self.files):
            with contextlib.suppress(OSError):
                self.files.cause.touch(exist_ok=False)
                process_end.print_block(f"hf-fsdp: {cause}")

    def tell_abort(self) -> None:
        """Print why native code aborts this process, which is alone on its machine."""
        if cause := cause_of_abort(self.rank, self.files, partial(self._ask_others, answers=True)):
            process_end.write_error_file(cause)
            process_end.print_block(f"hf-fsdp: {cause}")

    def _ask_others(self, ranks: Sequence[RankCalls], *, answers: bool) -> list[RankCalls]:
        """Return the ranks of other machines after a failure.

        Args:
            answers: whether this thread has to answer other machines meanwhile.
        """
        if not self.hang_limit or not dist.is_initialized():
            return []
        store = JobStore(watch_store)
        queries = HangQueries(store, ranks=[rank.rank for rank in ranks], world_size=self.world_size)
        found = queries.ask(ranks, time_limits.ANSWER_FAILED, after_failure=True, answers=answers)
        store.join(time_limits.STOP)
        return found or []

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
