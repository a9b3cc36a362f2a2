"""The ranks of this machine under torch's elastic agent, in one attempt of a run (see ``attempts``).

Torch's agent meets the other machines, sets torch's variables, starts the processes and handles signals. Added to it
is what users miss in it: ranks have a moment to fail by themselves before they are stopped, so that the summary names
the first cause; all machines stop at once; a failure that would come again is not tried again; the processes that ranks
leave behind end (see ``orphan_processes``); and the exit code is that of the script.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hf_fsdp_plugin.hangs.hang_report import FoundHang
from hf_fsdp_plugin.hangs.rank_exit import ERROR_FILE_VARIABLE
from hf_fsdp_plugin.hangs.rank_files import (
    RankFiles,
    write_atomically,
)
from hf_fsdp_plugin.launcher.environment import rank_env
from hf_fsdp_plugin.launcher.orphan_processes import (
    Guard,
    OrphanProcess,
    end_processes,
    run_name,
)
from hf_fsdp_plugin.launcher.other_machines import Announced, OtherMachines
from hf_fsdp_plugin.launcher.rank_output import RankOutput
from hf_fsdp_plugin.launcher.ranks import RankProcess, Ranks
from hf_fsdp_plugin.launcher.rendezvous import Rendezvous  # imports torch with less output
from hf_fsdp_plugin.problems import Problem
from hf_fsdp_plugin.runs.exits import RunResult, first_failure, summarize_exit
from hf_fsdp_plugin.text import plural

# isort: split
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, SignalException

_POLL_SECONDS: Final = 0.05
_SETTLE_SECONDS: Final = 2.0
"""Seconds that a machine whose rank has only lost a connection waits for the cause on another machine."""
_EXIT_BARRIER_SECONDS: Final = 300.0
"""Seconds that a launcher waits for machines whose ranks exit later. Same as torchrun's exit barrier."""
_FORWARDED: Final = ("SIGUSR1", "SIGUSR2")


@dataclass(frozen=True, kw_only=True, slots=True)
class RankJob:
    """What all attempts have in common.

    Attributes:
        command: program and arguments of a rank.
        num_local: ranks on this machine.
        env: the variables that all ranks have (``environment.launch_env``).
        role: role name of the ranks, as in torchrun.
        grace: seconds that ranks have to exit after a signal to the launcher.
        notice: prints a message for the user.
        debug: whether the summary of a failure includes all tracebacks.
        should_stop: returns why the ranks are stopped, as if one had failed on another machine.
    """

    command: Sequence[str]
    num_local: int
    env: Mapping[str, str]
    notice: Callable[[object], None] = lambda notice: None
    role: str = "default"
    grace: float = 30.0
    show_all: bool = False
    show_first: bool = False
    log_dir: Path | None = None
    debug: bool = False
    should_stop: Callable[[], str | None] = lambda: None


class OutputClosed(Exception):
    """Nobody reads the output of the launcher any more."""


