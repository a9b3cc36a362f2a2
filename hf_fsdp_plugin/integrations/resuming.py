"""Selects the checkpoint to resume from, and reports what differs from the saved run.

The manifest of each checkpoint names the run that wrote it. After a launcher has started a run again, it resumes from
the newest complete checkpoint with that name, so that older checkpoints in the same folder, of other runs, are never
used.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from hf_fsdp_plugin.backends.ranks.agreement import broadcast_object, on_all_ranks
from hf_fsdp_plugin.checkpoint import (
    Manifest,
    check_states,
    check_visible,
    newest_complete,
    read_manifest,
    recover_interrupted_commit,
    recover_run,
    why_incomplete,
)
from hf_fsdp_plugin.hangs.record import step_count
from hf_fsdp_plugin.integrations.attempts import agree_on_attempt
from hf_fsdp_plugin.integrations.saving import manager
from hf_fsdp_plugin.integrations.session import session
from hf_fsdp_plugin.messages import print_once
from hf_fsdp_plugin.problems import CheckpointError, Problem, SpecError

T = TypeVar("T")
_Found = tuple[Path | None, list[tuple[Path, str]], Problem | None]
"""The checkpoint, the newer ones that are incomplete with the reasons, and the error."""


def find_checkpoint(
    run: Path | None,
    prefix: str,
    selected: Path | None,
    *,
    fix: str,
    verify: bool = True,
    allow_pickles: bool = False,
) -> Path | None:
    """Return ``selected`` or, if it is ``None``, the newest complete checkpoint of the run folder. Collective.

    Interrupted commits are recovered first. Newer incomplete checkpoints are reported. All files of the checkpoint
    that are read, except model and optimizer, are checked.

    Args:
        run: the folder of the checkpoints; ``None`` if there is none.
        prefix: prefix of the checkpoint names, before the number.
        selected: the checkpoint that the user selected.
        fix: what to do if ``selected`` is incomplete.
        verify, allow_pickles: as in :func:`hf_fsdp_plugin.checkpoint.check_states`.

    Returns:
        ``None`` if ``selected`` is ``None`` and the run has no checkpoint.

    Raises:
        CheckpointError: the selected checkpoint is incomplete, or all checkpoints of the run are. Or a file is damaged,
            or contains a pickle that may execute code.
    """
    if selected is not None:
        found = _select_on_rank_0(lambda: _check_selected(selected, fix))
    else:
        found = _select_on_rank_0(lambda: _highest_numbered(run, prefix))
    if found is not None:
        check_states(found, dist.get_rank(), dist.get_world_size(), verify=verify, allow_pickles=allow_pickles)
    return found


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
    return _select_on_rank_0(lambda: _last_saved(Path(folder), "", this_run, None))


def checkpoint_after_restart(folder: Path, prefix: str) -> Path | None:
    """Return the newest complete checkpoint that this ``train`` call had written before the restart. Collective.

    Returns:
        ``None`` on the first start, or if there is none: then the script's own choice applies.
    """
    if not is_started_again():
        return None
    found = _select_on_rank_0(lambda: _last_saved(folder, prefix, True, session.num_trainings))
    attempt = session.restarts.title if session.restarts.count else f"run {session.restarts.run_id}"
    if found is not None:
        count_from(found)
        print_once(f"{attempt}: resuming from {found}, the newest complete checkpoint of this run.")
    elif session.restarts.count:
        print_once(
            f"{attempt}: {folder} has no complete checkpoint of this run: training begins as on the first start."
        )
    return found


def _select_on_rank_0(look: Callable[[], _Found]) -> Path | None:
    """Let rank 0 select a checkpoint for all ranks, and report the incomplete ones that it skipped. Collective."""
    manager.wait()  # looking removes the staging folders of interrupted saves
    # Only rank 0 asks for the files of the checkpoints, which are several for each rank.
    nothing: _Found = None, [], None
    checkpoint, skipped, failure = _on_rank_0(look, nothing)
    for path, reason in skipped:
        print_once(Problem(code="FSDP-W432", message=f"{path} is skipped: {reason}"))
    if failure is not None:
        raise CheckpointError([failure])
    if checkpoint is not None:
        with on_all_ranks("looking for a checkpoint"):
            check_visible(checkpoint, "resumes from")
    return checkpoint


def _on_rank_0(look: Callable[[], T], otherwise: T) -> T:
    """Return rank 0's result on all ranks, or raise its error on all of them. Collective if there are ranks."""
    found = otherwise
    with on_all_ranks("looking for a checkpoint"):
        if not dist.is_initialized() or dist.get_rank() == 0:
            found = look()
    return broadcast_object(found)


