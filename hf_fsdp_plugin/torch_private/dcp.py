"""``torch.distributed.checkpoint``: the class by which ``.metadata`` locates an entry in a file."""

from __future__ import annotations

from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo

__all__ = ["StorageInfo"]
