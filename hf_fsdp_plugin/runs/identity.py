"""Which run a rank belongs to, and in which attempt of it, from the variables of any launcher.

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
outlives all attempts of a machine, is a part of the id: the folder of its logs, which has a new name for each agent, or
else its process. The machines of a run have different agents: they agree on one id (see ``integrations.resuming``).

When a machine joins, torch starts all ranks again, but the number of the attempt stays. Two starts with one number have
different folders of logs, or other addresses at which the ranks meet.
"""

from __future__ import annotations

import hashlib
import os
import socket
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hf_fsdp_plugin.hangs.processes import environment_of, parent_of, start_of
from hf_fsdp_plugin.hangs.rank_exit import ERROR_FILE_VARIABLE
from hf_fsdp_plugin.hangs.rank_files import RUN_ID_VARIABLE

POD_ID_VARIABLE: Final = "PET_RDZV_ID"
"""Environment variable with the id that a job of Kubernetes has, if its user sets one."""
_AGENT_VARIABLE: Final = "TORCHELASTIC_RUN_ID"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunIdentity:
    """A run and its attempt, as one rank knows them.

    Attributes:
        id: empty if nothing identifies the run: then it has no attempts.
        given: whether a user or a cluster has given the id, which is then the same whenever the run is started.
        attempt: 0 at the first start.
        max_restarts: the limit of the launcher; 0 if it restarts nothing, or does not say.
        job: the job of a batch system and the command line; empty without one.
        requeued: the same, if the job was started again from its beginning, so that torch's agents are others.
        start: tells starts with the same number apart.
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
    requeues = _number(environ, "SLURM_RESTART_COUNT")
    job = _slurm_job(environ, argv)
    given = environ.get(RUN_ID_VARIABLE) or _id_of_pod(environ) or _ray_run()
    if given:
        run_id = given
    elif _AGENT_VARIABLE in environ:
        run_id = f"{environ[_AGENT_VARIABLE]}-{socket.gethostname()}-{_agent(environ)}"
    else:
        run_id = job if "SLURM_PROCID" in environ else ""
    return RunIdentity(
        id=run_id,
        given=bool(given),
        attempt=_number(environ, "TORCHELASTIC_RESTART_COUNT") + requeues,
        max_restarts=_number(environ, "TORCHELASTIC_MAX_RESTARTS"),
        job=job,
        requeued=job if requeues else "",
        start=_start(environ),
    )


def attempt_folder(identity: RunIdentity, environ: Mapping[str, str]) -> Path:
    """Return the folder of the files of this machine's ranks in this attempt. That of the run is its parent."""
    unique = identity.id or "-".join(environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT"))
    folder = Path(tempfile.gettempdir()) / f"hf_fsdp_{os.getuid()}" / _short_hash(unique)
    return folder / f"{identity.attempt}-{identity.start}"


def attempt_number(folder: Path) -> int:
    """Return the attempt of a folder of :func:`attempt_folder`."""
    number = folder.name.partition("-")[0]
    return int(number) if number.isdecimal() else 0


def _agent(environ: Mapping[str, str]) -> str:
    """Return what identifies torch's agent: its folder of logs, or else its process and the start of that."""
    if (logs := _logs(environ)) is not None:
        return logs.parent.name
    # The nearest ancestor whose environment does not name the run: a shell or a profiler may be between.
    pid = os.getppid()
    named = f"{_AGENT_VARIABLE}={environ[_AGENT_VARIABLE]}"
    while pid > 1 and named in environment_of(pid):
        pid = parent_of(pid)
    return f"{pid}-{start_of(pid)}"


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


def _id_of_pod(environ: Mapping[str, str]) -> str:
    """Return the id that the job of Kubernetes has, unless the command line of torchrun has replaced it."""
    given = environ.get(POD_ID_VARIABLE, "")
    return given if environ.get(_AGENT_VARIABLE, given) == given else ""


def _ray_run() -> str:
    """Return the name of the experiment of Ray Train, if this process is one of its workers."""
    train = sys.modules.get("ray.train")
    if train is None:
        return ""
    try:
        return f"ray-{train.get_context().get_experiment_name()}"
    except Exception:  # not in a worker, or another version of Ray
        return ""


def _slurm_job(environ: Mapping[str, str], argv: tuple[str, ...]) -> str:
    if "SLURM_JOB_ID" not in environ:
        return ""
    words = _short_hash("\0".join(argv))
    return f"slurm-{environ['SLURM_JOB_ID']}-{environ.get('SLURM_STEP_ID', 'batch')}-{words}"


def _short_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name, "").strip()
    return int(text) if text.isdecimal() else 0
