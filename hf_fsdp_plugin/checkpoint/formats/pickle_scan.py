"""Finds the largest memo index in a pickle's instructions, before the pickle is read.

Python's unpickler allocates a memo whose length is the largest index in the file. Four wrong bytes can therefore
exhaust the memory: a file of 10 bytes can allocate 34 GB. A valid pickle numbers its objects from 0.
"""

from __future__ import annotations

import pickletools
from contextlib import suppress
from functools import lru_cache

_LONG_BINPUT, _PUT = b"r"[0], b"p"[0]
_LENGTH_BYTES = {
    pickletools.TAKEN_FROM_ARGUMENT1: 1,
    pickletools.TAKEN_FROM_ARGUMENT4: 4,
    pickletools.TAKEN_FROM_ARGUMENT4U: 4,
    pickletools.TAKEN_FROM_ARGUMENT8U: 8,
}
_TWO_LINES = frozenset(b"ci")
"""The opcodes GLOBAL and INST. Each has two lines as arguments: a module and a name."""


@lru_cache(maxsize=1)
def _arguments() -> tuple[list[int | None], dict[int, int], frozenset[int]]:
    """Return tables by opcode: sizes of fixed arguments, widths of length prefixes, opcodes with line arguments."""
    fixed: list[int | None] = [None] * 256
    counted: dict[int, int] = {}
    lines = set()
    for opcode in pickletools.opcodes:
        code = ord(opcode.code)
        size = opcode.arg.n if opcode.arg is not None else 0
        if size >= 0:
            fixed[code] = size
        elif size == pickletools.UP_TO_NEWLINE:
            lines.add(code)
        else:
            counted[code] = _LENGTH_BYTES[size]
    return fixed, counted, frozenset(lines)


def largest_memo(data: bytes) -> int:
    """Return the largest explicit memo index in the pickle; 0 if there is none.

    The scan stops where the unpickler does: at the end, or at the first byte that is not an instruction.
    """
    fixed, counted, lines = _arguments()
    at, end, largest = 0, len(data), 0
    while at < end:
        code = data[at]
        at += 1
        size = fixed[code]
        if size is not None:
            if code == _LONG_BINPUT:
                largest = max(largest, int.from_bytes(data[at : at + 4], "little"))
            at += size
        elif code in counted:
            width = counted[code]
            at += width + int.from_bytes(data[at : at + width], "little")
        elif code in lines:
            for _ in range(2 if code in _TWO_LINES else 1):
                start, at = at, data.find(b"\n", at) + 1
                if not at:
                    return largest
            if code == _PUT:
                with suppress(ValueError):
                    largest = max(largest, int(data[start : at - 1]))
        else:
            break
    return largest
