"""Which run a rank belongs to, and the attempts of it before this one, under any launcher.

A run is what a user has started once: its checkpoints name it, and an attempt after a failure resumes from them.

=====================================  ==========================================  ================================
started by                             id                                          attempt
=====================================  ==========================================  ================================
``hf-fsdp launch``, or a user's own    ``HF_FSDP_RUN_ID``                          ``TORCHELASTIC_RESTART_COUNT``
Kubernetes ``PyTorchJob``              ``PET_RDZV_ID``, the job's own              the same
Ray Train                              the name of the experiment                  -
torchrun, ``accelerate launch``        ``TORCHELASTIC_RUN_ID`` and torch's agent   ``TORCHELASTIC_RESTART_COUNT``
``srun``                               job, step and command line                  ``SLURM_RESTART_COUNT``
=====================================  ==========================================  ================================

The id of torchrun is ``none`` unless a user sets one, and users set the same one again and again. So the agent, which
outlives all attempts of a machine, is a part of the id: the folder of its logs, which has a new name for each agent.
The machines of a run have different agents, and machines may join: the id of the machine that was in the most attempts
is used (:func:`agree_on_attempts`).

``hf-fsdp launch`` passes the failed attempts to its ranks. Under other launchers each machine reads the files that the
ranks of the attempts before have left on it.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

from hf_fsdp_plugin.hangs.watch_files import RankFiles, remove_files, scratch_folder, write_if_possible
from hf_fsdp_plugin.rank_variables import ERROR_FILE_VARIABLE, POD_ID_VARIABLE, RUN_ID_VARIABLE, variable_number
from hf_fsdp_plugin.runs.attempts import FailedAttempt, Restarts, count_steps
from hf_fsdp_plugin.runs.failures import first_failure, read_exit, summarize_exit
from hf_fsdp_plugin.sources.environment_variables import AGENT_VARIABLE


@dataclass(frozen=True, kw_only=True, slots=True)
class RunIdentity:
    """A run and its attempt, as one rank knows them.

    Attributes:
        id: empty if nothing identifies the run: then it has no attempts.
        given: whether a user or a cluster has given the id, which is then the same whenever the run is started.
        attempt: 0 at the first start.
        max_restarts: the launcher's limit of restarts; 0 if it restarts nothing, or if the limit is unknown.
        job: the job of a batch system and the command line; empty without one.
        requeued: the value of ``job`` if the job was started again from its beginning, with new agents of torch.
        start: distinguishes starts that have the same number of the attempt.
    """

    id: str = ""
    given: bool = False
    attempt: int = 0
    max_restarts: int = 0
    job: str = ""
    requeued: str = ""
    start: str = ""

    @property
    def may_have_checkpoints(self) -> bool:
        """Whether a process before this one may have written checkpoints of this run."""
        return bool(self.id) and (self.given or self.attempt > 0)


def identify_run(environ: Mapping[str, str], argv: tuple[str, ...] = ()) -> RunIdentity:
    """Return the run of a rank with these variables.

    Args:
        argv: script and arguments, which keep the runs of one batch job apart.
    """
    requeues = variable_number(environ, "SLURM_RESTART_COUNT")
    job = ""
    if "SLURM_JOB_ID" in environ:
        words = _short_hash("\0".join(argv))
        job = f"slurm-{environ['SLURM_JOB_ID']}-{environ.get('SLURM_STEP_ID', 'batch')}-{words}"
    pod = environ.get(POD_ID_VARIABLE, "")
    if environ.get(AGENT_VARIABLE, pod) != pod:  # the command line of torchrun has replaced it
        pod = ""
    run_id = given = environ.get(RUN_ID_VARIABLE) or pod or _ray_run()
    if not given and AGENT_VARIABLE in environ:
        if (logs := _logs(environ)) is not None:
            run_id = f"{environ[AGENT_VARIABLE]}-{socket.gethostname()}-{logs.parent.name}"
    elif not given and "SLURM_PROCID" in environ:
        run_id = job
    return RunIdentity(
        id=run_id,
        given=bool(given),
        attempt=variable_number(environ, "TORCHELASTIC_RESTART_COUNT") + requeues,
        max_restarts=variable_number(environ, "TORCHELASTIC_MAX_RESTARTS"),
        job=job,
        requeued=job if requeues else "",
        start=_start(environ),
    )


def attempt_folder(identity: RunIdentity, environ: Mapping[str, str]) -> Path:
    """Return the folder of the files of this machine's ranks in this attempt. That of the run is its parent."""
    unique = identity.id or "-".join(environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT"))
    folder = scratch_folder() / f"hf_fsdp_{os.getuid()}" / _short_hash(unique)
    return folder / f"{identity.attempt}-{identity.start}"


def _logs(environ: Mapping[str, str]) -> Path | None:
    """Return the folder of the logs of this attempt; ``None`` if torch's agent writes none.

    It writes the error file to ``LOGS/ID_RANDOM/attempt_N/LOCAL_RANK/error.json``.
    """
    path = Path(environ.get(ERROR_FILE_VARIABLE, ""))
    is_default = len(path.parents) > 3 and path.parents[1].name.startswith("attempt_")
    return path.parents[1] if is_default else None


def _start(environ: Mapping[str, str]) -> str:
    known = [environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "SLURM_JOB_ID")]
    if (logs := _logs(environ)) is not None:
        with suppress(OSError):
            known.append(str(logs.stat().st_mtime_ns))
    return _short_hash("\0".join(known))


