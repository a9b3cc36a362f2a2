"""Machines: throughput of devices and of the links between them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final, Literal

from hf_fsdp_plugin.estimate.results import CollectiveKind

OpKind = Literal["matmul", "attention", "memory", "function"]
"""Kinds of operations: ``function`` computes exponentials and the like, which limit a CPU more than its memory does."""
Curve = tuple[tuple[float, float], ...]
"""Points (size, throughput), sorted by size."""
NCCL_BASE_SECONDS: Final = 8.4e-6
NETWORK_FRACTION: Final = 0.9
_LIKELY: Final = (1.0, 1.0, 1.0)


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
class Machine:
    """Figures of a device and of its links. Throughput in FLOP/s and bytes/s.

    Attributes:
        peak: dtype (``bf16``) -> FLOP/s of matrix products; empty if unknown.
        matmul, attention, memory: achievable fractions: pessimistic, likely, optimistic.
        intra, inter: links inside a machine and, per rank, between machines.
        host_bandwidth: bytes/s between device and host memory.
        capability: CUDA's compute capability, such as 9.0; ``None`` if it is unknown or the device is no GPU.
        op_seconds: time to start an operation.
        update_op_seconds: time to start an operation of the optimizer.
        unit_seconds: time of torch's hooks per unit and pass, by backend (``fsdp2``).
        overlaps: whether communication and computation run at the same time: no on CPU ranks.
        curves: measured throughput by size, such as ``matmul.bf16`` (FLOPs, FLOP/s) and ``memory.fp32`` (bytes,
            bytes/s); they replace ``peak``, ``memory_bandwidth`` and the fractions.
        collectives: measured collectives; replace the links.
        spread: relative throughput of slow and of fast measurements.
    """

    name: str
    device: str
    ranks_per_machine: int
    peak: Mapping[str, float]
    memory_bandwidth: float
    memory_bytes: float
    matmul: tuple[float, float, float] = _LIKELY
    attention: tuple[float, float, float] = _LIKELY
    memory: tuple[float, float, float] = _LIKELY
    intra: Link
    inter: Link
    host_bandwidth: float
    capability: float | None = None
    op_seconds: float = 5e-6
    update_op_seconds: float = 5e-6
    unit_seconds: Mapping[str, float] = field(default_factory=dict)
    overlaps: bool = True
    curves: Mapping[str, Curve] = field(default_factory=dict)
    collectives: tuple[MeasuredCollective, ...] = ()
    spread: tuple[float, float] = (1.0, 1.0)

    @property
    def label(self) -> str:
        """The figures that estimates use, in a line."""
        if self.curves:
            best = ", ".join(f"{value / 1e9:,.0f} GFLOP/s {dtype}" for dtype, value in self.peak.items())
            return f"{self.name}: {self.device}, {best}, measured on {self.ranks_per_machine} ranks"
        peak = f"{self.peak['bf16'] / 1e12:,.0f} TFLOP/s bf16"
        links = f"links {self.intra.bandwidth / 1e9:,.1f} and {self.inter.bandwidth / 1e9:,.1f} GB/s"
        return f"{self.name}: {self.device}, {peak}, {links} per rank inside and between machines"

    def throughput(self, kind: OpKind, dtype: str, size: float, case: int) -> float:
        """Return FLOP/s of products and attention, and bytes/s of other operations.

        Args:
            size: FLOPs or bytes of the operation.
            case: 0 pessimistic, 1 likely, 2 optimistic.
        """
        if self.curves:
            curve = self.curves.get(f"{kind}.{dtype}") or self.curves[f"{kind}.fp32"]
            return interpolate(curve, size) * (self.spread[0], 1.0, self.spread[1])[case]
        if kind in ("matmul", "attention"):
            fraction = self.matmul if kind == "matmul" else self.attention
            return self.peak.get(dtype, self.peak["bf16"]) * fraction[case]
        return self.memory_bandwidth * self.memory[case]

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
        if measured := self._measured_collective(kind, group_size):
            return lookup(measured.seconds, float(num_bytes))
        rounds = 2 if kind == "all_reduce" else 1
        bandwidth = self.intra.bandwidth
        if machines > 1:
            bandwidth = min(bandwidth, self.inter.bandwidth * NETWORK_FRACTION * group_size / machines)
        steps, between = rounds * (group_size - 1), rounds * (machines - 1) if machines > 1 else 0
        latency = NCCL_BASE_SECONDS + (steps - between) * self.intra.latency + between * self.inter.latency
        return latency + rounds * num_bytes * (group_size - 1) / group_size / bandwidth

    def _measured_collective(self, kind: CollectiveKind, group_size: int) -> MeasuredCollective | None:
        found = [each for each in self.collectives if each.kind == kind]
        return min(found, key=lambda each: abs(each.group_size - group_size), default=None)


def interpolate(curve: Curve, size: float) -> float:
    """Return the value at a size, linear between the points, and that of the nearest point outside of them."""
    if size <= curve[0][0]:
        return curve[0][1]
    for (x0, y0), (x1, y1) in pairwise(curve):
        if size <= x1:
            return y0 + (y1 - y0) * (size - x0) / (x1 - x0)
    return curve[-1][1]


def lookup(curve: Curve, size: float) -> float:
    """Return seconds at a size; beyond the largest point, in proportion to the size."""
    if size > curve[-1][0]:
        return curve[-1][1] * size / curve[-1][0]
    return interpolate(curve, size)
