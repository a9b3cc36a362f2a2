"""What the device has found: host waits, and uses that are wrong on a real device."""

from __future__ import annotations

import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

_OWN_FOLDER = str(Path(__file__).resolve().parent)
_MAX_FRAMES = 12
_MAX_FINDINGS = 1000


@dataclass(frozen=True, slots=True)
class Finding:
    """A use of the device that is wrong on a real one.

    Attributes:
        kind: ``race``: two streams use the same memory in no order. ``freed``: memory is freed while another stream may
            still use it. ``host memory``: pinned memory changed before its copy to the device was complete.
            ``unpinned``: memory is unpinned while a copy of it is not complete.
        text: both operations, with sizes and streams.
        stack: where the newer operation was started, innermost frame first. Empty in autograd's threads, unless a hook
            of Python runs there.
    """

    kind: str
    text: str
    stack: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}\n    at {self.stack or '(no Python stack)'}"


@dataclass(frozen=True, slots=True)
class HostWait:
    """A place where the host would wait for the device.

    Attributes:
        kind: such as ``blocking copy to host``, ``pageable copy to device``, ``item``, ``stream.synchronize``.
        num_bytes: size of the copy; 0 if there is none.
        detail: kind of the host memory, or name of the operator.
        stack: as in :class:`Finding`, without the frames of torch.
    """

    kind: str
    num_bytes: int
    detail: str
    stack: str


class _Device:
    """The callbacks that the library of the device calls, and the findings of this process."""

    def __init__(self) -> None:
        self.findings: list[Finding] = []
        self.printed: set[tuple[str, str]] = set()

    def connect(self, library: Any) -> None:
        self.library = library
        library.set_finding_callback(self.add)

    def disconnect(self) -> None:
        """Called before the interpreter ends, because memory is also freed after that."""
        self.library.set_finding_callback(None)
        self.library.set_host_wait_callback(None)

    def add(self, kind: str, text: str) -> None:
        if len(self.findings) >= _MAX_FINDINGS:
            return
        finding = Finding(kind, text, _stack())
        self.findings.append(finding)
        key = (kind, finding.stack or text)
        if key not in self.printed:  # a loop repeats the same finding in each iteration
            self.printed.add(key)
            print(f"simulated accelerator: {finding}", file=sys.stderr, flush=True)


device = _Device()


def take_findings() -> list[Finding]:
    """Return what was found since the last call."""
    found, device.findings = device.findings, []
    return found


class HostWaits:
    """Context manager that lists the host waits of all threads in ``events``. Contexts cannot be nested."""

    def __init__(self) -> None:
        self.events: list[HostWait] = []

    def __enter__(self) -> HostWaits:
        device.library.set_host_wait_callback(self._add)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        device.library.set_host_wait_callback(None)

    def _add(self, kind: str, num_bytes: int, detail: str) -> None:
        self.events.append(HostWait(kind, num_bytes, detail, _stack(without="/torch/")))

    def counts(self) -> dict[str, int]:
        """Number of events of each kind."""
        kinds = [event.kind for event in self.events]
        return {kind: kinds.count(kind) for kind in sorted(set(kinds))}


def _stack(without: str = "") -> str:
    frames = [
        f"{'/'.join(frame.filename.split('/')[-3:])}:{frame.lineno} {frame.name}"
        for frame in reversed(traceback.extract_stack())
        if not frame.filename.startswith((_OWN_FOLDER, "<frozen")) and not (without and without in frame.filename)
    ]
    return " < ".join(frames[:_MAX_FRAMES])
