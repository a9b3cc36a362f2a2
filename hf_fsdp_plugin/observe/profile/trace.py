"""Reads the Chrome trace that torch's profiler writes. The fields are those of Kineto (``output_json.cpp``).

The first part contains the names of the marks that a profiled rank writes into the trace, and of torch's own marks.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, get_args

from hf_fsdp_plugin.estimate.results import CollectiveKind

Phase = Literal["forward", "backward", "clipping", "optimizer", "data", "checkpoint", "evaluation", "other"]
PHASES: Final[tuple[Phase, ...]] = get_args(Phase)
"""Parts of a step. ``forward`` includes the computation of the loss; ``data`` is the time in the data loader on the
main thread; ``other`` is what no mark covers.
"""

PREFIX: Final = "hf_fsdp::"
BOUNDARY: Final = f"{PREFIX}step"
"""Mark of an instant: the end of an optimizer step."""
WAIT: Final = f"{PREFIX}wait"
"""Mark of the time in which the main thread waits for a collective."""
UNIT: Final = f"{PREFIX}unit "
"""Beginning of the mark of a unit's forward, also of a recomputed one. The name of the unit follows."""
GATHER: Final = f"{PREFIX}gather "
REDUCE: Final = f"{PREFIX}reduce "
"""Beginnings of the marks of an FSDP1 unit's collectives. The unit's name follows, which FSDP1 writes to no trace."""
PHASE_MARKS: Final[tuple[tuple[str, Phase], ...]] = (
    *((f"{PREFIX}{phase}", phase) for phase in PHASES),
    ("Optimizer.step#", "optimizer"),
    ("Optimizer.zero_grad#", "optimizer"),
    ("enumerate(DataLoader)#", "data"),
)
"""Beginning of a mark -> phase: the marks of this package, and those that torch writes itself
(``torch/optim/optimizer.py``, ``torch/utils/data/dataloader.py``).
"""
TORCH_UNIT_MARKS: Final = ("FSDP::all_gather", "FSDP::post_backward_reduce")
"""Marks of FSDP2 around the calls of a unit's collectives, followed by `` (name)`` unless it is the root
(``torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py``).
"""

_KINDS: Final[dict[str, CollectiveKind]] = {
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "allreduce": "all_reduce",
    "broadcast": "broadcast",
}
"""Part of a name without underscores -> kind: of the operations that start a collective, such as
``c10d::_allgather_base_`` (``torch/csrc/distributed/c10d/Ops.cpp``), and of the kernels of NCCL and RCCL, such as
``ncclDevKernel_AllGather_RING_LL``.
"""
_NOT_COMPUTATION: Final = ("c10d::", "_c10d_functional::", "autograd::", PREFIX)
_KERNELS: Final = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES: Final = ("cuda_runtime", "cuda_driver", "hip_runtime", "xpu_runtime")


@dataclass(frozen=True, slots=True)
class Event:
    """An operation or an annotation of a CPU thread, or a kernel of a device, in seconds since the epoch.

    Attributes:
        launched: when a CPU thread launched a kernel; its start if that is unknown.
    """

    name: str
    start: float
    end: float
    thread: int = 0
    launched: float = 0.0

    @property
    def nccl_kind(self) -> CollectiveKind | None:
        """The kind of collective that a kernel of NCCL or RCCL executes; ``None`` for other kernels."""
        return collective_kind(self.name) or "broadcast" if self.name.startswith(("nccl", "rccl")) else None

    @property
    def copies(self) -> bool:
        """Whether a kernel copies between host and device."""
        return self.name.startswith(("Memcpy HtoD", "Memcpy DtoH"))


def collective_kind(name: str) -> CollectiveKind | None:
    """Return the kind in the name of an operation or a kernel; ``None`` if the name contains none."""
    plain = name.replace("_", "").lower()
    return next((kind for part, kind in _KINDS.items() if part in plain), None)


@dataclass(kw_only=True)
class Trace:
    """What the analysis needs of one rank's trace. Every list is sorted by start.

    Attributes:
        marks: annotations of CPU threads.
        ops: operations of CPU threads that compute.
        waits: operations in which a CPU thread waits for a collective, other than issues.
        issues: operations with which a CPU thread starts a collective.
        kernels: kernels and copies of a device.
    """

    marks: list[Event] = field(default_factory=list)
    ops: list[Event] = field(default_factory=list)
    waits: list[Event] = field(default_factory=list)
    issues: list[Event] = field(default_factory=list)
    kernels: list[Event] = field(default_factory=list)

    def list_of(self, category: str, name: str) -> list[Event] | None:
        """Return the list to which an event belongs; ``None`` if the analysis does not need it."""
        if category == "user_annotation":
            return self.marks
        if category in _KERNELS:
            return self.kernels
        if name.startswith("c10d::") and collective_kind(name) is not None:
            return self.issues
        if name == "_c10d_functional::wait_tensor":
            return self.waits
        return self.ops if "::" in name and not name.startswith(_NOT_COMPUTATION) else None


def read_trace(path: Path) -> Trace:
    """Return the content of a Chrome trace.

    Raises:
        ValueError: it is not a complete trace of torch's profiler.
        OSError: it cannot be read.
    """
    rows: list[tuple[float, float, str, str, int, int]] = []
    launches: dict[int, float] = {}

    def reduce_object(pairs: list[tuple[str, Any]]) -> Any:
        """Keep only the needed fields of an event while the file is parsed: a trace can have millions of events."""
        tree = dict(pairs)
        if "ph" not in tree:
            return tree  # the arguments of an event, or the whole trace
        category, start, args = str(tree.get("cat", "")), float(tree.get("ts", 0)), tree.get("args", {})
        correlation = int(args.get("correlation", -1))
        if category in _LAUNCHES:
            launches[correlation] = start
        elif tree["ph"] == "X" and category in ("cpu_op", "user_annotation", *_KERNELS):
            thread = tree.get("tid", 0)
            end = start + float(tree.get("dur", 0))
            rows.append(
                (start, end, category, str(tree["name"]), thread if isinstance(thread, int) else 0, correlation)
            )
        return None

    with path.open() as file:
        tree = json.load(file, object_pairs_hook=reduce_object)
    if not isinstance(tree, dict) or "traceEvents" not in tree:
        raise ValueError(f"{path} has no traceEvents.")
    base = float(tree.get("baseTimeNanoseconds", 0)) / 1e9
    trace = Trace()
    for start, end, category, name, thread, correlation in sorted(rows):
        if (events := trace.list_of(category, name)) is not None:
            launched = base + launches.get(correlation, start) / 1e6
            events.append(Event(name, base + start / 1e6, base + end / 1e6, thread, launched))
    return trace
