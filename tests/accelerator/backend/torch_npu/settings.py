"""Settings of the simulated device, all from environment variables, so that a process has them before it imports torch.

| variable | default | meaning |
|---|---|---|
| `SIM_ACCELERATOR_NAME` | `npu` | torch's name of the device type: a key of :data:`NAMES` |
| `SIM_ACCELERATOR_COUNT` | 2 | number of devices of the machine |
| `SIM_ACCELERATOR_MEMORY` | 8 GiB | bytes of memory of each device |
| `ASCEND_RT_VISIBLE_DEVICES` | all | indices of the devices that this process sees, as `CUDA_VISIBLE_DEVICES` |
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

MAX_DEVICES: Final = 16  # kMaxDevices in cpp/memory.h


@dataclass(frozen=True, kw_only=True, slots=True)
class Name:
    """What libraries call a device type.

    Attributes:
        collectives: the name under which Accelerate asks for its backend of collectives.
        visible_variable: environment variable that limits a process to some devices.
        has_optional_functions: whether the module has functions that torch.cuda has and that not all devices have.
    """

    collectives: str
    visible_variable: str
    has_optional_functions: bool


NAMES: Final[Mapping[str, Name]] = MappingProxyType(
    {
        "npu": Name(collectives="hccl", visible_variable="ASCEND_RT_VISIBLE_DEVICES", has_optional_functions=True),
        "musa": Name(collectives="mccl", visible_variable="MUSA_VISIBLE_DEVICES", has_optional_functions=False),
        # A device type that Accelerate knows and this project's table of devices does not.
        "sdaa": Name(collectives="tccl", visible_variable="SDAA_VISIBLE_DEVICES", has_optional_functions=False),
    }
)


def device_type() -> str:
    """torch's name of the device type.

    Raises:
        ValueError: the name in ``SIM_ACCELERATOR_NAME`` is unknown.
    """
    name = os.environ.get("SIM_ACCELERATOR_NAME", "npu")
    if name not in NAMES:
        raise ValueError(f"SIM_ACCELERATOR_NAME={name!r} is unknown. Use one of: {', '.join(NAMES)}.")
    return name


def memory_limit() -> int:
    """Bytes of memory of each device."""
    return int(os.environ.get("SIM_ACCELERATOR_MEMORY", 8 << 30))


def visible_devices() -> tuple[int, ...]:
    """The devices of the machine that this process sees, in their order in this process.

    As with ``CUDA_VISIBLE_DEVICES``, an invalid index hides itself and all that follow it.
    """
    count = int(os.environ.get("SIM_ACCELERATOR_COUNT", 2))
    if not 0 <= count <= MAX_DEVICES:
        raise ValueError(f"SIM_ACCELERATOR_COUNT={count} is not between 0 and {MAX_DEVICES}.")
    visible = os.environ.get(NAMES[device_type()].visible_variable)
    if visible is None:
        return tuple(range(count))
    devices: list[int] = []
    for part in visible.split(","):
        if not part.strip().isdecimal() or int(part) >= count or int(part) in devices:
            break
        devices.append(int(part))
    return tuple(devices)
