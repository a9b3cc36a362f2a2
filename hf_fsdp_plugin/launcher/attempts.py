"""The attempts of a run: starts the ranks of this machine, and starts them again after a failure (``--max_restarts``).

Torch's elastic agent is not used for it. It restarts after any failure, also after one that comes again at once; under
the ``static`` rendezvous its ranks meet again in the store of the attempt before, with the keys of the ranks that were
killed; under ``c10d`` ranks may get other numbers than their checkpoints have. It knows the exit code of a rank, but
not the steps that are lost, and a rank's children survive it. The variables that it sets for a rank are set here too.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hf_fsdp_plugin.hangs.hang_report import format_hang, write_hang
from hf_fsdp_plugin.hangs.hang_watch import Hang, HangWatch
from hf_fsdp_plugin.hangs.rank_files import RankFiles, write_atomically
from hf_fsdp_plugin.launcher.rank_env import rank_env, restart_env
from hf_fsdp_plugin.launcher.ranks import Ranks
from hf_fsdp_plugin.launcher.rendezvous import Rendezvous
from hf_fsdp_plugin.launcher.world import World
from hf_fsdp_plugin.runs.exits import RunResult
from hf_fsdp_plugin.runs.failure_summary import (
    exit_code,
    first_failure,
    format_failures,
    needs_places,
    places_of,
    summarize,
    summarize_hang,
)
from hf_fsdp_plugin.runs.identity import RUN_ID_VARIABLE
from hf_fsdp_plugin.runs.restarts import Restarts
from hf_fsdp_plugin.runs.verdicts import assess_attempt
from hf_fsdp_plugin.spec.model import LaunchSection


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What all attempts have in common.

    Attributes:
        command: the command of a rank.
        env: the environment of a rank, without the variables of its attempt and of its number.
        role: role name of the ranks, as in torchrun.
        grace: seconds that ranks have to exit after a signal to the launcher.
        notice: prints a message for the user.
        hang_limit: seconds that a rank may wait in a collective; 0 for any time.
        hang_limit_is_strict: whether that includes waits for busy ranks.
    """

    launch: LaunchSection
    world: World
    command: Sequence[str]
    env: Mapping[str, str]
    role: str
    grace: float
    show_all: bool
    log_dir: Path | None
    notice: Callable[[object], None]
    hang_limit: float = 0.0
    hang_limit_is_strict: bool = False


def first_restarts(max_restarts: int) -> Restarts:
    """Return the state of a run that has not started yet."""
    return Restarts(run_id=os.environ.get(RUN_ID_VARIABLE) or uuid.uuid4().hex, max_restarts=max_restarts)


def run_attempts(job: Job, rendezvous: Rendezvous, restarts: Restarts) -> int:
    """Run the ranks until they succeed, or until no restart is left or helps. Returns the exit code of the launcher.

    Closes `rendezvous`, and leaves the other machines.

    Raises:
        RendezvousError: a machine did not come back for a restart.
    """
    while True:
        restarts = rendezvous.restarts or restarts
        began = time.monotonic()
        try:
            result = _run_ranks(job, rendezvous, restarts)
            code = exit_code(result)
            _print_failures(job, rendezvous, result)
            if not code or not restarts.max_restarts:
                rendezvous.peers.leave()
                return code
            seconds = time.monotonic() - began
            verdict = assess_attempt(result, restarts, machine=rendezvous.machine, seconds=seconds)
            decision = rendezvous.peers.decide(verdict, restarts)
            restarts = decision.restarts
            if decision.problem is not None:
                print(f"hf-fsdp: {decision.problem}", file=sys.stderr, flush=True)
                rendezvous.peers.leave()
                return code
        finally:
            rendezvous.close()
        last = restarts.failures[-1]
        after = f" after step {last.steps} of the run" if last.steps is not None else ""
        job.notice(f"restart {restarts.count} of {restarts.max_restarts}: {last.failure}{after}")
        if job.world.num_machines > 1:
            job.notice(f"waiting for {job.world.num_machines} machines")
        rendezvous = rendezvous.peers.meet_again(job.launch, restarts)


def _run_ranks(job: Job, rendezvous: Rendezvous, restarts: Restarts) -> RunResult:
    with tempfile.TemporaryDirectory(prefix="hf_fsdp_") as scratch:
        ranks = Ranks(
            show_all=job.show_all,
            log_dir=job.log_dir,
            append_logs=restarts.count > 0,
            scratch=Path(scratch),
            notice=job.notice,
        )
        write_atomically(RankFiles(Path(scratch) / "rank").restarts, json.dumps(restarts.to_json()))
        base = {**job.env, **restart_env(restarts)}
        try:
            for local_rank in range(job.world.num_local):
                env = {**base, **rank_env(job.world, rendezvous, local_rank, role=job.role)}
                ranks.start(rendezvous.first_rank + local_rank, job.command, env)
            result = ranks.watch(
                grace=job.grace,
                peers=rendezvous.peers,
                hangs=_hang_watch(job, rendezvous) if job.hang_limit else None,
                report_hang=lambda hang: _report_hang(job, rendezvous, hang),
            )
        finally:
            ranks.close()
        first = first_failure(result.exits)
        if first is not None:
            rendezvous.peers.announce(f"rank {first.rank}: {summarize(first)}")
            if needs_places(result):
                elsewhere, notes = rendezvous.peers.share_places(places_of(result.exits))
                result = replace(result, elsewhere=tuple(elsewhere), notes=tuple(notes))
    return result


def _hang_watch(job: Job, rendezvous: Rendezvous) -> HangWatch:
    return HangWatch(
        limit=job.hang_limit,
        is_strict=job.hang_limit_is_strict,
        inquiries=rendezvous.peers.inquiries,
        num_local=job.world.num_local,
        world_size=job.world.size,
        notice=job.notice,
    )


def _report_hang(job: Job, rendezvous: Rendezvous, hang: Hang) -> None:
    rendezvous.peers.announce(summarize_hang(hang))
    text = format_hang(hang, write_hang(hang, job.log_dir, limit=job.hang_limit))
    print(text, file=sys.stderr, flush=True)


def _print_failures(job: Job, rendezvous: Rendezvous, result: RunResult) -> None:
    live = [rank.rank for rank in result.exits] if job.show_all else [rendezvous.first_rank]
    sys.stdout.flush()
    if text := format_failures(result, debug=job.launch.debug, shown_live=live):
        print(text, file=sys.stderr, flush=True)
        if job.log_dir is not None and first_failure(result.exits) is not None:
            print(f"hf-fsdp: all output is in {job.log_dir}{os.sep}rank_*.log", file=sys.stderr)
