"""Damages to files."""

from __future__ import annotations

from pathlib import Path


def flip(path: Path, position: int | None = None) -> None:
    """Change one byte, by default the middle one."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2 if position is None else position] ^= 0x5A
    path.write_bytes(data)


def truncate(path: Path) -> None:
    """Delete the last byte."""
    path.write_bytes(path.read_bytes()[:-1])


def exchange(first: Path, second: Path) -> None:
    """Exchange the contents of two files."""
    data = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(data)
