"""Which run a rank belongs to, and in which attempt of it, from the variables of any launcher.

A run is what a user has started once: its checkpoints name it, and an attempt after a failure resumes from them.

=====================================  ==========================================  ================================
started by                             id                                          attempt
=====================================  ==========================================  ================================
``hf-fsdp launch``, or a user's own    ``HF_FSDP_RUN_ID``                          ``TORCHELASTIC_RESTART_COUNT``
Kubernetes ``PyTorchJob``, elastic     ``PET_RDZV_ID``, the job's own              the same
torchrun, ``accelerate launch``        ``TORCHELASTIC_RUN_ID`` and torch's agent   the same
``srun``                               job and step                                ``SLURM_RESTART_COUNT``
=====================================  ==========================================  ================================

The id of torchrun is ``none`` unless a user sets one, and users set the same one again and again. So the process of
torch's agent, which outlives all attempts of a machine, is a part of the id. The machines of a run have different
agents: they use the id of rank 0 (see ``integrations.restarts``).
"""

from __future__ import annotations

import hashlib
import os
import socket
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hf_fsdp_plugin.hangs.processes import environment_of, parent_of, start_of

RUN_ID_VARIABLE: Final = "HF_FSDP_RUN_ID"
_AGENT_VARIABLE: Final = "TORCHELASTIC_RUN_ID"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunIdentity:
    """A run and its attempt, as one rank knows them.

    Attributes:
        id: empty if nothing identifies the run: then it has no attempts.
        attempt: 0 at the first start.
        max_restarts: the limit of the launcher; 0 if it restarts nothing, or does not say.
        requeued: the job of a batch system that was started again from its beginning, so that torch's agents are
            others; empty otherwise.
        job: the same, also at the first start.
    """

    id: str = ""
    attempt: int = 0
    max_restarts: int = 0
    job: str = ""
    requeued: str = ""


def identify(environ: Mapping[str, str], argv: tuple[str, ...] = ()) -> RunIdentity:
    """Return the run of a rank with these variables.

    Args:
        argv: script and arguments, which keep the runs of one batch job apart.
    """
    restarts, max_restarts = (
        _number(environ, "TORCHELASTIC_RESTART_COUNT"),
        _number(environ, "TORCHELASTIC_MAX_RESTARTS"),
    )
    requeues = _number(environ, "SLURM_RESTART_COUNT")
    job = _slurm_job(environ, argv)
    if given := environ.get(RUN_ID_VARIABLE) or environ.get("PET_RDZV_ID"):
        run_id = given
    elif _AGENT_VARIABLE in environ:
        pid, start = _agent(environ)
        run_id = f"{environ[_AGENT_VARIABLE]}-{socket.gethostname()}-{pid}-{start}"
    elif "SLURM_PROCID" in environ:
        run_id = job
    else:
        run_id = ""
    return RunIdentity(
        id=run_id,
        attempt=restarts + requeues,
        max_restarts=max_restarts,
        job=job,
        requeued=job if requeues else "",
    )


def attempt_folder(identity: RunIdentity, environ: Mapping[str, str]) -> Path:
    """Return the folder of the files of this machine's ranks in this attempt. That of the run is its parent."""
    unique = identity.id or "-".join(environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT"))
    name = hashlib.sha256(unique.encode()).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"hf_fsdp_{os.getuid()}" / name / str(identity.attempt)


def _agent(environ: Mapping[str, str]) -> tuple[int, int]:
    """Return process and start of torch's agent: the nearest ancestor whose environment does not name the run.

    It is not always the parent: a shell or a profiler may be between.
    """
    pid = os.getppid()
    named = f"{_AGENT_VARIABLE}={environ[_AGENT_VARIABLE]}"
    while pid > 1 and named in environment_of(pid):
        pid = parent_of(pid)
    return pid, start_of(pid)


def _slurm_job(environ: Mapping[str, str], argv: tuple[str, ...]) -> str:
    if "SLURM_JOB_ID" not in environ:
        return ""
    words = hashlib.sha256("\0".join(argv).encode()).hexdigest()[:8]
    return f"slurm-{environ['SLURM_JOB_ID']}-{environ.get('SLURM_STEP_ID', 'batch')}-{words}"


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name, "").strip()
    return int(text) if text.isdecimal() else 0
