"""Starts, watches and stops the ranks of one machine as processes. No rank outlives the launcher.

This replaces torch's elastic agent, which reports little more than the exit code of a failed rank (see also
``attempts``). Here each rank has its own session, so that it receives a signal once, and the launcher can report which
rank failed first and why. The processes that a rank has started end with the attempt, also if the launcher is killed
(see ``leftovers``).
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_fsdp_plugin.hangs.hang_report import FoundHang
from hf_fsdp_plugin.hangs.rank_files import FILES_VARIABLE, RankFiles
from hf_fsdp_plugin.launcher.leftovers import RUN_VARIABLE, Guard, Leftover, end_processes, run_name
from hf_fsdp_plugin.launcher.rank_output import RankOutput
from hf_fsdp_plugin.launcher.rank_process import TERM_SECONDS, RankProcess
from hf_fsdp_plugin.launcher.rendezvous import Peers
from hf_fsdp_plugin.problems import Problem
from hf_fsdp_plugin.runs.exits import RunResult
from hf_fsdp_plugin.text import plural

_POLL_SECONDS = 0.05
_STACK_SECONDS = 0.05
"""Seconds that ranks have to record their stacks, which takes milliseconds, before they receive another signal."""
_SETTLE_SECONDS = 2.0
"""Seconds from the first failure to SIGTERM. Ranks that wait for the failed rank often fail in this time."""
_TEARDOWN_SECONDS = 10.0
"""Seconds that a rank has to exit after its exception."""
_FORWARDED = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")
_STOPPING = (signal.SIGINT, signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM))


class Ranks:
    """The ranks of this machine.

    Args:
        show_first: whether the output of the first rank is shown, if that of all ranks is not.
        append_logs: whether the log files contain the output of earlier attempts, which is kept.
        scratch: temporary folder for the files of this run.
        notice: prints a message for the user.
    """

    def __init__(
        self,
        *,
        show_all: bool,
        show_first: bool = True,
        log_dir: Path | None,
        append_logs: bool = False,
        scratch: Path,
        notice: Callable[[object], None],
    ) -> None:
        self._output = RankOutput(
            show_all=show_all, show_first=show_first, log_dir=log_dir, append_logs=append_logs, notice=notice
        )
        self._scratch = scratch
        self._notice = notice
        self._noticed: set[str] = set()
        self._ranks: list[RankProcess] = []
        self._signal = 0
        self._kill_at = float("inf")
        self._run = run_name()
        self._guard = Guard(self._run, scratch)

    def start(self, rank: int, command: Sequence[str], env: Mapping[str, str]) -> None:
        """Start one rank. The first rank writes to the terminal. For other ranks, the last lines of stderr are kept."""
        files = RankFiles(self._scratch / f"rank_{rank}")
        is_first = not self._ranks
        stdout, stderr = self._output.streams(is_first=is_first)
        process = subprocess.Popen(
            command,
            env={**env, FILES_VARIABLE: str(files.stem), RUN_VARIABLE: self._run},
            stdin=None if is_first else subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )
        # Appended before anything else can fail, so that close() ends the rank.
        started = RankProcess(rank=rank, process=process, files=files, tail=deque())
        self._ranks.append(started)
        started.tail = self._output.forward(rank, process, is_first=is_first)

    def watch(
        self,
        *,
        grace: float,
        peers: Peers,
    ) -> RunResult:
        """Wait for the ranks and forward signals. If a rank fails, here or on another machine, stop all.

        Args:
            grace: seconds ranks have to exit after SIGINT or SIGTERM.
        """
        remote_failure: str | None = None
        failed_at: float | None = None
        with self._forwarded_signals(grace):
            while self._running():
                now = time.monotonic()
                if failed_at is None and not self._signal:
                    remote_failure = peers.failure()
                    if remote_failure or any(rank.has_failed for rank in self._ranks):
                        failed_at = now
                        self._request_stacks()
                if failed_at is not None:
                    self._stop_after_failure(now - failed_at)
                if now > self._kill_at:
                    for rank in self._running():
                        rank.stopped = True
                        rank.kill_group()
                if self._output.reader_exited and not self._signal:
                    self._stop_after_broken_pipe()
                self._print_notices()
                time.sleep(_POLL_SECONDS)
            has_ended = failed_at is None and not self._signal and not any(rank.has_failed for rank in self._ranks)
            if not has_ended:
                for rank in self._ranks:
                    rank.kill_group()
            end_processes(self._run, on_term=self._warn_leftovers if has_ended else None)
        self._output.finish()
        self._print_notices()
        exits = tuple(rank.result() for rank in self._ranks)
        hang = FoundHang.read(RankFiles(self._scratch / "rank").hang)
        return RunResult(exits=exits, signal_number=self._signal, remote_failure=remote_failure, hang=hang)

    def close(self) -> None:
        """Kill every process of the run that is still running."""
        for rank in self._running():
            rank.kill_group()
            rank.process.wait()
        end_processes(self._run)
        self._guard.close()

    def _print_notices(self) -> None:
        """Print what ranks have to say. Ranks often have the same notice, of which the first is printed."""
        for rank in self._ranks:
            file = rank.files.notice
            if file.exists() and (text := file.read_text(errors="replace")) not in self._noticed:
                self._noticed.add(text)
                self._notice(f"rank {rank.rank}: {text}")

    def _warn_leftovers(self, left: Sequence[Leftover]) -> None:
        shown = ", ".join(f"{process.pid} ({process.command[:80]}) of rank {process.rank}" for process in left[:3])
        message = f"the script has ended and left {plural(len(left), 'process', 'processes')} running: {shown}."
        fix = "They are stopped now. Wait for them in the script."
        self._notice(Problem(code="FSDP-W740", message=message, fix=fix))

    def _stop_after_broken_pipe(self) -> None:
        """Stop the run as SIGPIPE stops other programs, because nobody reads its output any more."""
        self._signal = signal.SIGPIPE
        self._kill_at = time.monotonic() + TERM_SECONDS
        for rank in self._running():
            rank.send(signal.SIGTERM)

    def _running(self) -> list[RankProcess]:
        return [rank for rank in self._ranks if rank.poll() is None]

    def _request_stacks(self) -> None:
        """Make the running ranks record where they are, before they are stopped."""
        for rank in self._running():
            rank.request_stacks()
        if self._running():
            time.sleep(_STACK_SECONDS)

    def _stop_after_failure(self, seconds: float) -> None:
        """Send SIGTERM, later SIGKILL, to the ranks that still run `seconds` after the failure."""
        for rank in self._running():
            allowed = _TEARDOWN_SECONDS if rank.files.failure.exists() else _SETTLE_SECONDS
            if rank.term_sent is None and seconds > allowed:
                rank.term_sent = seconds
                rank.stopped = True
                rank.send(signal.SIGTERM)
            elif rank.term_sent is not None and seconds > rank.term_sent + rank.seconds_after_term:
                rank.kill_group()

    @contextlib.contextmanager
    def _forwarded_signals(self, grace: float) -> Iterator[None]:
        def forward(number: int, frame: Any) -> None:
            del frame
            if number in _STOPPING:
                is_first, is_second = not self._signal, self._signal in _STOPPING
                self._signal = number
                if is_first:
                    self._request_stacks()
                self._kill_at = min(self._kill_at, time.monotonic() + (0.0 if is_second else grace))
                _print_stopping(number, len(self._running()), 0.0 if is_second else grace)
            for rank in self._running():
                rank.send(number)

        previous = {}
        for name in _FORWARDED:
            number = getattr(signal, name, None)
            # nohup and background shells ignore some signals. Ignored signals stay ignored here and in ranks.
            if number is not None and signal.getsignal(number) is not signal.SIG_IGN:
                previous[number] = signal.signal(number, forward)
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)


def _print_stopping(number: int, num_ranks: int, grace: float) -> None:
    """Print at once what happens after a signal. Called in a signal handler, where buffered streams cannot be used."""
    name = signal.Signals(number).name
    how = f"they have {grace:g} s, and the next {name} kills them" if grace else "they are killed"
    with contextlib.suppress(OSError):
        os.write(2, f"hf-fsdp: {name}: stopping {plural(num_ranks, 'rank')}; {how}\n".encode())
