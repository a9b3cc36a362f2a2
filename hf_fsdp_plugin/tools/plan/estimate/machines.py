"""Machines: throughput of devices and of the links between them.

Known machines are in the table machines.yaml, measured ones in JSON files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import yaml

from hf_fsdp_plugin.problems import Problem, SpecError
from hf_fsdp_plugin.tools.plan.estimate.types import CollectiveKind
from hf_fsdp_plugin.vocabulary import did_you_mean, nearest_word

OpKind = Literal["matmul", "attention", "memory", "function", "fused"]
"""Kinds of operations: ``function`` computes exponentials and the like, which limit a CPU more than its memory does;
``fused`` is the traffic of kernels that ``torch.compile`` generates."""
Curve = tuple[tuple[float, float], ...]
"""Points (size, throughput), sorted by size."""
RANKS_PER_MACHINE: Final = 8
"""Assumed number of ranks per machine if no machine file gives it."""
NCCL_BASE_SECONDS: Final = 8.4e-6
ATTENTION_RAMP: Final = 400
"""Tokens per sample at which fused attention reaches half of its throughput of long samples (machines.yaml)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """A kind of link: bytes per second of one rank in one direction, and seconds per step of a ring."""

    bandwidth: float
    latency: float


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredCollective:
    """A collective as measured: seconds of a call at several sizes in bytes of its larger side."""

    kind: CollectiveKind
    group_size: int
    seconds: Curve


@dataclass(frozen=True, kw_only=True, slots=True)
class Evidence:
    """How far predicted times were from published runs. Each run is predicted by a fit without the runs of its source.

    Attributes:
        devices: the devices of the runs.
        low, high: factors of the predicted time of a step, which are the ends of an interval.
        inside: number of runs whose time is in the interval.
        runs: number of runs.
    """

    devices: str
    low: float
    high: float
    inside: int
    runs: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """Figures of a device and of its links. Throughput in FLOP/s and bytes/s.

    Attributes:
        peak: dtype (``bf16``) -> FLOP/s of matrix products; empty if unknown.
        matmul, attention, memory: achieved fractions of the peak and of the memory bandwidth in a training.
        kernel_seconds: what a kernel takes besides its arithmetic or traffic.
        contention: fraction of the time of overlapped collectives by which they slow computation down.
        network_fraction: achieved fraction of the bandwidth between machines.
        fusion: traffic of compiled kernels over that of a perfect fusion.
        power: power limit over that of the data sheet.
        evidence: how far predictions were from published runs; ``None`` if no run on this device was compared.
        intra, inter: links inside a machine and, per rank, between machines.
        host_bandwidth: bytes/s between device and host memory.
        host_memory_bytes: memory of the host; 0 if it is unknown.
        capability: CUDA's compute capability, such as 9.0; ``None`` if it is unknown or the device is no GPU.
        op_seconds: time of the host to start an operation.
        update_op_seconds: time to start an operation of the optimizer.
        unit_seconds: time of torch's hooks per unit and pass, by backend (``fsdp2``).
        overlaps: whether communication and computation run at the same time: no on CPU ranks.
        curves: measured throughput by size, such as ``matmul.bf16`` (FLOPs, FLOP/s) and ``memory.fp32`` (bytes,
            bytes/s); they replace ``peak``, ``memory_bandwidth`` and the fractions.
        collectives: measured collectives; replace the links.
    """

    name: str
    device: str
    ranks_per_machine: int
    peak: Mapping[str, float]
    memory_bandwidth: float
    memory_bytes: float
    matmul: float = 1.0
    attention: float = 1.0
    memory: float = 1.0
    kernel_seconds: float = 0.0
    contention: float = 0.0
    network_fraction: float = 0.9
    fusion: float = 1.0
    power: float = 1.0
    intra: Link
    inter: Link
    host_bandwidth: float
    host_memory_bytes: float = 0.0
    capability: float | None = None
    op_seconds: float = 5e-6
    update_op_seconds: float = 5e-6
    unit_seconds: Mapping[str, float] = field(default_factory=dict)
    overlaps: bool = True
    curves: Mapping[str, Curve] = field(default_factory=dict)
    collectives: tuple[MeasuredCollective, ...] = ()
    evidence: Evidence | None = None

    @property
    def label(self) -> str:
        """The figures that estimates use, in a line."""
        if self.curves:
            best = ", ".join(f"{value / 1e9:,.0f} GFLOP/s {dtype}" for dtype, value in self.peak.items())
            return f"{self.name}: {self.device}, {best}, measured on {self.ranks_per_machine} ranks"
        peak = f"{self.peak['bf16'] / 1e12:,.0f} TFLOP/s bf16"
        links = f"links {self.intra.bandwidth / 1e9:,.1f} and {self.inter.bandwidth / 1e9:,.1f} GB/s"
        return f"{self.name}: {self.device}, {peak}, {links} per rank inside and between machines"

    def throughput(self, kind: OpKind, dtype: str, size: float, length: int = 0) -> float:
        """Return FLOP/s of products and attention, and bytes/s of other operations.

        Args:
            size: FLOPs or bytes of the operation.
            length: tokens per sample, for attention.
        """
        if self.curves:
            kind = "memory" if kind == "fused" else kind
            return interpolate(self.curves.get(f"{kind}.{dtype}") or self.curves[f"{kind}.fp32"], size)
        if kind not in ("matmul", "attention"):
            return self.memory_bandwidth * self.memory / (self.fusion if kind == "fused" else 1)
        # The clock follows the square root of the power, between the cube root of a scaled voltage and proportion.
        peak = self.peak.get(dtype, self.peak["bf16"]) * self.power**0.5
        return peak * (self.matmul if kind == "matmul" else self.attention * length / (length + ATTENTION_RAMP))

    def collective_seconds(self, kind: CollectiveKind, group_size: int, num_bytes: int, machines: int) -> float:
        """Seconds of one call as a ring.

        A ring of n ranks has n - 1 steps, each with 1/n of the bytes; an all-reduce is a reduce-scatter and an
        all-gather (Thakur et al., 2005). Between machines, each rank of the group adds the bandwidth of its card.

        Args:
            num_bytes: bytes of the larger side.
            machines: number of machines that the group spans.
        """
        if group_size <= 1:
            return 0.0
        measured = [each for each in self.collectives if each.kind == kind]
        if closest := min(measured, key=lambda each: abs(each.group_size - group_size), default=None):
            return seconds_at(closest.seconds, float(num_bytes))
        rounds = 2 if kind == "all_reduce" else 1
        bandwidth = self.intra.bandwidth
        if machines > 1:
            bandwidth = min(bandwidth, self.inter.bandwidth * self.network_fraction * group_size / machines)
        steps, between = rounds * (group_size - 1), rounds * (machines - 1) if machines > 1 else 0
        latency = NCCL_BASE_SECONDS + (steps - between) * self.intra.latency + between * self.inter.latency
        return latency + rounds * num_bytes * (group_size - 1) / group_size / bandwidth


