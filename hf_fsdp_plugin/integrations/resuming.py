"""Selects the checkpoint to resume from, and warns about differences from the saved run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from hf_fsdp_plugin.backends.agreement import broadcast_object, on_all_ranks
from hf_fsdp_plugin.checkpoint import (
    check_states,
    check_visible,
    newest_complete,
    read_manifest,
    recover_interrupted_commit,
    recover_run,
    why_incomplete,
)
from hf_fsdp_plugin.messages import print_once
from hf_fsdp_plugin.problems import CheckpointError, Problem


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
    found = _find(run, prefix, selected, fix)
    if found is not None:
        check_states(found, dist.get_rank(), dist.get_world_size(), verify=verify, allow_pickles=allow_pickles)
    return found


def _find(run: Path | None, prefix: str, selected: Path | None, fix: str) -> Path | None:
    with on_all_ranks("recovering interrupted commits"):
        if dist.get_rank() == 0:
            if run is not None:
                recover_run(run, prefix)
            if selected is not None:
                recover_interrupted_commit(selected)
    found: _Found = (None, [], None)
    with on_all_ranks("looking for a checkpoint"):
        if dist.get_rank() == 0:
            found = _look(run, prefix, selected, fix)
    # Only rank 0 asks for the files of the checkpoints, which are several for each rank.
    checkpoint, skipped, failure = broadcast_object(found)
    for path, reason in skipped:
        print_once(Problem(code="FSDP-W432", message=f"{path} is skipped: {reason}"))
    if failure is not None:
        raise CheckpointError([failure])
    if checkpoint is not None:
        with on_all_ranks("looking for a checkpoint"):
            check_visible(checkpoint, "resumes from")
    return checkpoint


_Found = tuple[Path | None, list[tuple[Path, str]], Problem | None]
"""The checkpoint, the newer ones that are incomplete with the reasons, and the error."""


def _look(run: Path | None, prefix: str, selected: Path | None, fix: str) -> _Found:
    if selected is not None:
        reason = why_incomplete(selected) if selected.is_dir() else "the folder does not exist"
        if reason is None:
            return selected, [], None
        message = f"{selected} is not a complete checkpoint: {reason}"
        return None, [], Problem(code="FSDP-E431", message=message, fix=fix)
    found, skipped = newest_complete(run, prefix) if run is not None else (None, [])
    if found is None and skipped:
        message = f"none of the {len(skipped)} checkpoints in {run} is complete."
        fix = "Restore one from a backup, or start without resuming."
        return None, skipped, Problem(code="FSDP-E606", message=message, fix=fix)
    return found, skipped, None


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
