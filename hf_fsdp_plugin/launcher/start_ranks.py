"""The attempts of a run: the ranks of this machine are started, watched, and started again after a failure.

The steps of ``hf-fsdp launch`` after its config is checked are listed in :func:`run_once`, and those from a rank's
failure to its summary in :func:`_run_attempt`.

Torch's agent meets the other machines, sets torch's variables, starts the processes and handles signals. Added to it
is what users miss in it: ranks have a moment to fail by themselves before they are stopped, so that the summary names
the first cause; all machines stop at once; a failure that would come again is not tried again; and the exit code is
that of the script.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Final

from hf_fsdp_plugin.hangs.process_end import print_block
from hf_fsdp_plugin.hangs.watch_files import FoundHang, RankFiles, remove_files, write_if_possible
from hf_fsdp_plugin.launcher.other_machines import Announced, wait_until
from hf_fsdp_plugin.launcher.processes import RankOutput, RankProcess
from hf_fsdp_plugin.launcher.rank_environment import RankJob, launch_env, rank_command, rank_env
from hf_fsdp_plugin.launcher.rendezvous import Rendezvous, SignalException  # imports torch with less output
from hf_fsdp_plugin.launcher.world import World
from hf_fsdp_plugin.rank_variables import ERROR_FILE_VARIABLE, LaunchHandover
from hf_fsdp_plugin.runs.failures import AttemptResult, first_failure, summarize_exit, tell_failure
from hf_fsdp_plugin.runs.restart_policy import FailedAttempt, Restarts, assess_attempt, decide_restart
from hf_fsdp_plugin.spec.fsdp_spec import FsdpSpec
from hf_fsdp_plugin.text import plural
from hf_fsdp_plugin.torch_private.elastic import AttemptAgent

# isort: split
from torch.distributed.elastic.agent.server.api import WorkerGroup, WorkerSpec
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs
from torch.distributed.elastic.rendezvous import RendezvousError

_POLL_SECONDS: Final = 0.05
_STACK_SECONDS: Final = 0.05
"""Seconds that ranks have to record their stacks, which takes milliseconds, before they receive another signal."""
_CAUSE_SECONDS: Final = 2.0
"""Seconds that a machine whose rank has only lost a connection waits for the cause on another machine."""
_EXIT_BARRIER_SECONDS: Final = 300.0
"""Seconds that a launcher waits for machines whose ranks exit later. Same as torchrun's exit barrier."""
_FORWARDED: Final = (signal.SIGUSR1, signal.SIGUSR2)
_JOB_GRACE: Final = 3.0
"""Seconds between SIGTERM and SIGKILL for the ranks of :func:`run_job`."""
_STOPPING: Final = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")


def first_restarts(max_restarts: int, run_id: str = "") -> Restarts:
    """Return the state of a run that has not started yet."""
    return Restarts(run_id=run_id or uuid.uuid4().hex, max_restarts=max_restarts)


def run_attempts(job: RankJob, rendezvous: Rendezvous) -> int:
    """Run the ranks until they succeed, or until no restart is left or helps. Returns the exit code of the launcher.

    Raises:
        SpecError: the machines did not meet.
    """
    try:
        while (code := _run_attempt(job, rendezvous)) is None:
            pass
        return code
    except SignalException as stop:  # a signal between two attempts
        return 128 + int(stop.sigval)
    finally:
        rendezvous.shutdown()


def run_job(
    words: Sequence[str],
    spec: FsdpSpec,
    world: World,
    handover: LaunchHandover,
    *,
    env: Mapping[str, str],
    should_stop: Callable[[], str | None],
) -> AttemptResult:
    """Run a script or a module once on ranks of this machine, with hidden output, and return how they exited.

    Args:
        words: SCRIPT ARGS or ``-m`` MODULE ARGS.
        env: variables of the ranks in addition to those of the spec.
        should_stop: called again and again while the ranks run. Returns why they are stopped; ``None`` if they are not.
    """
    job = RankJob(
        command=rank_command(words),
        num_local=world.size,
        env={**launch_env(spec, world, handover), **env},
        grace=_JOB_GRACE,
        should_stop=should_stop,
    )
    return run_once(job, Rendezvous(first_restarts(0)))


