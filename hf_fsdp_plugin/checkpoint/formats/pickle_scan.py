"""Finds instructions of a pickle that exhaust memory, time or the stack, before the pickle is read.

- Python's unpickler allocates a memo whose length is the largest index in the file. Four wrong bytes can therefore
  exhaust the memory: a file of 10 bytes can allocate 34 GB. A valid pickle numbers its objects from 0.
- Python hashes a key of a dict by visiting each tuple in it as often as it occurs. 60 tuples, each of which contains
  the previous one twice, take 2^60 visits; a million tuples inside each other overflow the stack.

The scan follows the instructions with a stack of numbers instead of objects: the number of values that a visit of the
object would take. Lists and dicts count as one, because they cannot be hashed.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable
from functools import lru_cache

MAX_TUPLE = 10_000
"""Maximum number of values in a tuple, in all tuples inside it. Those of checkpoints have less than 100."""
_VISITS_PER_BYTE = 64
_FREE_VISITS = 1_000_000
"""Maximum number of visits of keys and elements: these for any file, and the others for each of its bytes."""
_LENGTH_BYTES = {
    pickletools.TAKEN_FROM_ARGUMENT1: 1,
    pickletools.TAKEN_FROM_ARGUMENT4: 4,
    pickletools.TAKEN_FROM_ARGUMENT4U: 4,
    pickletools.TAKEN_FROM_ARGUMENT8U: 8,
}
_STOP = ord(".")
_TWO_LINES = frozenset(b"ci")
"""The opcodes GLOBAL and INST. Each has two lines as arguments: a module and a name."""


class _Excess(Exception):
    """The pickle must not be read; the text is the reason."""


class _Sizes:
    """The sizes of the objects on the unpickler's stack and in its memo."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.stack: list[int] = []
        self.marks: list[int] = []
        self.memo: dict[int, int] = {}
        self.visits = 0

    def after_mark(self) -> list[int]:
        """Remove the topmost mark and what is above it, and return the latter."""
        start = self.marks.pop()
        found = self.stack[start:]
        del self.stack[start:]
        return found

    def push_tuple(self, size: int) -> None:
        if size > MAX_TUPLE:
            raise _Excess(f"a tuple of more than {MAX_TUPLE:,} values inside each other")
        self.stack.append(size)

    def visit(self, size: int) -> None:
        self.visits += size
        if self.visits > _FREE_VISITS + _VISITS_PER_BYTE * self.num_bytes:
            raise _Excess("keys that consist of the same tuples again and again")

    def put(self, index: int) -> None:
        if index > self.num_bytes:
            raise _Excess("a memo index larger than the number of its bytes")
        self.memo[index] = self.stack[-1]


_Step = Callable[[_Sizes, int], None]
"""What an opcode does to the sizes; the number is the index that a memo instruction has."""


def _push(sizes: _Sizes, _: int) -> None:
    sizes.stack.append(1)


def _mark(sizes: _Sizes, _: int) -> None:
    sizes.marks.append(len(sizes.stack))


def _pop(sizes: _Sizes, _: int) -> None:
    if sizes.marks and sizes.marks[-1] == len(sizes.stack):
        sizes.marks.pop()
    else:
        sizes.stack.pop()


def _duplicate(sizes: _Sizes, _: int) -> None:
    sizes.stack.append(sizes.stack[-1])


def _put(sizes: _Sizes, index: int) -> None:
    sizes.put(index)


def _memoize(sizes: _Sizes, _: int) -> None:
    sizes.put(len(sizes.memo))


def _get(sizes: _Sizes, index: int) -> None:
    sizes.stack.append(sizes.memo.get(index, 1))


def _take_first(count: int) -> _Step:
    """Return the step of APPEND, SETITEM and BUILD: the first of ``count`` objects stays, and gets the others."""

    def step(sizes: _Sizes, _: int) -> None:
        first, *rest = sizes.stack[-count:]
        sizes.visit(sum(rest))
        sizes.stack[-count:] = [first]

    return step


def _combine(count: int) -> _Step:
    """Return the step of opcodes that make one object of the ``count`` topmost ones."""

    def step(sizes: _Sizes, _: int) -> None:
        taken = sizes.stack[-count:]
        del sizes.stack[-count:]
        sizes.push_tuple(1 + sum(taken))

    return step