def _ray_run() -> str:
    """Return the name of the experiment of Ray Train, if this process is one of its workers."""
    train = sys.modules.get("ray.train")
    if train is None:
        return ""
    try:
        return f"ray-{train.get_context().get_experiment_name()}"
    except Exception:  # not in a worker, or another version of Ray
        return ""


def _short_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


_DAMAGED: Final = (OSError, ValueError, KeyError, TypeError)
"""Errors of files that are incomplete, as on a full disk, or gone. They must not end a training."""


def read_attempts(folder: Path | None, identity: RunIdentity) -> Restarts:
    """Return the failed attempts of a run, as far as the files of this machine show them.

    Args:
        folder: that of the files of the present attempt; ``None`` if there are none.
    """
    known = Restarts(run_id=identity.id, max_restarts=identity.max_restarts)
    for earlier in _earlier(folder):
        with suppress(*_DAMAGED):
            known = Restarts.from_json(json.loads(RankFiles(earlier / "rank").restarts.read_text()))
        known = known.after(_failed_attempt(earlier))
    return known


def agree_on_attempts(of_machines: Sequence[Restarts], attempt: int) -> Restarts:
    """Return the run of all machines: that of the machine which was in the most attempts.

    Args:
        of_machines: what each machine knows.
        attempt: number of the present attempt according to the launcher.
    """
    known = max(of_machines, key=lambda each: each.count)
    while known.count < attempt:  # ranks that are killed during their first imports leave no files
        known = known.after(FailedAttempt(failure="an attempt of which no record is left"))
    return replace(known, max_restarts=max(each.max_restarts for each in of_machines))


def keep_attempts(folder: Path, restarts: Restarts) -> None:
    """Keep the failed attempts for the next one, and remove their files."""
    write_if_possible(RankFiles(folder / "rank").restarts, json.dumps(asdict(restarts)))
    for earlier in _earlier(folder):
        shutil.rmtree(earlier, ignore_errors=True)


def forget_run(files: RankFiles) -> None:
    """Remove the folders of a run that has ended without a failure, if they are empty.

    Args:
        files: those of one of its ranks. They have been removed.
    """
    folder = files.stem.parent
    with suppress(OSError):
        remove_files(files.stem, of_all=True)
        for each in (folder, *folder.parents[:2]):
            each.rmdir()


def _earlier(folder: Path | None) -> list[Path]:
    """Return the folders of the other attempts on this machine, oldest first."""
    with suppress(OSError):
        if folder is not None:
            found = [path for path in folder.parent.iterdir() if path.is_dir() and path != folder]
            return sorted(found, key=lambda path: path.stat().st_mtime)
    return []


def _failed_attempt(folder: Path) -> FailedAttempt:
    exits = []
    for path in folder.glob("rank_*.pid"):
        with suppress(*_DAMAGED):
            files = RankFiles(path.with_suffix(""))
            exits.append(read_exit(int(path.stem.partition("_")[2]), files, code=0, time=path.stat().st_mtime))
    first, (began, steps) = first_failure(exits), count_steps(exits)
    killed = next((each for each in exits if each.failure is None and not each.ended), None)
    text = f"rank {first.rank}: {summarize_exit(first)}" if first is not None else "no rank has recorded an error"
    if killed is not None and (first is None or first.has_lost_connection):
        text = f"rank {killed.rank}: ended without an error record"
    seconds = max((each.time for each in exits), default=0.0) - min((each.time for each in exits), default=0.0)
    return FailedAttempt(failure=text, began=began, steps=steps, seconds=seconds)
