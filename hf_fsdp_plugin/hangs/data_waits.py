"""Whether a rank waits for files, the network or its data loader, from the frames of its Python stack."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Final

from hf_fsdp_plugin.hangs.python_stacks import Frame, is_collective

_DATA_LOADER: Final = os.path.join("torch", "utils", "data", "dataloader.py")
_READING_FILES: Final = tuple(f"{os.sep}{name}" for name in ("socket.py", "ssl.py", "shutil.py", "filelock/_api.py"))
"""Ends of the paths of libraries whose calls wait for the network or a file system, but do not match ``_READS``."""
_READS: Final = re.compile(
    r"(?<![a-z])(open|read|write|load|save|listdir|scandir|stat|exists|is_file|glob|fsync|download|upload)\w*\("
)
"""Calls of functions that read or write files."""


def waits_for_data(stack: Sequence[Frame]) -> bool:
    """Return whether a stack, outermost frame first, ends in a call of the file system or network, or in a data loader.

    The code of the innermost frame shows the call, which is one of C and has no frame of its own.
    """
    if any(frame.file.endswith(_DATA_LOADER) for frame in stack):
        return True
    if not stack or is_collective(stack[-1]):
        return False
    return stack[-1].file.endswith(_READING_FILES) or _READS.search(stack[-1].source) is not None
