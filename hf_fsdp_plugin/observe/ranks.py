"""The rank, and an all-gather of objects, with or without a process group."""

from __future__ import annotations

from typing import TypeVar

import torch.distributed as dist

T = TypeVar("T")


def current_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def gather_objects(own: T) -> list[T]:
    """Return the object of every rank, in rank order. Collective."""
    if not dist.is_initialized():
        return [own]
    objects: list[T] = [own] * dist.get_world_size()
    dist.all_gather_object(objects, own)
    return objects
