"""The module ``torch.npu``: functions as in ``torch.cuda``. :func:`make_module` registers it with torch."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from . import settings
from .library import C

TYPE = settings.device_type()
DeviceLike = torch.device | str | int | None

OPTIONAL_FUNCTIONS = (
    "get_device_name", "get_device_properties", "get_device_capability", "mem_get_info", "memory_stats",
    "max_memory_reserved", "ipc_collect",
)  # fmt: skip
"""Left out of the module of device types that do not have them, so that code which needs them fails."""


class Stream(torch.Stream):
    def __new__(cls, device: DeviceLike = None, priority: int = 0, **stream: int) -> Any:
        if stream:  # stream_id, device_index and device_type of an existing stream
            return super().__new__(cls, **stream)
        return super().__new__(cls, torch.device(TYPE, _index(device)), priority=priority)


class Event(torch.Event):
    def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> Any:
        # torch reads the time between events of its own class only, not of a subclass
        return torch.Event(TYPE, enable_timing=enable_timing)


class device:
    """Context manager that selects a device."""

    def __init__(self, device: DeviceLike) -> None:
        self.index = _index(device)

    def __enter__(self) -> None:
        self.before = C.current_device()
        C.set_current_device(self.index)

    def __exit__(self, *error: object) -> None:
        C.set_current_device(self.before)


class device_of(device):
    """Context manager that selects the device of a tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__(tensor.device if tensor.device.type == TYPE else None)


def _index(device: DeviceLike) -> int:
    index = device if isinstance(device, int) or device is None else torch.device(device).index
    return C.current_device() if index is None or index < 0 else index


def _visible_index(device: DeviceLike) -> int:
    index = _index(device)
    if index >= C.num_devices():
        raise RuntimeError(f"invalid device ordinal: {index}")
    return index


_initialized = True
"""``torch.utils.checkpoint`` asks for it before it keeps the random state of a device."""

# ---- devices --------------------------------------------------------------------------------------------------------


def is_available() -> bool:
    return C.num_devices() > 0


def is_initialized() -> bool:
    return C.is_initialized()


def init() -> None:
    C.initialize()


def _lazy_init() -> None:
    C.initialize()


def _is_in_bad_fork() -> bool:
    return C.is_in_bad_fork()


def device_count() -> int:
    return C.num_devices()


def current_device() -> int:
    return C.current_device()


def set_device(device: DeviceLike) -> None:
    index = _index(device)
    C.initialize()
    C.set_current_device(index)


def get_device_name(device: DeviceLike = None) -> str:
    return "simulated accelerator"


def get_device_properties(device: DeviceLike = None) -> SimpleNamespace:
    limit = C.memory_stats(_visible_index(device)).limit
    return SimpleNamespace(name=get_device_name(), total_memory=limit, multi_processor_count=1, major=1, minor=0)


def get_device_capability(device: DeviceLike = None) -> tuple[int, int]:
    return 1, 0


def is_bf16_supported(including_emulation: bool = True) -> bool:
    return True


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16]


# ---- streams --------------------------------------------------------------------------------------------------------


def synchronize(device: DeviceLike = None) -> None:
    torch.accelerator.synchronize(_index(device))


def current_stream(device: DeviceLike = None) -> Any:
    return _as_stream(torch.accelerator.current_stream(_index(device)))


def default_stream(device: DeviceLike = None) -> Any:
    kind = torch.accelerator.current_stream().device_type
    return Stream(stream_id=0, device_index=_index(device), device_type=kind)


def _as_stream(stream: torch.Stream) -> Any:
    return Stream(stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type)


def set_stream(stream: torch.Stream | None) -> None:
    if stream is not None:
        torch.accelerator.set_stream(stream)


@contextlib.contextmanager
def stream(stream: torch.Stream | None) -> Iterator[None]:
    if stream is None:
        yield
        return
    before_device = C.current_device()
    before = torch.accelerator.current_stream(stream.device_index)
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)
        C.set_current_device(before_device)


# ---- memory ---------------------------------------------------------------------------------------------------------


def memory_allocated(device: DeviceLike = None) -> int:
    return C.memory_stats(_visible_index(device)).allocated


def max_memory_allocated(device: DeviceLike = None) -> int:
    return C.memory_stats(_visible_index(device)).peak


# Freed memory goes back to the host at once, so nothing but the allocated memory is reserved.
memory_reserved = memory_allocated
max_memory_reserved = max_memory_allocated


def reset_peak_memory_stats(device: DeviceLike = None) -> None:
    C.reset_peak(_visible_index(device))


reset_max_memory_allocated = reset_peak_memory_stats


def memory_stats(device: DeviceLike = None) -> dict[str, int]:
    stats = C.memory_stats(_visible_index(device))
    result = {"num_ooms": stats.num_ooms, "num_alloc_retries": 0}
    for kind in ("allocated_bytes", "active_bytes", "reserved_bytes"):
        result[f"{kind}.all.current"] = stats.allocated
        result[f"{kind}.all.peak"] = stats.peak
    result["allocation.all.allocated"] = stats.num_allocations
    result["allocation.all.freed"] = stats.num_frees
    result["allocation.all.current"] = stats.num_allocations - stats.num_frees
    return result


def mem_get_info(device: DeviceLike = None) -> tuple[int, int]:
    stats = C.memory_stats(_visible_index(device))
    return max(0, stats.limit - stats.allocated), stats.limit


def empty_cache() -> None:
    pass


def ipc_collect() -> None:
    pass


# ---- random numbers -------------------------------------------------------------------------------------------------


def get_rng_state(device: DeviceLike = TYPE) -> torch.Tensor:
    return default_generators[_visible_index(device)].get_state()


def set_rng_state(new_state: torch.Tensor, device: DeviceLike = TYPE) -> None:
    default_generators[_visible_index(device)].set_state(new_state)


def get_rng_state_all() -> list[torch.Tensor]:
    return [get_rng_state(index) for index in range(C.num_devices())]


def set_rng_state_all(new_states: Iterable[torch.Tensor]) -> None:
    for index, state in enumerate(new_states):
        set_rng_state(state, index)


def manual_seed(seed: int) -> None:
    default_generators[C.current_device()].manual_seed(int(seed))


def manual_seed_all(seed: int) -> None:
    for index in range(C.num_devices()):
        default_generators[index].manual_seed(int(seed))


def seed() -> None:
    default_generators[C.current_device()].seed()


def seed_all() -> None:
    seed()
    manual_seed_all(initial_seed())


def initial_seed() -> int:
    return default_generators[C.current_device()].initial_seed()


default_generators = tuple(C.default_generator(index) for index in range(C.num_devices()))


# ---- mixed precision ------------------------------------------------------------------------------------------------


class GradScaler(torch.amp.GradScaler):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(TYPE, *args, **kwargs)


# ---- registration ---------------------------------------------------------------------------------------------------


def make_module() -> ModuleType:
    """Give the device type its name in torch and register this module as ``torch.<name>``."""
    module = sys.modules[__name__]
    namespace: Any = module
    namespace.random = module
    namespace.amp = SimpleNamespace(GradScaler=GradScaler)
    if not settings.NAMES[TYPE].has_optional_functions:
        for name in OPTIONAL_FUNCTIONS:
            delattr(module, name)
    torch.utils.rename_privateuse1_backend(TYPE)
    torch._register_device_module(TYPE, module)
    torch.utils.generate_methods_for_privateuse1_backend(for_tensor=True, for_module=True, for_storage=True)
    sys.modules[f"torch.{TYPE}"] = module
    return module