def _check_selected(checkpoint: Path, fix: str) -> _Found:
    recover_interrupted_commit(checkpoint)
    reason = why_incomplete(checkpoint) if checkpoint.is_dir() else "the folder does not exist"
    if reason is None:
        return checkpoint, [], None
    message = f"{checkpoint} is not a complete checkpoint: {reason}"
    return None, [], Problem(code="FSDP-E431", message=message, fix=fix)


def _highest_numbered(run: Path | None, prefix: str) -> _Found:
    """Return the complete checkpoint with the highest number."""
    if run is None:
        return None, [], None
    recover_run(run, prefix)
    found, skipped = newest_complete(run, prefix)
    if found is not None or not skipped:
        return found, skipped, None
    message = f"none of the {len(skipped)} checkpoints in {run} is complete."
    fix = "Restore one from a backup, or start without resuming."
    return None, skipped, Problem(code="FSDP-E606", message=message, fix=fix)


def _last_saved(folder: Path, prefix: str, this_run: bool, training: int | None) -> _Found:
    """Return the complete checkpoint with a manifest that was saved last, whatever its name."""
    if not folder.is_dir():
        return None, [], None
    recover_run(folder, prefix)
    candidates = []
    for path in folder.iterdir():
        if path.name.startswith(".") or not path.name.startswith(prefix) or not path.is_dir():
            continue
        manifest = _read(path)
        if manifest is not None and (not this_run or _is_of_this_run(manifest, training)):
            number = re.search(r"(\d+)$", path.name)
            order = (manifest.created, int(number[1]) if number is not None else -1, path)
            candidates.append((_run_steps(manifest) if this_run else 0, *order))
    skipped: list[tuple[Path, str]] = []
    for *_, path in sorted(candidates, reverse=True):
        reason = why_incomplete(path)
        if reason is None:
            return path, skipped, None
        skipped.append((path, reason))
    return None, skipped, None


def run_fact() -> dict[str, Any]:
    """Return the field ``run`` of the manifest of a checkpoint that is written now; empty without an identity."""
    if not session.restarts.run_id:
        return {}
    run = {"id": session.restarts.run_id, "steps": step_count.total, "training": session.num_trainings}
    return run | ({"job": session.identity.job} if session.identity.job else {})


def is_started_again() -> bool:
    """Return whether this run may have written checkpoints before this process, which has agreed on its attempt."""
    return bool(session.restarts.count) or session.identity.may_have_checkpoints


def count_from(checkpoint: Path) -> None:
    """Count the optimizer steps of the run from those that a checkpoint of this run contains, after a restart."""
    steps, _ = _before_restart(checkpoint)
    if steps > step_count.total:  # otherwise the script goes back to an earlier checkpoint by itself
        step_count.resume_at(steps)


def batch_before_restart(checkpoint: Path) -> dict[str, Any]:
    """Return the field ``batch`` of a checkpoint that this run has written before a restart. Collective.

    Returns:
        Empty without a restart, and for a checkpoint of another run.
    """
    if not is_started_again():
        return {}
    _, batch = _before_restart(checkpoint)
    session.first_samples_per_step = batch.get("first_samples_per_step", batch.get("samples_per_step"))
    return batch