def _run_attempt(job: RankJob, rendezvous: Rendezvous) -> int | None:
    """Run the ranks once. Returns the exit code, or ``None`` if they are to be started again.

    The steps after a failure:

    1. The rank records its exception before it exits (``Watch.failed`` in ``integrations.failure_watch``); a hang is
       recorded by the rank that has found it.
    2. The launcher sees the record or the exit, asks the other ranks for their stacks, and announces the failure to the
       other machines (a lost connection only after 2 s, in which its cause may be announced). It gives its ranks time
       to fail by themselves, and stops them (``AttemptRanks.is_over``).
    3. How each rank exited is read from its files; the first failure is determined, and the machine that has it gets
       the places of the ranks of other machines (``AttemptRanks.result``).
    4. The summary is printed (``runs.failures.tell_failure``).
    5. All machines take the attempt as the one that failed first knows it, and decide whether the ranks are started
       again.
    """
    began = time.monotonic()
    result = run_once(job, rendezvous)  # 1 to 3
    seconds = time.monotonic() - began
    restarts, machines = rendezvous.restarts, rendezvous.machines
    if result.joins and not result.signal_number:
        rendezvous.restarts = restarts.after(FailedAttempt(failure="a machine joined", seconds=seconds, counts=False))
        job.notice("a machine joins the run: the ranks of all machines are started again")
        return None
    _print_failures(job, result)  # 4
    code = result.exit_code
    if not code or not restarts.max_restarts:
        return code
    attempt = assess_attempt(result, restarts, machine=machines.machine, seconds=seconds)  # 5
    if machines.num_ended() and not attempt.final:
        attempt = replace(attempt, final="the ranks of another machine have ended.")
    after = rendezvous.restarts = decide_restart([machines.agree(attempt)], restarts)
    if after.refusal is not None:
        print(f"hf-fsdp: {after.refusal}", file=sys.stderr, flush=True)
        return code
    job.notice(f"{after.title}: {after.last_failure}")
    return None


def run_once(job: RankJob, rendezvous: Rendezvous) -> AttemptResult:
    """Run the ranks of this machine once, and return how they exited. None of them is left afterwards.

    Torch's agent takes these steps:

    1. The machines meet (torch's handler, ``Rendezvous.open``), exchange what they know (``Rendezvous.meet``), and
       ``RankJob.on_start`` is called (``AttemptRanks.begin``).
    2. Each rank gets the files of its output and its environment (``PreparedRanks.reify``): that of the launcher, and
       over it torch's variables, then those of the run (``launch_env``), then those of the rank (``rank_env``).
    3. Torch starts the processes, whose ids ``AttemptRanks.take_pids`` gets. Each runs ``run_script.run_rank``: it arms
       the diagnosis, calls ``install()``, and runs the script.
    4. Every 50 ms, the ranks are looked at, until all have exited or were stopped (``AttemptRanks.is_over``).
    5. A signal to the launcher is sent on to the ranks, which have time to exit (``AttemptRanks.end``).

    Raises:
        SpecError: the machines did not meet, or are about to run different things.
    """
    _prepare_torch()
    handler, problem = rendezvous.open()
    if problem is not None:
        job.notice(problem)
    with tempfile.TemporaryDirectory(prefix="hf_fsdp_") as scratch:
        prepared = PreparedRanks(job, Path(scratch))
        attempt = AttemptRanks(job, rendezvous, prepared)
        spec = WorkerSpec(
            role=job.role,
            local_world_size=job.num_local,
            rdzv_handler=handler,
            max_restarts=0,  # an attempt has an agent of its own
            monitor_interval=_POLL_SECONDS,
            entrypoint=job.command[0],
            args=tuple(job.command[1:]),
        )
        with attempt:
            try:
                if AttemptAgent(spec, attempt, prepared).run() is None:
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
    live = [rank.rank for rank in (result.exits if job.show_all else result.exits[:1])]
    sys.stdout.flush()
    if text := tell_failure(result, debug=job.debug, shown_live=live):
        print(text, file=sys.stderr, flush=True)
        if job.log_dir is not None and result.first is not None:
            print(f"hf-fsdp: all output is in {job.log_dir}{os.sep}rank_*.log", file=sys.stderr)


