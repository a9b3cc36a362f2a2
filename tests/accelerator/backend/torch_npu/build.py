"""Compiles the C++ part of the simulated accelerator, once per version of torch, Python and the sources.

    python tests/accelerator/backend/torch_npu/build.py

prints the path of the library, and compiles it if it does not exist. It needs g++ and ninja and takes
half a minute of a free core.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

NAME = "simulated_accelerator"
_FOLDER = Path(__file__).resolve().parent
_SOURCES = sorted((_FOLDER / "cpp").glob("*.cpp"))
_HEADERS = sorted((_FOLDER / "cpp").glob("*.h"))
_FLAGS = ["-O1", "-std=c++20", "-Wno-unused", "-DUSE_DISTRIBUTED", "-DUSE_C10D_GLOO"]


def library_path() -> Path:
    """The path of the library for this torch, this Python, and the sources as they are."""
    contents = hashlib.sha256()
    for file in [*_SOURCES, *_HEADERS, Path(__file__)]:
        contents.update(file.read_bytes())
    key = f"torch{metadata.version('torch')}-{sys.implementation.cache_tag}-{contents.hexdigest()[:12]}"
    return _FOLDER / "_build" / key / f"{NAME}.so"


def missing_tools() -> str:
    """The reason why the library cannot be compiled here; empty if it can, or if it has been compiled."""
    if library_path().exists():
        return ""
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler) is None:
        return f"there is no C++ compiler ({compiler})"
    if _ninja() is None:
        return "there is no ninja (pip install ninja)"
    return ""


def available() -> str:
    """The reason why tests on the simulated accelerator must be skipped; empty if they can run.

    Raises:
        RuntimeError: tools are missing in CI (``CI=true``), where these tests must not be skipped.
    """
    reason = missing_tools()
    if reason and os.environ.get("CI", "").lower() in ("1", "true"):
        raise RuntimeError(f"the simulated accelerator cannot be compiled in CI: {reason}")
    return reason


def build() -> Path:
    """Compile the library unless it exists, in a process that does not use the device. Returns its path.

    Raises:
        RuntimeError: it cannot be compiled; the message contains the output of the compiler.
    """
    library = library_path()
    if not library.exists():
        if reason := missing_tools():
            raise RuntimeError(f"cannot compile the simulated accelerator: {reason}")
        environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
        command = [sys.executable, str(Path(__file__).resolve())]
        result = subprocess.run(command, env=environment, capture_output=True, text=True)
        if result.returncode != 0:
            raise RuntimeError(f"cannot compile the simulated accelerator:\n{result.stdout}{result.stderr}")
    return library


def load() -> ModuleType:
    """Load the library and compile it first if it does not exist."""
    spec: Any = importlib.util.spec_from_file_location(NAME, build())
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _compile() -> Path:
    library = library_path()
    with _locked(library.parent):
        if library.exists():  # another process has compiled it
            return library
        from torch.utils import cpp_extension

        if (ninja := _ninja()) is not None:
            os.environ["PATH"] = os.pathsep.join([str(ninja.parent), os.environ.get("PATH", "")])
        # torch's own lock file stays behind if a build is killed, so each build starts in an empty folder.
        folder = library.parent / "unfinished"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        # One unit, because torch's headers take most of the time: half a minute, and four minutes in separate units.
        unit = folder / "all.cpp"
        unit.write_text("".join(f'#include "{source}"\n' for source in _SOURCES))
        cpp_extension.load(NAME, [str(unit)], build_directory=str(folder), extra_cflags=_FLAGS, verbose=True)
        (folder / library.name).rename(library)
        shutil.rmtree(folder)
    return library


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Let one process at a time into a folder. The lock ends with the process."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _ninja() -> Path | None:
    """ninja in the environment of this Python, whose scripts need not be in PATH, or in PATH."""
    own = Path(sys.executable).parent / "ninja"
    found = str(own) if own.exists() else shutil.which("ninja")
    return Path(found) if found else None


if __name__ == "__main__":
    print(_compile())