def _add_slice(sizes: _Sizes, _: int) -> None:
    sizes.visit(sum(sizes.after_mark()))


def _container(sizes: _Sizes, _: int) -> None:
    _add_slice(sizes, 0)
    sizes.stack.append(1)


def _combine_slice(sizes: _Sizes, _: int) -> None:
    sizes.push_tuple(1 + sum(sizes.after_mark()))


def _frozen_set(sizes: _Sizes, _: int) -> None:
    taken = sum(sizes.after_mark())
    sizes.visit(taken)
    sizes.push_tuple(1 + taken)


def _pop_mark(sizes: _Sizes, _: int) -> None:
    sizes.after_mark()


def _nothing(_: _Sizes, __: int) -> None:
    pass


_STEPS: dict[str, _Step] = {
    **dict.fromkeys(("PROTO", "FRAME", "READONLY_BUFFER"), _nothing),
    **dict.fromkeys(("PUT", "BINPUT", "LONG_BINPUT"), _put),
    **dict.fromkeys(("GET", "BINGET", "LONG_BINGET"), _get),
    **dict.fromkeys(("APPENDS", "SETITEMS", "ADDITEMS"), _add_slice),
    **dict.fromkeys(("LIST", "DICT"), _container),
    **dict.fromkeys(("TUPLE", "INST", "OBJ"), _combine_slice),
    **dict.fromkeys(("TUPLE1", "BINPERSID"), _combine(1)),
    **dict.fromkeys(("TUPLE2", "REDUCE", "NEWOBJ", "STACK_GLOBAL"), _combine(2)),
    **dict.fromkeys(("TUPLE3", "NEWOBJ_EX"), _combine(3)),
    **dict.fromkeys(("APPEND", "BUILD"), _take_first(2)),
    "SETITEM": _take_first(3),
    "FROZENSET": _frozen_set,
    "MARK": _mark,
    "POP": _pop,
    "POP_MARK": _pop_mark,
    "DUP": _duplicate,
    "MEMOIZE": _memoize,
}
"""The opcodes that do not push one atom."""


@lru_cache(maxsize=1)
def _tables() -> tuple[list[_Step | None], list[int], dict[int, int], frozenset[int]]:
    """Return tables by opcode: steps, sizes of fixed arguments, widths of length prefixes, and those with lines."""
    steps: list[_Step | None] = [None] * 256
    fixed = [-1] * 256
    counted: dict[int, int] = {}
    lines = set()
    for opcode in pickletools.opcodes:
        code = ord(opcode.code)
        steps[code] = _STEPS.get(opcode.name, _push)
        size = opcode.arg.n if opcode.arg is not None else 0
        if size >= 0:
            fixed[code] = size
        elif size == pickletools.UP_TO_NEWLINE:
            lines.add(code)
        else:
            counted[code] = _LENGTH_BYTES[size]
    return steps, fixed, counted, frozenset(lines)


def excessive(data: bytes, *, count: int = 1) -> str | None:
    """Return what in the pickle exhausts memory, time or the stack; ``None`` if nothing does.

    The scan stops where the unpickler does: at the end, or at the first instruction that is not valid.

    Args:
        count: maximum number of pickles that are read one after the other.
    """
    at = 0
    try:
        for _ in range(count):
            at = _scan(data, _Sizes(len(data)), at)
    except _Excess as error:
        return str(error)
    except (IndexError, ValueError):  # IndexError: nothing is left on the stack
        pass
    return None


def _scan(data: bytes, sizes: _Sizes, at: int = 0) -> int:
    """Follow the instructions of the pickle that begins at ``at``. Returns where it ends."""
    steps, fixed, counted, lines = _tables()
    end = len(data)
    while at < end:
        code = data[at]
        at += 1
        if code == _STOP:
            return at
        step, index, size = steps[code], 0, fixed[code]
        if size >= 0:
            if size and step in (_put, _get):
                index = int.from_bytes(data[at : at + size], "little")
            at += size
        elif code in counted:
            width = counted[code]
            at += width + int.from_bytes(data[at : at + width], "little")
        elif code in lines:
            for _ in range(2 if code in _TWO_LINES else 1):
                start, at = at, data.find(b"\n", at) + 1
                if not at:
                    return end
            if step in (_put, _get):
                index = int(data[start : at - 1])
        if step is None:
            return end
        step(sizes, index)
    return end
