"""Where a rank was: the call that it was in, and whether it waited for data, from the frames of its Python stack.

A rank records the stacks of its threads in a file when native code crashes, when another rank or the launcher asks for
them with a signal, and at SIGTERM. ``faulthandler`` does this, also while a thread waits in a collective or holds the
interpreter's lock, and costs nothing until then.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import functools
import linecache
import os
import re
import signal
import site
import sys
import sysconfig
import threading
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from hf_fsdp_plugin.hangs.calls import Counts
from hf_fsdp_plugin.state import process
from hf_fsdp_plugin.text import plural

STACK_SIGNAL: Final = signal.SIGRTMAX - 3
"""The signal with which a rank is asked for its stack: a real-time signal, which libraries do not use."""

_PACKAGE = str(Path(__file__).resolve().parents[1])
_THREAD = re.compile(r"(?:Current thread|Thread) 0x([0-9a-f]+).*\(most recent call first\):")
_OF_SIGNAL: Final = "Stack (most recent call first):"
_FRAME = re.compile(r'  File "(.*)", line (\d+|\?+) in (.*)')
_FORWARD: Final = ("module.py", "call_impl")
"""File of torch's modules, and the end of the name of the function that calls a module."""
_CALLS: Final = {
    "save_checkpoint": "saving a checkpoint",
    "evaluation_loop": "evaluate",
    "report_run": "the report",
    "_at_exit": "the report at the end of the script",
    "__next__": "the data loader",
}
"""Functions of libraries that users know -> their name in messages. The outermost of nested calls is named."""
_OWN_NAMES: Final = (
    "save_state", "load_state", "save_model", "get_state_dict", "save_pretrained", "push_to_hub", "prepare",
    "clip_grad_norm_", "clip_grad_norm", "evaluate", "predict", "generate", "backward", "wait_for_everyone",
    "end_training",
)  # fmt: skip
"""Functions that have their own name in messages, as those of ``torch.distributed`` have."""


_NUM_LAST_FRAMES = 2
_RECORDING = os.path.join("integrations", "collective_hooks.py")
"""The file whose functions are called around each collective."""
_DATA_LOADER: Final = os.path.join("torch", "utils", "data", "dataloader.py")
_READING_FILES: Final = tuple(f"{os.sep}{name}" for name in ("socket.py", "ssl.py", "shutil.py", "filelock/_api.py"))
"""Ends of the paths of libraries whose calls wait for the network or a file system, but do not match ``_READS``."""
_READS: Final = re.compile(
    r"(?<![a-z])(open|read|write|load|save|listdir|scandir|stat|exists|is_file|glob|fsync|download|upload)\w*\("
)
"""Calls of functions that read or write files."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame of a stack.

    Attributes:
        code: the line of the source, if it was recorded; otherwise :attr:`source` reads it.
    """

    file: str
    line: int
    name: str
    code: str = ""

    @property
    def source(self) -> str:
        return self.code or linecache.getline(self.file, self.line).strip()

    @property
    def location(self) -> str:
        """File and line, relative to the working directory if the file is in it."""
        shorter = os.path.relpath(self.file)
        return f"{self.file if shorter.startswith('..') else shorter}:{self.line}"


class StackFile:
    """The file in which this process records its stacks, while it is open."""

    def __init__(self) -> None:
        self._descriptor: int | None = None
        self._enables = False
        self._sigterm: Any = None

    def open(self, path: Path, *, records_crashes: bool) -> None:
        """Record the stacks for each ``STACK_SIGNAL`` and at SIGTERM, whose own handler still runs.

        Args:
            records_crashes: whether the stacks at a crash in native code are recorded, and not printed.
        """
        # The file stays open, because faulthandler keeps only its descriptor.
        with contextlib.suppress(ValueError, OSError, RuntimeError):
            self._enables = records_crashes or not faulthandler.is_enabled()
            part = path.with_suffix(".part")
            self._descriptor = os.open(part, os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_APPEND, 0o600)
            self.follow_thread(threading.main_thread())
            if self._enables:
                faulthandler.enable(self._descriptor if records_crashes else 2, all_threads=True)
            # What close() restores: another rank may ask for the stack after this one has stopped recording.
            with contextlib.suppress(ValueError):  # another thread than the main one
                signal.signal(STACK_SIGNAL, signal.SIG_IGN)
            # Only the thread that receives the signal: others may run, and to read their frames then can crash.
            faulthandler.register(STACK_SIGNAL, self._descriptor, all_threads=False)
            self._sigterm = signal.getsignal(signal.SIGTERM)
            faulthandler.register(signal.SIGTERM, self._descriptor, all_threads=False, chain=True)
            # The name appears when the handler is installed: before, the signal would end the process.
            os.replace(part, path)

    def follow_thread(self, thread: threading.Thread) -> None:
        """Record which thread is the one whose stack :func:`read_stack` returns."""
        if self._descriptor is not None:
            with contextlib.suppress(OSError):
                os.write(self._descriptor, f"main 0x{thread.ident or 0:x} {thread.native_id}\n".encode())

    def record(self) -> None:
        """Record the stacks of all threads now, from another thread than the one that trains."""
        if self._descriptor is not None:
            faulthandler.dump_traceback(self._descriptor, all_threads=True)

    def close(self) -> None:
        """Stop recording."""
        if self._descriptor is None:
            return
        if self._enables:
            faulthandler.disable()
        faulthandler.unregister(STACK_SIGNAL)
        # Otherwise the script has installed a handler, which must stay.
        if signal.getsignal(signal.SIGTERM) is self._sigterm:
            faulthandler.unregister(signal.SIGTERM)
        os.close(self._descriptor)
        self._descriptor = None