def _before_restart(checkpoint: Path) -> tuple[int, dict[str, Any]]:
    """Return the optimizer steps of this run and the field ``batch`` of a checkpoint that it has written. Collective.

    Returns:
        0 and an empty dict without a restart, and for a checkpoint of another run.
    """
    if not is_started_again():
        return 0, {}

    def read() -> tuple[int, dict[str, Any]]:
        manifest = _read(checkpoint)
        if manifest is None or not _is_of_this_run(manifest, None):
            return 0, {}
        return _run_steps(manifest), manifest.batch

    nothing: tuple[int, dict[str, Any]] = 0, {}
    return _on_rank_0(read, nothing)


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


def warn_differences(checkpoint: Path, batch: dict[str, Any]) -> None:
    """Report the effects of a world size or batch that differs from the checkpoint. Does nothing without a manifest."""
    manifest = read_manifest(checkpoint)
    if manifest is None:
        return
    world_size = dist.get_world_size()
    if manifest.world_size != world_size:
        message = (
            f"{checkpoint} has the random state of {manifest.world_size} ranks, but this run has {world_size} ranks: "
            "dropout and other random operations differ from those of the uninterrupted run."
        )
        print_once(Problem(code="FSDP-W433", message=message))
    if (problem := samples_problem(checkpoint, manifest.batch, batch)) is not None:
        print_once(problem)


def kept_accumulation(saved: Mapping[str, Any], now: Mapping[str, Any]) -> int:
    """Return the gradient accumulation with which a step has as many samples as in the first attempt of a run.

    Args:
        saved, now: the field ``batch`` of the manifest, as the checkpoint contains it and as this attempt would write
            it.

    Returns:
        The nearest number if it does not divide; that of ``now`` if nothing is known of the steps.
    """
    before, size, unit = _step_sizes(saved, now)
    target = saved.get("first_samples_per_step", before) if unit == "samples" else before
    accumulation: int = now["accumulation"]
    return max(1, round(target * accumulation / size)) if target and size else accumulation


def _step_sizes(saved: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[int, int, str]:
    """Return what a step had and has, and the unit: the batches of all ranks if the samples of one are not known."""
    samples = saved.get("samples_per_step"), now.get("samples_per_step")
    if samples[0] and samples[1]:
        return samples[0], samples[1], "samples"
    before, size = (each.get("accumulation", 0) * each.get("world_size", 0) for each in (saved, now))
    return before, size, "batches"


def print_accumulation(saved: Mapping[str, Any], now: Mapping[str, Any], given: int) -> None:
    """Print that a restart has changed the gradient accumulation from ``given``."""
    if now["accumulation"] != given:
        before, size, unit = _step_sizes(saved, now)
        print_once(
            f"{saved['world_size']} ranks have saved, {now['world_size']} resume: gradient_accumulation_steps is "
            f"{now['accumulation']} instead of {given}, and a step has {size} {unit} (before: {before})."
        )


def samples_problem(
    checkpoint: Path, saved: Mapping[str, Any], now: Mapping[str, Any], further: Sequence[str] = ()
) -> Problem | None:
    """Return a warning if the steps after a checkpoint have other samples than those of an uninterrupted run.

    Args:
        saved, now: as in :func:`kept_accumulation`, for this attempt with its present accumulation.
        further: other differences that the caller has found.
    """
    differences = list(further)
    before, size, unit = _step_sizes(saved, now)
    fix = "The training continues; only these steps differ."
    if before and size and before != size:
        differences.insert(
            0,
            f"it was saved with {before} {unit} per step, but this run has {size}: data is skipped by steps, so "
            "the training resumes at another sample",
        )
        fix = f"Set batch size x gradient accumulation x ranks to {before} to resume at the same sample."
    if any(saved.get(name) != now.get(name) for name in ("accumulation", "world_size") if name in saved):
        lengths = saved.get("steps_per_epoch"), now.get("steps_per_epoch")
        if before == size and all(lengths) and lengths[0] != lengths[1]:
            differences.append(f"an epoch had {lengths[0]} steps and has {lengths[1]}, because its last batches differ")
        differences += now.get("depends_on_accumulation", ())
    if not differences:
        return None
    return Problem(code="FSDP-W434", message=f"{checkpoint}: {'; '.join(differences)}.", fix=fix)