def interpolate(curve: Curve, size: float) -> float:
    """Return the value at a size: linear between the points, and outside of them the value of the nearest point."""
    sizes, values = zip(*curve, strict=True)
    return float(np.interp(size, sizes, values))


def seconds_at(curve: Curve, size: float) -> float:
    """Return seconds at a size; beyond the largest point, in proportion to the size."""
    return curve[-1][1] * size / curve[-1][0] if size > curve[-1][0] else interpolate(curve, size)


def machine_named(name: str) -> Machine:
    """Return a machine: ``h100-sxm``, ``h100-sxm:efa-3200`` with another network, or the path of a machine file.

    Raises:
        SpecError: there is no such machine or network, or the file is invalid (FSDP-E830, FSDP-E831).
    """
    if Path(name).suffix in (".json", ".yaml", ".yml"):
        return read_machine(Path(name))
    table = _table()
    base, _, network = name.lower().partition(":")
    for what, given, known in (("machine", base, table["machines"]), ("network", network, table["networks"])):
        if given not in known and (given or what == "machine"):
            close = " or ".join(each for each in known if each.startswith(given)) or nearest_word(given, known)
            fix = did_you_mean(close, f"Use one of {', '.join(known)}, or the path of a machine file.")
            raise SpecError([Problem(code="FSDP-E830", message=f"{given!r} is not a known {what}.", fix=fix)])
    row = dict(table["machines"][base])
    usual, compared = row.pop("network"), row.pop("compared")
    link = table["networks"][network or usual]
    row["evidence"] = Evidence(**table["evidence"][compared]) if compared else None
    row |= {"intra": Link(**row["intra"]), "inter": Link(bandwidth=link["bandwidth"], latency=link["latency"])}
    return Machine(**row, name=base if network in ("", usual) else f"{base}:{network}")


@cache
def _table() -> dict[str, Any]:
    text = files("hf_fsdp_plugin.tools.plan.estimate").joinpath("machines.yaml").read_text(encoding="utf-8")
    table: dict[str, Any] = yaml.safe_load(text)
    return table


def read_machine(path: Path) -> Machine:
    """Return the machine in a file. Fields of other versions are ignored.

    Raises:
        SpecError: the file is missing or is not a machine file (FSDP-E831).
    """

    def points(curve: Any) -> Curve:
        return tuple((float(size), float(value)) for size, value in curve)

    try:
        data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        data["curves"] = {name: points(curve) for name, curve in data["curves"].items()}
        data["collectives"] = tuple(
            MeasuredCollective(**{**each, "seconds": points(each["seconds"])}) for each in data["collectives"]
        )
        data |= {side: Link(**data[side]) for side in ("intra", "inter")}
        data["evidence"] = Evidence(**data["evidence"]) if data.get("evidence") else None
        return Machine(**{each.name: data[each.name] for each in fields(Machine) if each.name in data})
    except OSError as error:
        reason = f"cannot read the machine file {path}: {error.strerror or error}."
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        reason = f"{path} is not a machine file: {error}."
    fix = "Name a known machine, or the file of a measured one."
    raise SpecError([Problem(code="FSDP-E831", message=reason, fix=fix)])
