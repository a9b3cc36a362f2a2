"""The memory of this machine that is still available: what the kernel can give, within the limits of control groups.

A container or a job of a batch system has a limit that the kernel's own figures do not contain (``man 7 cgroups``).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Final

import psutil

SYSTEM = Path("/")
"""The folder that contains ``proc`` and ``sys``."""
_V1: Final = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2: Final = ("memory.max", "memory.current", "inactive_file")
"""Files with the limit and the usage of a group, and the page cache in ``memory.stat`` that the kernel frees first."""


def available_memory() -> int:
    """Return the bytes that processes can still allocate here: the least of all limits."""
    limits = [psutil.virtual_memory().available]
    for folder, (limit, usage, cache) in _groups():
        most, used = _number(folder / limit), _number(folder / usage)
        if most is not None and used is not None:
            limits.append(max(0, most - used + _numbers(folder / "memory.stat").get(cache, 0)))
    return min(limits)


def _groups() -> Iterator[tuple[Path, tuple[str, str, str]]]:
    """Yield the folders of this process's control group and of the groups around it, whose limits count, too.

    In a container, the path may be that on the host, and only the outermost folder exists.
    """
    for line in _text(SYSTEM / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root = SYSTEM / "sys/fs/cgroup" / ("memory" if controllers else "")
        own = PurePosixPath(path.lstrip("/"))
        for part in (own, *own.parents):
            yield root / part, _V1 if controllers else _V2


def _text(path: Path) -> str:
    with suppress(OSError, UnicodeDecodeError):
        return path.read_text(encoding="utf-8")
    return ""


def _number(path: Path) -> int | None:
    """Return the number in a file; ``None`` without a limit (``max``), or without the file."""
    text = _text(path).strip()
    return int(text) if text.isdecimal() else None


def _numbers(path: Path) -> dict[str, int]:
    """Return the numbers in a file by the word before each of them."""
    rows = (line.split() for line in _text(path).splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdecimal()}
