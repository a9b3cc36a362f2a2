"""Writes the profile of this rank: its trace is analyzed here, so that the launcher reads a small file per rank."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn

from hf_fsdp_plugin.backends.sharding.shard import plan_of
from hf_fsdp_plugin.devices import DEVICES, available_device
from hf_fsdp_plugin.estimate.results import Moment
from hf_fsdp_plugin.integrations.profiling.files import write_file
from hf_fsdp_plugin.integrations.profiling.options import ProfileOptions
from hf_fsdp_plugin.observe.profile.rank_profile import RankProfile, canonical_units, profile_of, rank_range
from hf_fsdp_plugin.observe.profile.trace import Trace, read_trace
from hf_fsdp_plugin.observe.units import UnitObservation, observe_units
from hf_fsdp_plugin.problems import Problem, SpecError

MAX_TRACE_BYTES: Final = 512 * 2**20
"""Size of a trace, before compression, above which it is not kept."""


@dataclass(kw_only=True)
class Recorded:
    """What a rank has recorded of its steps.

    Attributes:
        profiled, unprofiled: wall-clock seconds of steps with and without the profiler.
        forwards: training forwards of the model so far.
        batch: shape of the first tensor with two dims in the last training forward: samples and tokens.
        num_waits: waits for collectives in one step, about.
    """

    num_steps: int = 0
    model: nn.Module | None = None
    scratch: tempfile.TemporaryDirectory[str] | None = None
    profiled: list[float] = field(default_factory=list)
    unprofiled: list[float] = field(default_factory=list)
    forwards: int = 0
    forwards_per_step: int = 1
    batch: tuple[int, ...] = ()
    memory: Sequence[Moment] = ()
    num_waits: int = 100

    @property
    def trace(self) -> Path | None:
        """The Chrome trace in the temporary folder; ``None`` if nothing was traced."""
        return Path(self.scratch.name) / "trace.json" if self.scratch is not None else None

    def export(self, profiler: Any) -> None:
        """Write the trace of a stopped profiler to a temporary folder. Raises ``SpecError`` (FSDP-E772)."""
        with temporary_files():
            self.scratch = tempfile.TemporaryDirectory(prefix="hf_fsdp_profile_")
            profiler.export_chrome_trace(str(self.trace))

    def close(self) -> None:
        if self.scratch is not None:
            self.scratch.cleanup()
            self.scratch = None

    def add_step(self, number: int, seconds: float, options: ProfileOptions) -> None:
        """Add a step, of which the first and those in which traces are processed are not representative.

        Args:
            number: of the step that has ended, from 1.
        """
        self.forwards_per_step, self.forwards = max(1, self.forwards), 0
        if options.first_traced + options.warmup < number <= options.last_traced:
            self.profiled.append(seconds)
        elif 1 < number <= options.first_traced or number > options.before_after + 1:
            self.unprofiled.append(seconds)

    def add_forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self.forwards += 1
        tensors = (value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))
        self.batch = next((tuple(tensor.shape) for tensor in tensors if tensor.dim() >= 2), self.batch)


@contextlib.contextmanager
def temporary_files() -> Iterator[None]:
    """Raise a ``SpecError`` (FSDP-E772) for a trace that cannot be written to, or read from, the temporary folder."""
    try:
        yield
    except (OSError, ValueError) as error:
        # torch ignores errors when it writes a trace, so that a full disk shows as incomplete JSON.
        reason = error.strerror if isinstance(error, OSError) and error.strerror else "the disk may be full"
        message = f"a trace in {os.environ.get('TMPDIR') or '/tmp'} is incomplete or cannot be written: {reason}."
        fix = "Free space there, or set TMPDIR to another folder."
        raise SpecError([Problem(code="FSDP-E772", message=message, fix=fix, rank=_rank())]) from error


def write_rank_files(recorded: Recorded, options: ProfileOptions) -> None:
    """Write the files of this rank.

    Raises:
        SpecError: a file cannot be written (FSDP-E772). Nothing incomplete is left behind.
    """
    rank = _rank()
    world_size = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
    content: dict[str, Any] = {"rank": rank, "world_size": world_size, "num_steps": recorded.num_steps, "profile": None}
    try:
        options.rank_file(rank).parent.mkdir(parents=True, exist_ok=True)
        if recorded.trace is not None:
            with temporary_files():
                trace = read_trace(recorded.trace)
            profile = _analyze(recorded, trace, options, rank, world_size)
            kept = _keep_trace(recorded.trace, options, rank)
            content |= {"profile": profile.to_json() if profile is not None else None, "trace": kept}
        write_file(options.rank_file(rank), json.dumps(content))
    except (OSError, ValueError) as error:
        remove_files(options, rank)
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        message = f"the profile cannot be written to {options.folder}: {reason}."
        fix = "Free space, or write to another folder: --output DIR, or output_dir of ProfilerCallback."
        raise SpecError([Problem(code="FSDP-E772", message=message, fix=fix, rank=rank)]) from error
    finally:
        recorded.close()


def remove_files(options: ProfileOptions, rank: int) -> None:
    """Delete the files of a rank, of this profile or of an earlier one."""
    for path in (options.rank_file(rank), options.trace_file(rank)):
        with contextlib.suppress(OSError):
            path.unlink()


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))


def _keep_trace(path: Path, options: ProfileOptions, rank: int) -> str | None:
    """Compress the trace into the folder, and return its path in it; ``None`` if it is not kept."""
    if rank >= options.traces or path.stat().st_size > MAX_TRACE_BYTES:
        return None
    target = options.trace_file(rank)
    target.parent.mkdir(parents=True, exist_ok=True)
    write_file(target, lambda file: _compress(path, file))
    return str(target.relative_to(options.folder))


def _analyze(
    recorded: Recorded, trace: Trace, options: ProfileOptions, rank: int, world_size: int
) -> RankProfile | None:
    """Return the profile; ``None`` without a complete step."""
    profile = profile_of(
        trace, rank=rank, world_size=world_size, host=socket.gethostname(), device=_device_type(recorded.model),
        skip=options.warmup, most=options.active,
    )  # fmt: skip
    if profile is None:
        return None
    units = observe_units(recorded.model) if recorded.model is not None else ()
    profile = replace(
        profile, profiled=tuple(recorded.profiled), unprofiled=tuple(recorded.unprofiled),
        memory=tuple(recorded.memory), facts=_facts(recorded, units, rank),
    )  # fmt: skip
    is_list = profile.device == "cpu"
    parts = {unit.name: unit.live.shard_size for unit in units if is_list and unit.live.version == 1}
    return canonical_units(profile, [unit.name for unit in units], parts)


def _compress(source: Path, target: Any) -> None:
    with source.open("rb") as file, gzip.GzipFile(fileobj=target, mode="wb", compresslevel=3, mtime=0) as compressed:
        shutil.copyfileobj(file, compressed, 2**20)


def _device_type(model: nn.Module | None) -> str:
    plan = plan_of(model) if model is not None else None
    return plan.device_type if plan is not None else "cpu"


def _device_bytes() -> int | None:
    """Return the memory of this rank's device; on the CPU, its part of the memory of the machine."""
    device = available_device()
    if device.type == "cpu" or not device.is_initialized():
        whole = DEVICES["cpu"].total_memory()
        return None if whole is None else whole // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return device.total_memory()


def _facts(recorded: Recorded, units: Sequence[UnitObservation], rank: int) -> dict[str, Any]:
    """Return what the trace does not contain: groups of ranks and, on rank 0, settings and sizes of units."""
    facts: dict[str, Any] = {
        "device_bytes": _device_bytes(),
        "batch": list(recorded.batch),
        "forwards_per_step": recorded.forwards_per_step,
        "groups": {unit.name: rank_range(unit.live.shard_ranks) for unit in units},
    }
    plan = plan_of(recorded.model) if recorded.model is not None else None
    if rank or plan is None:
        return facts
    facts["units"] = {
        unit.name: {"num_params": unit.num_params, "is_root": unit.live.is_root, "reduce_dtype": unit.reduce_dtype}
        for unit in units
    }
    facts["plan"] = {
        "backend": plan.backend,
        "strategy": plan.strategy,
        "model": plan.model_class,
        "prefetch.forward": plan.prefetch.forward,
        "prefetch.backward": plan.prefetch.backward,
        "prefetch.limit_all_gathers": plan.prefetch.limit_all_gathers,
    }
    return facts
