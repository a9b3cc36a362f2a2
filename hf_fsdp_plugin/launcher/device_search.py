"""Finds the accelerators of this machine.

Importing torch takes seconds. It is imported only if the machine has an accelerator's device file, in a separate
process that prints the accelerators.
"""

from __future__ import annotations

import glob
import importlib.metadata
import json
import subprocess
import sys
from dataclasses import dataclass

_DEVICE_FILES = (
    "/dev/nvidia[0-9]*",
    "/dev/dxg",  # NVIDIA under WSL
    "/dev/kfd",  # AMD
    "/dev/dri/renderD*",  # Intel
    "/dev/davinci[0-9]*",  # Ascend
    "/dev/cambricon_dev[0-9]*",
    "/dev/accel/accel[0-9]*",
    "/dev/hl[0-9]*",  # Gaudi
    "/dev/neuron[0-9]*",
)
_PRINT_DEVICES = """
import json, torch
device = torch.accelerator.current_accelerator(check_available=True)
found = {"kind": device.type, "count": torch.accelerator.device_count()} if device else {"kind": "cpu", "count": 0}
try:
    properties = getattr(torch, found["kind"]).get_device_properties(0)
    found |= {"name": str(properties.name), "memory_bytes": int(properties.total_memory)}
except Exception:  # not every device type has these properties
    pass
print(json.dumps(found))
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundDevices:
    """Type and number of accelerators that torch can use on this machine: ``cuda`` and 8, or ``cpu`` and 0.

    Attributes:
        name: name of the first device; empty if torch does not know it.
        memory_bytes: memory of the first device; 0 if torch does not know it.
    """

    kind: str = "cpu"
    count: int = 0
    name: str = ""
    memory_bytes: int = 0


class DeviceSearch:
    """A search that runs in the background.

    It starts a process only if the machine has a device file, or a package with a device type that torch loads.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._found: FoundDevices | None = None
        has_device_file = any(glob.glob(pattern) for pattern in _DEVICE_FILES)
        if has_device_file or importlib.metadata.entry_points(group="torch.backends"):
            self._process = subprocess.Popen(
                [sys.executable, "-c", _PRINT_DEVICES],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )

    def result(self) -> FoundDevices:
        """Wait for the search, and return the accelerators."""
        if self._found is None:
            self._found = self._read()
        return self._found

    def close(self) -> None:
        """End the search if it still runs."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _read(self) -> FoundDevices:
        if self._process is None:
            return FoundDevices()
        process, self._process = self._process, None
        printed, _ = process.communicate()
        lines = printed.splitlines()
        if process.returncode != 0 or not lines:
            return FoundDevices()
        found = FoundDevices(**json.loads(lines[-1]))
        return FoundDevices() if found.kind in ("cpu", "mps") else found


def find_devices() -> FoundDevices:
    """Return the accelerators of this machine. Apple's GPU serves one process only and is not counted."""
    return DeviceSearch().result()