class AttemptRanks(LogsSpecs):
    """The ranks of this machine from their start to their end. Also tells torch's agent where their output goes."""

    def __init__(self, job: RankJob, rendezvous: Rendezvous, scratch: Path, on_start: Callable[[], None]) -> None:
        super().__init__()
        self._job, self._rendezvous, self._scratch, self._on_start = job, rendezvous, scratch, on_start
        self._output = RankOutput(
            show_all=job.show_all,
            show_first=job.show_first,
            log_dir=job.log_dir,
            append_logs=rendezvous.restarts.count > 0,
            scratch=scratch,
            notice=job.notice,
        )
        self._files = RankFiles(scratch / "rank")
        self._tails: dict[int, deque[str]] = {}
        self._numbers: dict[int, int] = {}
        self._noticed: set[str] = set()
        self._run = run_name()
        self._guard = Guard(self._run, scratch)
        self._announced: Announced | None = None
        self._stopped_by = ""
        self.ranks = Ranks()

    def __enter__(self) -> AttemptRanks:
        for name in _FORWARDED:
            number = getattr(signal, name, None)
            if number is not None and signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, lambda number, frame: self.ranks.send(number))
        return self

    def __exit__(self, *_: object) -> None:
        self.ranks.kill()
        end_processes(self._run)
        self._output.finish()
        self._guard.close()
        for name in _FORWARDED:
            if (number := getattr(signal, name, None)) is not None:
                signal.signal(number, signal.SIG_DFL)

    @property
    def root_log_dir(self) -> str:
        return str(self._scratch)

    @property
    def _machines(self) -> OtherMachines:
        return self._rendezvous.machines

    def begin(self) -> None:
        """The machines have met: print where, and write what the ranks read."""
        self._on_start()
        write_atomically(self._files.restarts, json.dumps(self._rendezvous.restarts.to_json()))

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Complete the environment of each rank, and return where its output goes."""
        streams = LogsDest()
        restarts = self._rendezvous.restarts
        for local_rank, env in envs.items():
            rank = self._numbers[local_rank] = int(env["RANK"])
            files = RankFiles(self._scratch / f"rank_{rank}")
            env |= {**self._job.env, **rank_env(files, self._run, restarts)}
            streams.error_files[local_rank] = env[ERROR_FILE_VARIABLE]
            opened = self._output.open(rank, is_first=local_rank == 0)
            streams.stdouts[local_rank], streams.stderrs[local_rank], self._tails[local_rank] = opened
        return streams

    def watch(self, pids: Mapping[int, int]) -> None:
        """Watch the processes that torch has started, by local rank."""
        for local_rank, pid in sorted(pids.items()):
            rank = self._numbers[local_rank]
            files = RankFiles(self._scratch / f"rank_{rank}")
            self.ranks.append(RankProcess(rank=rank, pid=pid, files=files, tail=self._tails[local_rank]))

    def is_over(self) -> bool:
        """Return whether all ranks have exited. Stops them if one has failed, and waits for the other machines."""
        if self._has_failed():
            self._stop_after_failure()
        elif self.ranks.running():
            return False
        else:
            self._wait_for_others()
        return True

    def _has_failed(self) -> bool:
        """Return whether the ranks have to be stopped: one has failed, here or elsewhere, or a machine joins."""
        self._print_notices()
        if self._output.reader_exited:
            raise OutputClosed
        self._announced = self._machines.failure()
        self._stopped_by = self._job.should_stop() or ""
        if self._announced is None and self._rendezvous.is_waiting():
            self._announced = self._machines.announce("a machine joins the run", "joins")
        has_failed = any(rank.has_failed for rank in self.ranks)
        return has_failed or self._announced is not None or bool(self._stopped_by) or self._files.hang.exists()

    def _stop_after_failure(self) -> None:
        """Stop all ranks, after they had time to fail by themselves, and tell the other machines why."""
        began = time.monotonic()
        self.ranks.request_stacks()
        while running := self.ranks.running():
            seconds = time.monotonic() - began
            self._announce(wait=seconds < _SETTLE_SECONDS)
            joins = self._announced is not None and self._announced.kind == "joins"
            self.ranks.stop(seconds, now=joins or self._files.hang.exists())
            self._print_notices()
            if running:
                time.sleep(_POLL_SECONDS)
        self._announce(wait=False)

    def _announce(self, *, wait: bool) -> None:
        """Announce a failure of this machine. One that may follow from that of another machine can wait."""
        if self._announced is not None or self._stopped_by:
            return
        hang = FoundHang.read(self._files.hang)
        first = first_failure(rank.result() for rank in self.ranks if rank.has_failed)
        if hang is None and first is None:
            return
        if wait and (hang.elsewhere if hang is not None else first is not None and first.has_lost_connection):
            self._announced = self._machines.failure()
        elif hang is not None:
            self._announced = self._machines.announce(hang.message, "hung")
        elif first is not None:
            self._announced = self._machines.announce(f"rank {first.rank}: {summarize_exit(first)}")

    def _wait_for_others(self) -> None:
        """Wait for machines whose ranks end later. Returns if those of one fail."""
        self._machines.end()
        self._machines.wait_for_end(_EXIT_BARRIER_SECONDS)

    def end(self, death_signal: signal.Signals) -> None:
        """End the ranks that still run, because the launcher has received a signal or fails."""
        if not self.ranks.running():
            return
        grace = self._job.grace
        self.ranks.request_stacks()
        _print_stopping(death_signal, len(self.ranks.running()), grace)
        self.ranks.send(death_signal)
        deadline = time.monotonic() + grace
        try:
            while self.ranks.running() and time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS)
        except SignalException as stop:
            _print_stopping(stop.sigval, len(self.ranks.running()), 0.0)
        self.ranks.kill()

    def result(self, *, signal_number: int = 0) -> RunResult:
        """Return how the ranks exited. Ends the processes that they have left behind."""
        has_ended = not signal_number and not any(rank.is_running or rank.has_failed for rank in self.ranks)
        if not has_ended:
            self.ranks.kill()
        end_processes(self._run, on_term=self._warn_orphans if has_ended else None)
        self._output.finish()
        self._print_notices()
        announced = self._announced
        is_remote = announced is not None and (announced.kind == "lost" or announced.machine != self._machines.machine)
        result = RunResult(
            exits=tuple(rank.result() for rank in self.ranks),
            signal_number=signal_number,
            remote_failure=self._stopped_by or (str(announced) if is_remote else None),
            has_remote_hang=announced is not None and is_remote and announced.kind == "hung",
            hang=FoundHang.read(self._files.hang),
            joins=announced is not None and announced.kind == "joins",
        )
        if result.needs_places and not result.joins:
            result.elsewhere, result.notes = self._machines.share_places(result.places)
        return result

    def _print_notices(self) -> None:
        """Print what ranks have to say. Ranks often have the same notice, of which the first is printed."""
        for rank in self.ranks:
            file = rank.files.notice
            if file.exists() and (text := file.read_text(errors="replace")) not in self._noticed:
                self._noticed.add(text)
                self._job.notice(f"rank {rank.rank}: {text}")

    def _warn_orphans(self, left: Sequence[OrphanProcess]) -> None:
        shown = ", ".join(f"{process.pid} ({process.command[:80]}) of rank {process.rank}" for process in left[:3])
        message = f"the script has ended and left {plural(len(left), 'process', 'processes')} running: {shown}."
        fix = "They are stopped now. Wait for them in the script."
        self._job.notice(Problem(code="FSDP-W740", message=message, fix=fix))


def _print_stopping(number: int, num_ranks: int, grace: float) -> None:
    """Print at once what happens after a signal."""
    name = signal.Signals(number).name
    how = f"they have {grace:g} s, and the next {name} kills them" if grace else "they are killed"
    with suppress(OSError):
        os.write(2, f"hf-fsdp: {name}: stopping {plural(num_ranks, 'rank')}; {how}\n".encode())
