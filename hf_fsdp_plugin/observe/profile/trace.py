"""Reads the Chrome trace that torch's profiler writes. The fields are those of Kineto (``output_json.cpp``).

The first part contains the names of the marks that a profiled rank writes into the trace, and of torch's own marks.
"""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, get_args

from hf_fsdp_plugin.estimate.results import CollectiveKind

Phase = Literal["forward", "backward", "clipping", "optimizer", "data", "checkpoint", "evaluation", "other"]
PHASES: Final[tuple[Phase, ...]] = get_args(Phase)
"""Parts of a step. ``forward`` includes the computation of the loss; ``data`` is the time in the data loader on the
main thread; ``other`` is what no mark covers.
"""
PHASE_NAMES: Final[dict[Phase, str]] = {phase: phase for phase in PHASES} | {"data": "data loading"}

PREFIX: Final = "hf_fsdp::"
BOUNDARY: Final = f"{PREFIX}step"
"""An instant: the end of an optimizer step."""
WAIT: Final = f"{PREFIX}wait"
"""The main thread waits for a collective."""
UNIT: Final = f"{PREFIX}unit "
"""Followed by the name of a unit: its forward, also when it is recomputed."""
SAMPLE: Final = f"{PREFIX}sample"
"""An instant at which the memory was sampled."""
GATHER: Final = f"{PREFIX}gather "
REDUCE: Final = f"{PREFIX}reduce "
"""Followed by the name of a unit of FSDP1, which does not name its units in a trace."""
PHASE_MARKS: Final[dict[str, Phase]] = {f"{PREFIX}{phase}": phase for phase in PHASES}
"""Marks of this package -> phase."""
TORCH_PHASE_MARKS: Final[tuple[tuple[str, Phase], ...]] = (
    ("Optimizer.step#", "optimizer"),
    ("Optimizer.zero_grad#", "optimizer"),
    ("enumerate(DataLoader)#", "data"),
)
"""Prefixes of the marks that torch writes itself (``torch/optim/optimizer.py``, ``torch/utils/data/dataloader.py``)."""
TORCH_UNIT_MARKS: Final[tuple[tuple[str, str], ...]] = (
    ("FSDP::all_gather", "gather"),
    ("FSDP::post_backward_reduce", "reduce"),
)
"""Marks of FSDP2 around the calls of a unit's collectives, followed by `` (name)`` unless it is the root
(``torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py``).
"""
RATE_LIMITER: Final = "FullyShardedDataParallel.rate_limiter"
"""FSDP1 waits because two units are gathered (``limit_all_gathers``)."""

ISSUES: Final[dict[str, CollectiveKind]] = {
    "c10d::allgather_": "all_gather",
    "c10d::_allgather_base_": "all_gather",
    "c10d::allgather_into_tensor_coalesced_": "all_gather",
    "c10d::_reduce_scatter_base_": "reduce_scatter",
    "c10d::reduce_scatter_": "reduce_scatter",
    "c10d::reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "c10d::allreduce_": "all_reduce",
    "c10d::allreduce_coalesced_": "all_reduce",
    "c10d::broadcast_": "broadcast",
}
"""Operations that start a collective (``torch/csrc/distributed/c10d/Ops.cpp``) -> kind."""
WORK_PREFIX: Final = "gloo:"
"""gloo's threads mark the execution of a collective, for example ``gloo:all_gather``. They run a reduce-scatter as
``gloo:all_reduce``.
"""
NCCL_KINDS: Final[tuple[tuple[str, CollectiveKind], ...]] = (
    ("AllGather", "all_gather"),
    ("ReduceScatter", "reduce_scatter"),
    ("AllReduce", "all_reduce"),
    ("Broadcast", "broadcast"),
)
"""Parts of the names of NCCL's kernels, such as ``ncclDevKernel_AllGather_RING_LL``, which RCCL has too."""
_DTYPE_BYTES: Final[Mapping[str, int]] = {
    **{"float": 4, "double": 8, "c10::Half": 2, "c10::BFloat16": 2, "int": 4, "long": 8, "unsigned char": 1, "bool": 1},
    **{"Float": 4, "Double": 8, "Half": 2, "BFloat16": 2, "Int": 4, "Long": 8, "Byte": 1, "Char": 1, "Bool": 1},
}
"""Names of dtypes in ``Input type`` of an operation, and in ``dtype`` of NCCL's metadata -> bytes."""
_NOT_COMPUTATION: Final = ("c10d::", "_c10d_functional::", "autograd::", "hf_fsdp::")
_COPIES_BETWEEN_DEVICES: Final = ("Memcpy HtoD", "Memcpy DtoH")
_MEMORY: Final = "[memory]"


@dataclass(frozen=True, slots=True)
class Span:
    """An interval of one CPU thread, in seconds since the epoch."""

    start: float
    end: float
    thread: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Event(Span):
    """An operation or an annotation."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Work(Span):
    """A collective that a thread of gloo executes.

    Attributes:
        item_bytes: bytes of an element; 0 if the trace has no dtype, as for lists of tensors.
    """

    item_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Issue(Work):
    """The operation with which a CPU thread starts a collective.

    Attributes:
        elements: of the larger side of the collective on this rank; 0 if the trace has no shapes.
    """

    kind: CollectiveKind
    elements: int = 0


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel, or a copy, on a device.

    Attributes:
        launched: when a CPU thread launched it; its start if that is unknown.
        kind: of a collective of NCCL or RCCL; ``None`` for computation.
        copies: whether it copies between host and device.
        bytes: of a collective; 0 if the trace does not contain its size.
    """

    name: str
    start: float
    end: float
    launched: float
    kind: CollectiveKind | None = None
    copies: bool = False
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class MemoryPoint:
    """Bytes allocated on a device at one time. On the CPU, allocations before the trace do not count."""

    time: float
    bytes: int
    on_device: bool


