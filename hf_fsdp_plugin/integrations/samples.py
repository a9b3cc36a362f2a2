"""The samples of an optimizer step: what a checkpoint records of them, and what a restart with other ranks keeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from hf_fsdp_plugin.integrations.session import current_run
from hf_fsdp_plugin.messages import print_once
from hf_fsdp_plugin.problems import Problem


def batch_facts(accumulation: int, samples_per_step: int | None) -> dict[str, Any]:
    """Return the fields of a manifest's ``batch`` that Accelerators and Trainers share."""
    batch = {"world_size": dist.get_world_size(), "accumulation": accumulation}
    sizes = {"samples_per_step": samples_per_step, "first_samples_per_step": current_run().first_samples_per_step}
    return batch | {name: size for name, size in sizes.items() if size is not None}


def kept_accumulation(saved: Mapping[str, Any], now: Mapping[str, Any]) -> int:
    """Return the gradient accumulation with which a step has as many samples as in the first attempt of a run.

    A change is printed.

    Args:
        saved, now: the field ``batch`` of the manifest, as the checkpoint contains it and as this attempt would write
            it.

    Returns:
        The nearest number if it does not divide; that of ``now`` if nothing is known of the steps.
    """
    before, size, unit = _step_sizes(saved, now)
    target = saved.get("first_samples_per_step", before) if unit == "samples" else before
    given: int = now["accumulation"]
    kept = max(1, round(target * given / size)) if target and size else given
    if kept != given:
        print_once(
            f"{saved.get('world_size')} ranks have saved, {now.get('world_size')} resume: gradient_accumulation_steps "
            f"is {kept} instead of {given}, and a step has {size * kept // given} {unit} (before: {before})."
        )
    return kept


def _step_sizes(saved: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[int, int, str]:
    """Return the size of a step before and now, and its unit: samples, or batches of all ranks if these are unknown."""
    before, size = (each.get("samples_per_step") for each in (saved, now))
    if before and size:
        return before, size, "samples"
    before, size = (each.get("accumulation", 0) * each.get("world_size", 0) for each in (saved, now))
    return before, size, "batches"


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
        other = f"it was saved with {before} {unit} per step, but this run has {size}: data is skipped by steps, so "
        differences.insert(0, f"{other}the training resumes at another sample")
        fix = f"Set batch size x gradient accumulation x ranks to {before} to resume at the same sample."
    if any(saved.get(name) != now.get(name) for name in ("accumulation", "world_size") if name in saved):
        lengths = saved.get("steps_per_epoch"), now.get("steps_per_epoch")
        if before == size and all(lengths) and lengths[0] != lengths[1]:
            differences.append(f"an epoch had {lengths[0]} steps and has {lengths[1]}, because its last batches differ")
        differences += now.get("depends_on_accumulation", ())
    if not differences:
        return None
    return Problem(code="FSDP-W434", message=f"{checkpoint}: {'; '.join(differences)}.", fix=fix)
