"""Checks before the Trainer or Accelerate resumes from a checkpoint, and warnings about what differs."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from hf_fsdp_plugin.checkpoint import read_manifest, why_incomplete
from hf_fsdp_plugin.integrations.messages import print_once
from hf_fsdp_plugin.problems import CheckpointError, Problem


def check_complete(path: Path, fix: str) -> None:
    """Raise ``CheckpointError`` unless ``path`` is a complete checkpoint."""
    reason = why_incomplete(path) if path.is_dir() else "the folder does not exist"
    if reason is not None:
        message = f"{path} is not a complete checkpoint: {reason}"
        raise CheckpointError([Problem(code="FSDP-E431", message=message, fix=fix)])


def warn_skipped(checkpoints: Iterable[tuple[Path, str]]) -> None:
    """Print which incomplete checkpoints are skipped, and why."""
    for path, reason in checkpoints:
        print_once(Problem(code="FSDP-W432", message=f"{path} is skipped: {reason}"))


def warn_differences(checkpoint: Path, batch: dict[str, Any]) -> None:
    """Print what another world size or batch changes, if the checkpoint has a manifest."""
    manifest = read_manifest(checkpoint)
    if manifest is None:
        return
    world_size = dist.get_world_size()
    if manifest.world_size != world_size:
        missing = f" (ranks {manifest.world_size} to {world_size - 1} have none)"
        message = (
            f"{checkpoint} has the random state of {manifest.world_size} ranks, and this run has {world_size}"
            f"{missing if world_size > manifest.world_size else ''}: dropout and other random operations differ from "
            "those of the uninterrupted run."
        )
        print_once(Problem(code="FSDP-W433", message=message))
    before, now = manifest.batch.get("samples_per_step"), batch.get("samples_per_step")
    if before is not None and now is not None and before != now:
        message = (
            f"{checkpoint} was saved with {before} samples per step, and this run has {now}: the Trainer skips data by "
            "steps, so it resumes at another sample."
        )
        fix = f"Set batch size x gradient accumulation x ranks to {before} to resume at the same sample."
        print_once(Problem(code="FSDP-W434", message=message, fix=fix))