@dataclass(kw_only=True)
class Trace:
    """What the analysis needs of one rank's trace. Every list is sorted by start.

    Attributes:
        marks: annotations of CPU threads.
        ops: operations of CPU threads that compute.
        waits: operations in which a CPU thread waits for a collective, other than issues.
        works: collectives that gloo's threads execute.
    """

    marks: list[Event] = field(default_factory=list)
    ops: list[Event] = field(default_factory=list)
    waits: list[Event] = field(default_factory=list)
    issues: list[Issue] = field(default_factory=list)
    works: list[Work] = field(default_factory=list)
    kernels: list[Kernel] = field(default_factory=list)
    memory: list[MemoryPoint] = field(default_factory=list)


def read_trace(path: Path) -> Trace:
    """Return the content of a Chrome trace, compressed or not.

    Raises:
        ValueError: it is not a complete trace of torch's profiler.
        OSError: it cannot be read.
    """
    reader = _Reader()
    open_file: Any = gzip.open if path.suffix == ".gz" else open
    with open_file(path, "rt") as file:
        # Events are reduced while they are parsed: a trace can have millions of them.
        tree = json.load(file, object_pairs_hook=reader.read_object)
    if not isinstance(tree, dict) or "traceEvents" not in tree:
        raise ValueError(f"{path} has no traceEvents.")
    return reader.finish(float(tree.get("baseTimeNanoseconds", 0)) / 1e9)


class _Reader:
    """Sorts the events of a trace into the lists of a :class:`Trace`, with times in microseconds until ``finish``."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, str, float, float, int, dict[str, Any]]] = []
        self.launches: dict[int, float] = {}
        self.memory: list[tuple[float, int, bool]] = []

    def read_object(self, pairs: list[tuple[str, Any]]) -> Any:
        tree = dict(pairs)
        if "ph" not in tree:
            return tree  # the arguments of an event, or the whole trace
        if tree["ph"] == "X":
            self._read_span(tree)
        elif tree.get("name") == _MEMORY:
            args = tree.get("args", {})
            on_device = int(args.get("Device Type", 0)) != 0
            self.memory.append((float(tree["ts"]), int(args.get("Total Allocated", 0)), on_device))
        return None

    def _read_span(self, tree: dict[str, Any]) -> None:
        kind, args = str(tree.get("cat", "")), tree.get("args", {})
        start, seconds = float(tree["ts"]), float(tree.get("dur", 0.0))
        if kind in ("cuda_runtime", "cuda_driver", "hip_runtime", "xpu_runtime"):
            if (correlation := args.get("correlation")) is not None:
                self.launches[int(correlation)] = start
        elif kind in ("cpu_op", "user_annotation", "kernel", "gpu_memcpy", "gpu_memset"):
            thread = tree.get("tid", 0)
            self.rows.append((kind, str(tree["name"]), start, seconds, thread if isinstance(thread, int) else 0, args))

    def finish(self, base: float) -> Trace:
        trace = Trace()
        for kind, name, start, seconds, thread, args in sorted(self.rows, key=lambda row: row[2]):
            begin, end = base + start / 1e6, base + (start + seconds) / 1e6
            if kind == "user_annotation" and name.startswith(WORK_PREFIX):
                trace.works.append(Work(begin, end, thread, item_bytes=max(_item_sizes(args), default=0)))
            elif kind == "user_annotation":
                trace.marks.append(Event(begin, end, thread, name=name))
            elif kind != "cpu_op":
                launched = self.launches.get(int(args.get("correlation", -1)), start)
                trace.kernels.append(_kernel(kind, name, begin, end, base + launched / 1e6, args))
            elif name in ISSUES:
                largest = max((_elements(dims) for dims in args.get("Input Dims", ()) if dims), default=0)
                items = max(_item_sizes(args), default=0)
                issue = Issue(begin, end, thread, kind=ISSUES[name], elements=largest, item_bytes=items)
                trace.issues.append(issue)
            elif name == "_c10d_functional::wait_tensor":
                trace.waits.append(Event(begin, end, thread, name=name))
            elif "::" in name and not name.startswith(_NOT_COMPUTATION):
                trace.ops.append(Event(begin, end, thread, name=name))
        trace.memory = [MemoryPoint(base + time / 1e6, size, place) for time, size, place in sorted(self.memory)]
        return trace


def _kernel(kind: str, name: str, start: float, end: float, launched: float, args: Mapping[str, Any]) -> Kernel:
    collective: CollectiveKind | None = None
    if kind == "kernel" and name.startswith(("nccl", "rccl")):
        collective = next((found for part, found in NCCL_KINDS if part in name), "broadcast")
    elements = max(int(args.get("In msg nelems", 0)), int(args.get("Out msg nelems", 0)))
    return Kernel(
        name=name,
        start=start,
        end=end,
        launched=launched,
        kind=collective,
        copies=name.startswith(_COPIES_BETWEEN_DEVICES),
        bytes=elements * _DTYPE_BYTES.get(str(args.get("dtype", "")), 0),
    )


def _item_sizes(args: Mapping[str, Any]) -> list[int]:
    """Return the bytes of an element of each tensor among the inputs of an operation."""
    return [_DTYPE_BYTES[name] for name in args.get("Input type", ()) if name in _DTYPE_BYTES]


def _elements(dims: Sequence[Any]) -> int:
    """Return the number of elements of a shape, or of a list of shapes."""
    if dims and isinstance(dims[0], list):
        return sum(_elements(inner) for inner in dims)
    return math.prod(int(size) for size in dims)
