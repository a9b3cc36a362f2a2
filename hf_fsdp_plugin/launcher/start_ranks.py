"""The attempts of a run: the ranks of this machine are started, watched, and started again after a failure.

Torch's agent meets the other machines, sets torch's variables, starts the processes and handles signals. Added to it
is what users miss in it: ranks have a moment to fail by themselves before they are stopped, so that the summary names
the first cause; all machines stop at once; a failure that would come again is not tried again; and the exit code is
that of the script.

A failure takes these steps, which ``docs/failures.md`` shows for all launchers: a rank records it, the launcher sees
the record or the exit (:meth:`Attempt.is_over`), asks the other ranks for their stacks, and announces it to the other
machines. It gives its ranks time to fail by themselves, stops them, and reads from their files how each has exited
(:meth:`Attempt.result`).
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Final

import hf_fsdp_plugin.time_limits as time_limits
from hf_fsdp_plugin.hangs.process_end import print_block
from hf_fsdp_plugin.hangs.watch_files import FoundHang, RankFiles, scratch_folder, write_if_possible
from hf_fsdp_plugin.launcher.rank_processes import RankJob, RankOutput, RankProcess, rank_env
from hf_fsdp_plugin.launcher.rendezvous import Announced, Rendezvous, RendezvousError, SignalException, wait_until
from hf_fsdp_plugin.runs.attempts import assess_attempt, refuse_restart
from hf_fsdp_plugin.runs.failures import AttemptResult, first_failure, summarize_exit, tell_failure
from hf_fsdp_plugin.text import plural
from hf_fsdp_plugin.torch_private.elastic import AttemptAgent, prepare_torch

if TYPE_CHECKING:
    from torch.distributed.elastic.agent.server.api import WorkerGroup

_FORWARDED: Final = (signal.SIGUSR1, signal.SIGUSR2)


def run_attempts(job: RankJob, rendezvous: Rendezvous) -> int:
    """Run the ranks until they succeed, or until no restart is left or helps. Returns the exit code of the launcher.

    After a failure, its message is printed. All machines take the account of the machine that failed first, and decide
    by it whether the ranks are started again.

    Raises:
        SpecError: the machines did not meet.
    """
    try:
        while True:
            began = time.monotonic()
            result = run_once(job, rendezvous)
            seconds = time.monotonic() - began
            restarts = rendezvous.restarts
            _print_failures(job, result)
            if not result.exit_code or not restarts.max_restarts:
                return result.exit_code
            attempt = rendezvous.agree(assess_attempt(result, machine=rendezvous.machine, seconds=seconds))
            if (refusal := refuse_restart(attempt, restarts)) is not None:
                print(f"hf-fsdp: {refusal}", file=sys.stderr, flush=True)
                return result.exit_code
            after = rendezvous.restarts = restarts.after(attempt)
            job.notice(f"{after.title}: {after.last_failure}")
    except SignalException as stop:  # a signal between two attempts
        return 128 + int(stop.sigval)
    finally:
        rendezvous.shutdown()


def run_once(job: RankJob, rendezvous: Rendezvous) -> AttemptResult:
    """Run the ranks of this machine once, and return how they exited. None of them is left afterwards.

    Torch's agent (``torch_private.elastic``) takes these steps:

    1. The machines meet (torch's handler, ``Rendezvous.open``), exchange what they know (``Rendezvous.meet``), and
       ``RankJob.on_start`` is called (``Attempt.begin``).
    2. Each rank gets its environment, over that of the launcher and torch's variables
       (``ranks.rank_env``), and the files of its output (``Attempt.prepare``).
    3. Torch starts the processes, whose ids ``Attempt.take_pids`` gets. Each runs ``run_script.run_rank``: it arms
       the diagnosis, calls ``install()``, and runs the script.
    4. Every 50 ms, the ranks are looked at, until all have exited or were stopped (``Attempt.is_over``).
    5. A signal to the launcher is sent on to the ranks, which have time to exit (``Attempt.end``).

    Raises:
        SpecError: the machines did not meet, or are about to run different things.
    """
    prepare_torch()
    handler = rendezvous.open()
    with (
        tempfile.TemporaryDirectory(prefix="hf_fsdp_", dir=scratch_folder()) as scratch,
        tempfile.TemporaryDirectory(prefix="hf_fsdp_") as output,
        Attempt(job, rendezvous, Path(scratch), Path(output)) as attempt,
    ):
        try:
            agent = AttemptAgent(attempt, handler, job.command, num_local=job.num_local, role=job.role)
            if agent.run() is None:
                raise rendezvous.not_met(None)
            return attempt.result()
        except SignalException as stop:
            return attempt.result(signal_number=stop.sigval)
        except BrokenPipeError:
            return attempt.result(signal_number=signal.SIGPIPE)
        except (RendezvousError, RuntimeError, OSError) as error:
            if attempt.ranks:
                raise
            raise rendezvous.not_met(error) from error


def _print_failures(job: RankJob, result: AttemptResult) -> None:
    live = [rank.rank for rank in (result.exits if job.shown == "all" else result.exits[:1])]
    sys.stdout.flush()
    if text := tell_failure(result, debug=job.debug, shown_live=live):
        print(text, file=sys.stderr, flush=True)
        if job.log_dir is not None and result.first is not None:
            print(f"hf-fsdp: all output is in {job.log_dir}{os.sep}rank_*.log", file=sys.stderr)


class Attempt:
    """The ranks of this machine in one attempt. Torch's agent calls the methods without an underscore, in this order.

    Args:
        scratch: temporary folder for the files of the ranks.
        output: temporary folder for their output, which may be long.

    Attributes:
        ranks: those whose processes were started.
    """

    def __init__(self, job: RankJob, rendezvous: Rendezvous, scratch: Path, output: Path) -> None:
        self._job, self._rendezvous, self._scratch = job, rendezvous, scratch
        self._files = RankFiles(scratch / "rank")
        self._output = RankOutput(job, output)
        self._prepared: dict[int, RankProcess] = {}
        self._store_variables: dict[str, str] = {}
        self._noticed: set[str] = set()
        self._announced: Announced | None = None
        self._stopped_by = ""
        self.ranks: list[RankProcess] = []

    def __enter__(self) -> Attempt:
        for number in _FORWARDED:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, lambda number, frame: self._send(number))
        return self

    def __exit__(self, *_: object) -> None:
        for rank in self._running():
            rank.kill()
        self._output.finish()
        for number in _FORWARDED:
            signal.signal(number, signal.SIG_DFL)

    def begin(self, group: WorkerGroup) -> None:
        """The machines have met: exchange what they know, and print where."""
        self._store_variables = self._rendezvous.meet(group)
        write_if_possible(self._files.restarts, json.dumps(asdict(self._rendezvous.restarts)))
        self._job.on_start()

    def prepare(self, local_rank: int, env: dict[str, str]) -> tuple[str, str]:
        """Complete the environment of a rank, and return the files to which its stdout and stderr go."""
        restarts, rank = self._rendezvous.restarts, int(env["RANK"])
        files = RankFiles(self._scratch / f"rank_{rank}")
        env |= rank_env(self._job, files, restarts, self._store_variables)
        stdout, stderr = self._output.open(rank, is_first=local_rank == 0, attempt=restarts.count)
        self._prepared[local_rank] = RankProcess(rank=rank, pid=0, files=files, stderr=Path(stderr) if stderr else None)
        return stdout, stderr

    def take_pids(self, pids: Mapping[int, int]) -> None:
        """Take the processes that torch has started, by local rank."""
        for local_rank, pid in sorted(pids.items()):
            self._prepared[local_rank].pid = pid
            self.ranks.append(self._prepared[local_rank])

    def _running(self) -> list[RankProcess]:
        return [rank for rank in self.ranks if rank.is_running]

    def _send(self, number: int) -> None:
        for rank in self._running():
            rank.send(number)

    def _kill(self) -> None:
        for rank in self.ranks:
            rank.kill()

    def _request_stacks(self) -> None:
        """Make the running ranks record where they are, before they are stopped."""
        for rank in self._running():
            rank.request_stacks()
        time.sleep(time_limits.ONE_STACK)

    def is_over(self) -> bool:
        """Return whether all ranks have exited. Stops them if one has failed, here or elsewhere."""
        self._print_notices()
        if self._output.reader_exited:
            raise BrokenPipeError("nobody reads the output of the launcher any more")
        self._announced = self._rendezvous.failure()
        self._stopped_by = self._job.should_stop() or ""
        is_ended = self._announced is not None or bool(self._stopped_by) or self._files.hang.exists()
        if is_ended or any(rank.has_failed for rank in self.ranks):
            self._stop_after_failure()
        return not self._running()

    def _stop_after_failure(self) -> None:
        """Stop all ranks, after they had time to fail by themselves, and tell the other machines why."""
        began = time.monotonic()
        self._request_stacks()
        while running := self._running():
            seconds = time.monotonic() - began
            self._announce(wait=seconds < time_limits.CAUSE)
            for rank in running:
                rank.stop(seconds)
            self._print_notices()
            time.sleep(time_limits.WATCH)
        self._announce(wait=False)

    def _announce(self, *, wait: bool) -> None:
        """Announce a failure of this machine. A failure that another machine may have caused can wait."""
        if self._announced is not None or self._stopped_by:
            return
        first = first_failure(rank.result() for rank in self.ranks if rank.has_failed)
        if (hang := FoundHang.read(self._files.hang)) is not None:
            is_from_elsewhere, text = hang.elsewhere, hang.message
        elif first is not None:
            is_from_elsewhere, text = first.has_lost_connection, f"rank {first.rank}: {summarize_exit(first)}"
        else:
            return
        if wait and is_from_elsewhere:
            self._announced = self._rendezvous.failure()
        else:
            self._announced = self._rendezvous.announce(text, "hung" if hang is not None else "failed")

    def end(self, death_signal: signal.Signals) -> None:
        """End the ranks that still run, because the launcher has received a signal or fails."""
        if not self._running():
            return
        grace = self._job.grace
        self._request_stacks()
        _print_stopping(death_signal, len(self._running()), grace)
        self._send(death_signal)
        try:
            wait_until(lambda: not self._running(), grace)
        except SignalException as stop:
            _print_stopping(stop.sigval, len(self._running()), 0.0)
        self._kill()

    def result(self, *, signal_number: int = 0) -> AttemptResult:
        """Return how the ranks exited. After a failure, what is left of their process groups is killed."""
        if signal_number or any(rank.is_running or rank.has_failed for rank in self.ranks):
            self._kill()
        self._output.finish()
        self._print_notices()
        announced = self._announced
        is_remote = announced is not None and (announced.kind == "lost" or not self._rendezvous.is_first)
        return AttemptResult(
            exits=tuple(rank.result() for rank in self.ranks),
            signal_number=signal_number,
            remote_failure=self._stopped_by or (str(announced) if is_remote else None),
            has_remote_hang=announced is not None and is_remote and announced.kind == "hung",
            hang=FoundHang.read(self._files.hang),
        )

    def _print_notices(self) -> None:
        """Print the notices of the ranks. A notice that several ranks have is printed once."""
        for rank in self.ranks:
            file = rank.files.notice
            if file.exists() and (text := file.read_text(errors="replace")) not in self._noticed:
                self._noticed.add(text)
                self._job.notice(f"rank {rank.rank}: {text}")


def _print_stopping(number: int, num_ranks: int, grace: float) -> None:
    """Print immediately how the ranks are stopped after a signal."""
    name = signal.Signals(number).name
    how = f"they have {grace:g} s, and the next {name} kills them" if grace else "they are killed"
    print_block(f"hf-fsdp: {name}: stopping {plural(num_ranks, 'rank')}; {how}")
