"""``from_pretrained(distributed_config=…)``: checks before loading, and the process group."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from hf_fsdp_plugin.integrations.session import session
from hf_fsdp_plugin.problems import Origin, Problem, SpecError
from hf_fsdp_plugin.sources import distributed_config as source
from hf_fsdp_plugin.sources.model import Sources


def prepare_distribute_model(
    original: Callable[..., Any], cls: type, distributed_config: Any = None, *args: Any, **kwargs: Any
) -> Any:
    """Check the config before the model is loaded, and start the process group that FSDP needs.

    Raises:
        SpecError: the config has an unknown key, or a ``device_map`` is given too.
    """
    if distributed_config is None:
        return original(distributed_config, *args, **kwargs)
    session.uses_fsdp = True
    if isinstance(distributed_config, dict):
        read = source.read(Sources(distributed_config=distributed_config, environ={}))
        unknown = [problem for problem in read.problems if problem.code == "FSDP-E020"] if read is not None else []
        if unknown:
            raise SpecError(unknown)
    device_map = kwargs.get("device_map", args[0] if args else None)
    sizes = [_size(distributed_config, name) for name in ("fsdp_size", "dp_replicate_size")]
    if max(sizes) > 1:
        if device_map is not None:
            raise SpecError([_with_device_map(device_map)])
        _start_process_group()
    return original(distributed_config, *args, **kwargs)


def _size(config: Any, name: str) -> int:
    value = config.get(name) if isinstance(config, dict) else getattr(config, name, None)
    return value if isinstance(value, int) else 1


def _with_device_map(device_map: Any) -> Problem:
    return Problem(
        code="FSDP-E651",
        message=f"from_pretrained was called with device_map={device_map!r} and a distributed_config.",
        fix="Remove device_map: each rank loads its shards to its own device.",
        origin=Origin(source=source.SOURCE),
    )


def _start_process_group() -> None:
    """Create the process group as the first ``PartialState`` does, with a backend for CPU tensors too."""
    if "RANK" in os.environ:
        from accelerate import PartialState

        PartialState(cpu=os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes", "on"))
