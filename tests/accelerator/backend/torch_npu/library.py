"""The C++ part of the device, with the devices of this process."""

from __future__ import annotations

from typing import Any

from . import build, settings


def _load() -> Any:
    library = build.load()
    devices = settings.visible_devices()
    library.set_num_devices(len(devices))
    for index in range(len(devices)):
        library.set_memory_limit(index, settings.memory_limit())
    return library


C = _load()