stack_file = process.owns(StackFile)
"""Return the file of this process."""


def request_stack(path: Path, pid: int) -> None:
    """Make another process record the stack of the thread that trains in ``path``. Does nothing if it cannot yet."""
    with contextlib.suppress(OSError, ValueError, IndexError, AttributeError):
        lines = [line for line in path.read_text(errors="replace").splitlines() if line.startswith("main 0x")]
        ctypes.CDLL(None).tgkill(pid, int(lines[-1].split()[2]), STACK_SIGNAL)


def read_stack(path: Path) -> list[Frame]:
    """Return the last recorded stack of the thread that trains, outermost frame first; empty if there is none."""
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        return []
    main = 0
    stack: list[Frame] = []
    is_main = False
    for line in lines:
        if line.startswith("main 0x"):
            main = int(line.split()[1], 16)
        elif line.startswith(_OF_SIGNAL):
            is_main, stack = True, []
        elif (thread := _THREAD.match(line)) is not None:
            is_main = int(thread[1], 16) == main
            if is_main:
                stack = []
        elif is_main and (frame := _FRAME.match(line)) is not None:
            stack.append(Frame(frame[1], int(frame[2]) if frame[2].isdigit() else 0, frame[3]))
    return stack[::-1]


def current_stack(thread: int) -> list[Frame]:
    """Return the stack of a thread of this process, outermost frame first."""
    frame = sys._current_frames().get(thread)
    found = traceback.walk_stack(frame) if frame is not None else ()
    return [Frame(each.f_code.co_filename, line, each.f_code.co_name) for each, line in found][::-1]


def find_place(stack: Sequence[Frame], counts: Counts | None = None) -> tuple[str, str]:
    """Return where a rank is, from its stack, outermost frame first.

    Args:
        counts: its optimizer steps and forwards until then; ``None`` if they were not counted.

    Returns:
        The outermost known call, and a text with this call, the collective in it, the frame of the script that has made
        the call, and the counts. Both are empty for a stack that shows neither, and the call for one outside of calls.
    """
    # A collective of objects calls those of tensors: the outer one is named.
    collective = next((frame.name for frame in stack if is_collective(frame)), "")
    call, own = "", None
    for frame in stack:
        if not is_library(frame.file):
            own = frame
        elif call := _call_of(frame):
            break
    if not call and own is None:
        return "", ""
    parts = [f"in {call}"] if call else []
    if collective not in ("", call):
        parts.append(f"({collective})" if call else f"in {collective}")
    if own is not None:
        parts.append(f"at {own.location}" + (f" `{own.source}`" if own.source else ""))
    if counts is not None:
        parts.append(f"after {plural(counts.steps, 'optimizer step')}")
        parts += [f"({plural(counts.forwards, 'forward')})"] if counts.forwards else []
    return call, " ".join(parts)


def waits_for_data(stack: Sequence[Frame]) -> bool:
    """Return whether a stack, outermost frame first, ends in a call of the file system or network, or in a data loader.

    The code of the innermost frame shows the call, which is one of C and has no frame of its own.
    """
    if any(frame.file.endswith(_DATA_LOADER) for frame in stack):
        return True
    if not stack or is_collective(stack[-1]):
        return False
    return stack[-1].file.endswith(_READING_FILES) or _READS.search(stack[-1].source) is not None


def is_collective(frame: Frame) -> bool:
    return frame.file.endswith(os.path.join("distributed", "distributed_c10d.py"))


def is_library(file: str) -> bool:
    """Return whether a source file belongs to this package, to Python or to an installed package."""
    return file.startswith("<") or file.startswith(_library_roots())


@functools.cache
def _library_roots() -> tuple[str, ...]:
    roots = [_PACKAGE, sysconfig.get_paths()["stdlib"], *site.getsitepackages(), site.getusersitepackages()]
    return tuple(root + os.sep for root in roots)


def _call_of(frame: Frame) -> str:
    folder, file = os.path.split(frame.file)
    if file == _FORWARD[0] and frame.name.endswith(_FORWARD[1]) and folder.endswith(os.path.join("nn", "modules")):
        return "forward"
    if frame.name == "step" and folder.endswith("optim"):
        return "optimizer.step"
    return frame.name if frame.name in _OWN_NAMES or is_collective(frame) else _CALLS.get(frame.name, "")


def format_stack(stack: Sequence[Frame]) -> list[str]:
    """Format a stack, outermost frame first: the frames of user code and the last ones.

    Frames of libraries before are only counted, and those that have started the script are left out.
    """
    lines: list[str] = []
    num_skipped = 0
    stack = [frame for frame in stack if not frame.file.endswith(_RECORDING)]
    own = next((position for position, frame in enumerate(stack) if not is_library(frame.file)), 0)
    for position, frame in enumerate(stack[own:], own):
        if is_library(frame.file) and position < len(stack) - _NUM_LAST_FRAMES:
            num_skipped += 1
            continue
        if num_skipped:
            lines.append(f"  … {plural(num_skipped, 'frame')} in libraries (--debug shows them)")
            num_skipped = 0
        lines.append(f"  {frame.location}, in {frame.name}")
        if frame.source:
            lines.append(f"    {frame.source}")
    return lines
