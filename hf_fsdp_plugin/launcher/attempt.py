"""The ranks of this machine in one attempt, from their environment to their end.

A failure takes these steps, which ``docs/failures.md`` shows for all launchers: a rank records it, the launcher sees
the record or the exit (:meth:`Attempt.is_over`), asks the other ranks for their stacks, and announces it to the other
machines. It gives its ranks time to fail by themselves, stops them, and reads from their files how each has exited
(:meth:`Attempt.result`).
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Final

import hf_fsdp_plugin.time_limits as time_limits
from hf_fsdp_plugin.hangs.process_end import print_block
from hf_fsdp_plugin.hangs.watch_files import FoundHang, RankFiles, remove_files, write_if_possible
from hf_fsdp_plugin.launcher.other_machines import Announced, wait_until
from hf_fsdp_plugin.launcher.processes import RankOutput, RankProcess
from hf_fsdp_plugin.launcher.rank_environment import RankJob, rank_env
from hf_fsdp_plugin.launcher.rendezvous import Rendezvous, SignalException
from hf_fsdp_plugin.runs.failures import AttemptResult, first_failure, summarize_exit
from hf_fsdp_plugin.text import plural

if TYPE_CHECKING:
    from torch.distributed.elastic.agent.server.api import WorkerGroup

_FORWARDED: Final = (signal.SIGUSR1, signal.SIGUSR2)


class Attempt:
    """The ranks of this machine in one attempt. Torch's agent calls the methods without an underscore, in this order.

    Args:
        scratch: temporary folder for the files of the ranks.

    Attributes:
        ranks: those whose processes were started.
    """

    def __init__(self, job: RankJob, rendezvous: Rendezvous, scratch: Path) -> None:
        self._job, self._rendezvous, self._scratch = job, rendezvous, scratch
        self._files = RankFiles(scratch / "rank")
        self._output = RankOutput(job, scratch)
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
        for rank in self.ranks:
            remove_files(rank.files.stem)
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
        stdout, stderr, tail = self._output.open(rank, is_first=local_rank == 0, appends=restarts.count > 0)
        self._prepared[local_rank] = RankProcess(rank=rank, pid=0, files=files, tail=tail)
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
        """Return whether all ranks have exited.

        Stops them if one has failed, here or elsewhere, or if a machine joins; otherwise waits for the other machines.
        """
        self._print_notices()
        if self._output.reader_exited:
            raise BrokenPipeError("nobody reads the output of the launcher any more")
        machines = self._rendezvous.machines
        self._announced = machines.failure()
        self._stopped_by = self._job.should_stop() or ""
        if self._announced is None and self._rendezvous.is_waiting():
            self._announced = machines.announce("a machine joins the run", "joins")
        is_ended = self._announced is not None or bool(self._stopped_by) or self._files.hang.exists()
        if is_ended or any(rank.has_failed for rank in self.ranks):
            self._stop_after_failure()
        elif self._running():
            return False
        else:  # wait for machines whose ranks end later
            machines.end(time_limits.EXIT_BARRIER)
        return True

    def _stop_after_failure(self) -> None:
        """Stop all ranks, after they had time to fail by themselves, and tell the other machines why."""
        began = time.monotonic()
        self._request_stacks()
        while running := self._running():
            seconds = time.monotonic() - began
            self._announce(wait=seconds < time_limits.CAUSE)
            joins = self._announced is not None and self._announced.kind == "joins"
            for rank in running:
                rank.stop(seconds, now=joins or self._files.hang.exists())
            self._print_notices()
            time.sleep(time_limits.WATCH)
        self._announce(wait=False)

    def _announce(self, *, wait: bool) -> None:
        """Announce a failure of this machine. A failure that another machine may have caused can wait."""
        if self._announced is not None or self._stopped_by:
            return
        machines = self._rendezvous.machines
        first = first_failure(rank.result() for rank in self.ranks if rank.has_failed)
        if (hang := FoundHang.read(self._files.hang)) is not None:
            is_from_elsewhere, text = hang.elsewhere, hang.message
        elif first is not None:
            is_from_elsewhere, text = first.has_lost_connection, f"rank {first.rank}: {summarize_exit(first)}"
        else:
            return
        if wait and is_from_elsewhere:
            self._announced = machines.failure()
        else:
            self._announced = machines.announce(text, "hung" if hang is not None else "failed")

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
        announced, machines = self._announced, self._rendezvous.machines
        is_remote = announced is not None and (announced.kind == "lost" or announced.machine != machines.machine)
        result = AttemptResult(
            exits=tuple(rank.result() for rank in self.ranks),
            signal_number=signal_number,
            remote_failure=self._stopped_by or (str(announced) if is_remote else None),
            has_remote_hang=announced is not None and is_remote and announced.kind == "hung",
            hang=FoundHang.read(self._files.hang),
            joins=announced is not None and announced.kind == "joins",
        )
        if result.needs_places and not result.joins:
            result.elsewhere, result.notes = machines.share_places(result.places)
        return result

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
