"""What a rank does after its launcher has started it again: which checkpoint it resumes from.

The manifest of each checkpoint names the run that wrote it. After a restart, training resumes from the newest complete
checkpoint with that name, so that older checkpoints in the same folder, of other runs, are never used.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import torch.distributed as dist

from hf_fsdp_plugin.backends.agreement import broadcast_object, on_all_ranks
from hf_fsdp_plugin.checkpoint import Manifest, check_visible, read_manifest, recover_run, why_incomplete
from hf_fsdp_plugin.hangs.step_count import step_count
from hf_fsdp_plugin.integrations.attempts import agree_on_attempt
from hf_fsdp_plugin.integrations.saving import manager
from hf_fsdp_plugin.integrations.session import session
from hf_fsdp_plugin.messages import print_once
from hf_fsdp_plugin.problems import CheckpointError, Problem, SpecError


def run_fact() -> dict[str, Any]:
    """Return the field ``run`` of the manifest of a checkpoint that is written now; empty without an identity."""
    if not session.restarts.run_id:
        return {}
    run = {"id": session.restarts.run_id, "steps": step_count.total, "training": session.num_trainings}
    return run | ({"job": session.identity.job} if session.identity.job else {})


def is_started_again() -> bool:
    """Return whether this run may have written checkpoints before this process, which has agreed on its attempt."""
    return bool(session.restarts.count) or session.identity.may_have_checkpoints


def newest_checkpoint(folder: str | os.PathLike[str], *, this_run: bool = False) -> Path | None:
    """Return the newest complete checkpoint in a folder, for ``accelerator.load_state``. Collective.

    Newest is the one that was saved last, whatever its name. Interrupted commits are recovered first, and newer
    incomplete checkpoints are reported. Only checkpoints with a manifest are found: those that the plugin has written.

    Args:
        folder: the folder that contains the checkpoints.
        this_run: consider only checkpoints that the present run has written, before a restart by its launcher.

    Returns:
        ``None`` if there is none.

    Raises:
        SpecError: several ranks run, but there is no process group yet; or the run has failed in the same way twice.
    """
    if not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        message = "newest_checkpoint was called before the process group exists."
        fix = "Call it on all ranks, after the Accelerator has been created."
        raise SpecError([Problem(code="FSDP-E718", message=message, fix=fix)])
    agree_on_attempt("newest_checkpoint")
    return _find(Path(folder), "", this_run=this_run, training=None)


def checkpoint_after_restart(folder: Path, prefix: str) -> Path | None:
    """Return the newest complete checkpoint that this ``train`` call had written before the restart. Collective.

    Returns:
        ``None`` on the first start, or if there is none: then the script's own choice applies.
    """
    if not is_started_again():
        return None
    found = _find(folder, prefix, this_run=True, training=session.num_trainings)
    attempt = session.restarts.title if session.restarts.count else f"run {session.restarts.run_id}"
    if found is not None:
        count_from(found)
        print_once(f"{attempt}: resuming from {found}, the newest complete checkpoint of this run.")
    elif session.restarts.count:
        print_once(
            f"{attempt}: {folder} has no complete checkpoint of this run: training begins as on the first start."
        )
    return found


def count_from(checkpoint: Path) -> None:
    """Count the optimizer steps of the run from those that a checkpoint of this run contains, after a restart."""
    if not is_started_again():
        return
    steps = 0
    if not dist.is_initialized() or dist.get_rank() == 0:
        manifest = _read(checkpoint)
        steps = _run_steps(manifest) if manifest is not None and _is_of_this_run(manifest, None) else 0
    steps = int(broadcast_object(steps)) if dist.is_initialized() else steps
    if steps > step_count.total:  # otherwise the script goes back to an earlier checkpoint by itself
        step_count.resume_at(steps)


def batch_before_restart(checkpoint: Path) -> dict[str, Any]:
    """Return the field ``batch`` of a checkpoint that this run has written before a restart. Collective.

    Returns:
        Empty without a restart, and for a checkpoint of another run.
    """
    if not is_started_again():
        return {}
    batch: dict[str, Any] = {}
    if not dist.is_initialized() or dist.get_rank() == 0:
        manifest = _read(checkpoint)
        batch = manifest.batch if manifest is not None and _is_of_this_run(manifest, None) else {}
    batch = dict(broadcast_object(batch)) if dist.is_initialized() else batch
    session.first_samples_per_step = batch.get("first_samples_per_step", batch.get("samples_per_step"))
    return batch


def _find(folder: Path, prefix: str, *, this_run: bool, training: int | None) -> Path | None:
    is_distributed = dist.is_initialized()
    manager.wait()  # _look removes the staging folders of interrupted saves
    found: tuple[Path | None, list[tuple[Path, str]]] = (None, [])
    if not is_distributed:
        found = _look(folder, prefix, this_run, training)
    else:
        with on_all_ranks("looking for a checkpoint"):
            if dist.get_rank() == 0:
                found = _look(folder, prefix, this_run, training)
        found = broadcast_object(found)
    checkpoint, skipped = found
    for path, reason in skipped:
        print_once(Problem(code="FSDP-W432", message=f"{path} is skipped: {reason}"))
    if checkpoint is not None and is_distributed:
        with on_all_ranks("looking for a checkpoint"):
            check_visible(checkpoint, "resumes from")
    return checkpoint


def _look(
    folder: Path, prefix: str, this_run: bool, training: int | None
) -> tuple[Path | None, list[tuple[Path, str]]]:
    """Return the newest complete checkpoint, and the newer ones that are incomplete with the reasons."""
    if not folder.is_dir():
        return None, []
    recover_run(folder, prefix)
    candidates = []
    for path in folder.iterdir():
        if path.name.startswith(".") or not path.name.startswith(prefix) or not path.is_dir():
            continue
        manifest = _read(path)
        if manifest is not None and (not this_run or _is_of_this_run(manifest, training)):
            candidates.append((_run_steps(manifest) if this_run else 0, manifest.created, _number(path), path))
    skipped: list[tuple[Path, str]] = []
    for *_, path in sorted(candidates, reverse=True):
        reason = why_incomplete(path)
        if reason is None:
            return path, skipped
        skipped.append((path, reason))
    return None, skipped


def _read(path: Path) -> Manifest | None:
    """Return the manifest of a checkpoint; ``None`` if it is missing or damaged."""
    try:
        return read_manifest(path)
    except CheckpointError:
        return None


def _is_of_this_run(manifest: Manifest, training: int | None) -> bool:
    run_id, job = session.restarts.run_id, session.identity.requeued
    is_own = bool(run_id) and manifest.run.get("id") == run_id
    # A job that was requeued has other agents of torch, so that its run has another id.
    is_own |= bool(job) and manifest.run.get("job") == job
    return is_own and training in (None, manifest.run.get("training"))


def _run_steps(manifest: Manifest) -> int:
    steps = manifest.run.get("steps")
    return steps if isinstance(steps, int) and not isinstance(steps, bool) and steps >= 0 else 0


def _number(path: Path) -> int:
    """Return the number at the end of a name; -1 without one."""
    match = re.search(r"(\d+)$", path.name)
    return int(match[1]) if match is not None else -1
