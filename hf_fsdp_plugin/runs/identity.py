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
The machines of a run have different agents: they agree on one id (:func:`merge_offers`).

When a machine joins, torch starts all ranks again, but the number of the attempt stays. Two starts with one number have
different folders of logs, or other addresses at which the ranks meet.

The attempts before are known from the files that their ranks have left on each machine.

``hf-fsdp launch`` passes the failed attempts to its ranks. Under other launchers each machine reads the files of its
own ranks, and offers what it knows; :func:`merge_offers` makes one history of the offers of all machines.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import Final

from hf_fsdp_plugin.hangs.mapped_file import remove_file
from hf_fsdp_plugin.hangs.watch_files import FoundHang, RankFiles, remove_files, write_if_possible
from hf_fsdp_plugin.rank_variables import ERROR_FILE_VARIABLE, POD_ID_VARIABLE, RUN_ID_VARIABLE, variable_number
from hf_fsdp_plugin.runs.exits import earlier_exits
from hf_fsdp_plugin.runs.failures import AttemptResult
from hf_fsdp_plugin.runs.restart_policy import FailedAttempt, Restarts, assess_attempt, decide_restart

_AGENT_VARIABLE: Final = "TORCHELASTIC_RUN_ID"


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
    if environ.get(_AGENT_VARIABLE, pod) != pod:  # the command line of torchrun has replaced it
        pod = ""
    run_id = given = environ.get(RUN_ID_VARIABLE) or pod or _ray_run()
    if not given and _AGENT_VARIABLE in environ:
        if (logs := _logs(environ)) is not None:
            run_id = f"{environ[_AGENT_VARIABLE]}-{socket.gethostname()}-{logs.parent.name}"
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
    folder = Path(tempfile.gettempdir()) / f"hf_fsdp_{os.getuid()}" / _short_hash(unique)
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


_MEMORY: Final = "run.json"
"""File in the folder of the run: the :class:`Offer` that the machines agreed on at the begin of its last attempt."""
_DAMAGED: Final = (OSError, ValueError, KeyError, TypeError, AttributeError)
"""Errors of files that are incomplete, as on a full disk, or gone. They must not end a training."""
_UNKNOWN: Final = FailedAttempt(failure="an attempt of which no record is left")


@dataclass(frozen=True, kw_only=True, slots=True)
class Offer:
    """What a machine knows of its run before an attempt.

    Attributes:
        known: the run as the machines agreed on it at the begin of the last attempt that this machine was in.
        rank: its lowest rank.
        num_agreed: number of attempts until then; 0 for a machine that is new in the run.
        attempt: number of this attempt according to the launcher.
        failed: the failed attempts since then that have left files, oldest first.
    """

    known: Restarts
    rank: int = 0
    num_agreed: int = 0
    attempt: int = 0
    failed: tuple[FailedAttempt, ...] = ()

    def to_text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> Offer:
        tree = json.loads(text)
        failed = tuple(FailedAttempt(**each) for each in tree["failed"])
        return cls(**{**tree, "known": Restarts.from_json(tree["known"]), "failed": failed})


def make_offer(folder: Path | None, identity: RunIdentity, *, rank: int, machine: int) -> Offer:
    """Return the offer of this machine: what it knows of its run.

    Args:
        folder: that of the files of this attempt; ``None`` if there are none.
    """
    new = Offer(known=Restarts(run_id=identity.id, max_restarts=identity.max_restarts))
    memory: Offer | None = None
    if folder is not None:
        with suppress(*_DAMAGED):
            memory = Offer.from_text((folder.parent / _MEMORY).read_text())
    before = memory or new
    known = before.known
    is_later = memory is not None and identity.attempt > memory.attempt  # a later attempt of the same launcher
    failed: tuple[FailedAttempt, ...] = ()
    if known.refusal is not None and (identity.requeued or (identity.given and not is_later)):
        # A user may have removed the cause and started the run again, so the attempt that was refused is forgotten.
        last = replace(known.failures[-1], same_as="")
        known = replace(known, failures=(*known.failures[:-1], last), refusal=None)
    elif folder is not None:
        failed = tuple(_failed_attempts(folder, known, machine))
    return replace(before, known=known, rank=rank, attempt=identity.attempt, failed=failed)


def merge_offers(offers: Sequence[Offer]) -> Offer:
    """Return what all machines agree on: the run with the attempt before, and why there must be none after it.

    The id and the history are those of the machine that was in the most attempts; with equal numbers, of rank 0.
    """
    best = max(sorted(offers, key=lambda offer: offer.rank), key=lambda offer: offer.num_agreed)
    known = best.known
    informed = [reversed(offer.failed) for offer in offers if offer.num_agreed == best.num_agreed]
    for row in list(zip_longest(*informed))[::-1]:
        # The launcher has started this attempt, so there was a restart left.
        attempts = [each for each in row if each is not None]
        after = decide_restart(attempts, replace(known, max_restarts=known.count + 1))
        known = replace(after, refusal=known.refusal or after.refusal)
    # Ranks that are killed during their first imports leave no files.
    while known.count < max(offer.attempt for offer in offers):
        known = known.after(_UNKNOWN)
    known = replace(known, max_restarts=max(offer.known.max_restarts for offer in offers))
    return replace(best, known=known, num_agreed=best.num_agreed + 1, failed=())


def remember_run(folder: Path, agreed: Offer, attempt: int) -> None:
    """Keep what the machines have agreed on for the next attempt, and remove the files of the attempts before."""
    write_if_possible(folder.parent / _MEMORY, replace(agreed, attempt=attempt).to_text())
    for earlier in _earlier(folder):
        with suppress(OSError):
            for path in earlier.iterdir():
                remove_file(path)
            earlier.rmdir()


def _earlier(folder: Path) -> list[Path]:
    """Return the folders of the other attempts on this machine, oldest first."""
    with suppress(OSError):
        found = [path for path in folder.parent.iterdir() if path.is_dir() and path != folder]
        return sorted(found, key=_began)
    return []


def forget_run(files: RankFiles) -> None:
    """Remove what this machine remembers of a run that has ended without a failure, and its folders if they are empty.

    Args:
        files: those of one of its ranks. They have been removed.
    """
    folder = files.stem.parent
    with suppress(OSError):
        remove_files(files.stem, of_all=True)
        (folder.parent / _MEMORY).unlink(missing_ok=True)
        for each in (folder, *folder.parents[:2]):
            each.rmdir()


def _began(folder: Path) -> float:
    """Return when an attempt has begun, in seconds since the epoch: then its ranks have registered."""
    registered = [path.stat().st_mtime for path in folder.glob("rank_*.pid")]
    return min(registered, default=folder.stat().st_mtime)


def _failed_attempts(folder: Path, known: Restarts, machine: int) -> Iterator[FailedAttempt]:
    """Yield each failed attempt that has left files on this machine."""
    for path, after in pairwise([*_earlier(folder), folder]):
        with suppress(*_DAMAGED):
            exits = earlier_exits(path)
            if not all(each.ended and each.failure is None for each in exits):
                result = AttemptResult(exits=tuple(exits), hang=FoundHang.read(RankFiles(path / "rank").hang))
                yield assess_attempt(result, known, machine=machine, seconds=_began(after) - _began(path))