def _prepare_torch() -> None:
    """Let torch's agent handle no signal that this process ignores, as under nohup, and print no log of its own."""
    handled = [name for name in _STOPPING if signal.getsignal(getattr(signal, name)) is not signal.SIG_IGN]
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ",".join(handled)
    if "LOGLEVEL" not in os.environ:
        for name in ("agent.server.api", "agent.server.local_elastic_agent", "multiprocessing.api", "rendezvous"):
            logging.getLogger(f"torch.distributed.elastic.{name}").setLevel(logging.CRITICAL)


class PreparedRanks(LogsSpecs):
    """The ranks of this machine before they are started: their environment, and the files to which their output goes.

    Attributes:
        ranks: the ranks by local rank, without processes.
        files: the files that the ranks have in common.
        output: the output of the ranks.
        variables: of the store at which the ranks meet, over those of torch's agent.
        restarts: the attempts before this one.
    """

    def __init__(self, job: RankJob, scratch: Path) -> None:
        super().__init__()
        self._job, self._scratch = job, scratch
        self.files = RankFiles(scratch / "rank")
        self.output = RankOutput(job, scratch)
        self.ranks: dict[int, RankProcess] = {}
        self.variables: dict[str, str] = {}
        self.restarts = Restarts()

    @property
    def root_log_dir(self) -> str:
        return str(self._scratch)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Complete the environment of each rank, and return where its output goes. Torch's agent calls it for both."""
        streams = LogsDest()
        write_if_possible(self.files.restarts, json.dumps(asdict(self.restarts)))
        for local_rank, env in envs.items():
            rank = int(env["RANK"])
            files = RankFiles(self._scratch / f"rank_{rank}")
            env |= {**self.variables, **self._job.env, **rank_env(files, self.restarts)}
            streams.error_files[local_rank] = env[ERROR_FILE_VARIABLE]
            opened = self.output.open(rank, is_first=local_rank == 0, appends=self.restarts.count > 0)
            streams.stdouts[local_rank], streams.stderrs[local_rank], tail = opened
            self.ranks[local_rank] = RankProcess(rank=rank, pid=0, files=files, tail=tail)
        return streams


class AttemptRanks:
    """The ranks of this machine from their start to their end.

    Attributes:
        ranks: those whose processes were started.
    """

    def __init__(self, job: RankJob, rendezvous: Rendezvous, prepared: PreparedRanks) -> None:
        self._job, self._rendezvous, self._prepared = job, rendezvous, prepared
        self._output, self._files = prepared.output, prepared.files
        self._noticed: set[str] = set()
        self._announced: Announced | None = None
        self._stopped_by = ""
        self.ranks: list[RankProcess] = []

    def __enter__(self) -> AttemptRanks:
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
        self._prepared.variables = self._rendezvous.meet(group)
        self._prepared.restarts = self._rendezvous.restarts
        self._job.on_start()

    def take_pids(self, pids: Mapping[int, int]) -> None:
        """Take the processes that torch has started, by local rank."""
        for local_rank, pid in sorted(pids.items()):
            self._prepared.ranks[local_rank].pid = pid
            self.ranks.append(self._prepared.ranks[local_rank])

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
        time.sleep(_STACK_SECONDS)

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
            machines.end(_EXIT_BARRIER_SECONDS)
        return True

    def _stop_after_failure(self) -> None:
        """Stop all ranks, after they had time to fail by themselves, and tell the other machines why."""
        began = time.monotonic()
        self._request_stacks()
        while running := self._running():
            seconds = time.monotonic() - began
            self._announce(wait=seconds < _CAUSE_SECONDS)
            joins = self._announced is not None and self._announced.kind == "joins"
            for rank in running:
                rank.stop(seconds, now=joins or self._files.hang.exists())
            self._print_notices()
            time.sleep(_POLL_SECONDS)
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
