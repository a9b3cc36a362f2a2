"""What the Trainer's and Accelerate's ways of going on have in common: what is refused, and what is told."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from hf_fsdp_plugin.checkpoint import read_manifest, why_incomplete
from hf_fsdp_plugin.integrations.messages import print_once
from hf_fsdp_plugin.problems import CheckpointError, Problem


def check_complete(path: Path, done: str, fix: str) -> None:
    """Raise ``CheckpointError`` where ``path`` cannot be ``done`` (``loaded``), as it is not complete."""
    why = why_incomplete(path) if path.is_dir() else "there is no such folder"
    if why is not None:
        raise CheckpointError([Problem(severity="error", message=f"{path} cannot be {done}: {why}", fix=fix)])


def tell_passed_over(checkpoints: Iterable[tuple[Path, str]]) -> None:
    for path, why in checkpoints:
        print_once(f"{path} is passed over: {why}")


def tell_differences(checkpoint: Path, now: dict[str, Any]) -> None:
    """What another world size or batch changes, as far as the manifest knows."""
    found = read_manifest(checkpoint)
    if found is None:
        return
    world_size = dist.get_world_size()
    if found.world_size != world_size:
        without = f"; ranks {found.world_size} to {world_size - 1} have none" if world_size > found.world_size else ""
        print_once(
            f"{checkpoint} holds the random state of {found.world_size} ranks, and {world_size} go on{without}: "
            "dropout and the like will not repeat what the uninterrupted run would have drawn."
        )
    before, after = found.batch.get("samples_per_step"), now.get("samples_per_step")
    if before is not None and after is not None and before != after:
        print_once(
            f"{checkpoint} was written at {before} samples a step, and this run takes {after}: the data are skipped "
            f"by steps, so it goes on at another sample. Set batch size x accumulation x ranks to {before} to go on "
            "where it stopped."
        )
