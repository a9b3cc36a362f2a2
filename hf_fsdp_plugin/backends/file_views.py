"""Which bytes of which file a parameter is a view of.

``from_pretrained`` maps safetensors files, so a parameter is mostly a view of a file. A page that this process has
written to is not a view of the file any more.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from hf_fsdp_plugin.backends.memory_maps import MemoryMaps, has_changed_pages


@dataclass(frozen=True, slots=True)
class FileView:
    """What an unchanged view shows.

    Attributes:
        path: path of the file.
        size, modified: size in bytes and time of the last modification in nanoseconds; 0 for memory that
            :mod:`hf_fsdp_plugin.backends.shared_weights` shares, whose name depends on its content.
        offset: position of the view in the file, in bytes.
        form: dtype and shape of the tensor.
    """

    path: str
    size: int
    modified: int
    offset: int
    form: tuple[str, str]

    @property
    def is_of_file_system(self) -> bool:
        return self.modified != 0


def file_views(tensors: Iterable[torch.Tensor], maps: MemoryMaps) -> list[FileView | None]:
    """Return for each tensor what it is a view of; ``None`` if it is none of a file, or was changed.

    Args:
        maps: the mappings with their private bytes.
    """
    statuses: dict[str, os.stat_result | None] = {}
    return [_view(tensor, maps, statuses) for tensor in tensors]


def _view(tensor: torch.Tensor, maps: MemoryMaps, statuses: dict[str, os.stat_result | None]) -> FileView | None:
    is_plain = type(tensor.data) is torch.Tensor and tensor.device.type == "cpu"
    region = maps.find(tensor) if is_plain and tensor.is_contiguous() else None
    if region is None or not region.is_file or has_changed_pages(tensor, region):
        return None
    offset = tensor.data_ptr() - region.start + region.offset
    form = str(tensor.dtype), str(list(tensor.shape))
    if region.is_shared_memory:
        return FileView(region.path, 0, 0, offset, form)
    status = _status(region.path, statuses)
    return status and FileView(region.path, status.st_size, status.st_mtime_ns, offset, form)


def _status(path: str, statuses: dict[str, os.stat_result | None]) -> os.stat_result | None:
    if path not in statuses:
        try:
            statuses[path] = os.stat(path)
        except OSError:  # the file has been removed or replaced: the kernel adds "(deleted)" to its path
            statuses[path] = None
    return statuses[path]
