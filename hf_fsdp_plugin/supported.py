"""The versions of other libraries that this package supports. Imports no other library, and reads no metadata files."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from typing import Final

SUPPORTED: Final[Mapping[str, tuple[str, str]]] = {
    "torch": ("2.11", "2.15"),
    "transformers": ("5.17", "5.24"),
    "accelerate": ("1.15", "1.15"),
    "peft": ("0.21", "0.21"),
    "trl": ("1.16", "1.16"),
}
"""Library -> the oldest supported and the newest tested version. ``setup.cfg`` requires the oldest ones."""

_DIST_INFO: Final = re.compile(rf"({'|'.join(SUPPORTED)})-(\d[^-]*)\.dist-info", re.IGNORECASE)


def installed_versions() -> dict[str, str]:
    """Return the version of each library of :data:`SUPPORTED` that is installed, by the names of its metadata folders.

    ``importlib.metadata`` would cost 20 ms at each start of the command line.
    """
    found: dict[str, str] = {}
    for folder in sys.path:
        try:
            names = os.listdir(folder or ".")
        except OSError:
            continue
        for name in names:
            match = _DIST_INFO.fullmatch(name)
            if match is not None:
                found.setdefault(match[1].lower(), match[2])
    return found


def release_of(version: str) -> tuple[int, ...]:
    """Return the release of a version as numbers: ``(2, 13, 0)`` for ``2.13.0+cpu`` and for ``2.13.0rc1``."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, match[0].split("."))) if match is not None else ()


def unsupported_versions() -> list[str]:
    """Return a message for each installed library below the supported range."""
    return [
        f"{library} {found} is installed, but hf_fsdp_plugin needs {library} {oldest} or newer. "
        f"Run: pip install --upgrade '{library}>={oldest}' [FSDP-E623]"
        for library, found in installed_versions().items()
        if release_of(found) < release_of(oldest := SUPPORTED[library][0])
    ]


def untested_versions() -> list[str]:
    """Return ``torch 2.16.0 (tested up to 2.15)`` for each installed library that is newer than the tested ones."""
    return [
        f"{library} {found} (tested up to {newest})"
        for library, found in installed_versions().items()
        if release_of(found)[:2] > release_of(newest := SUPPORTED[library][1])
    ]


def runs_command_line() -> bool:
    """Whether this process is ``hf-fsdp``, which prints messages about versions itself."""
    return os.path.splitext(os.path.basename(sys.argv[0] if sys.argv else ""))[0] == "hf-fsdp"
