"""Uploads files to a storage in a process of its own, so that no lock of Python is shared with the training.

``python -m hf_fsdp_plugin.checkpoint.uploading`` reads one line of JSON: ``{"url": …, "folder": …, "files": […]}``. It
ends when the files are uploaded, or when its standard input is closed, because the rank that started it has ended.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any, Final

_ATTEMPTS: Final = 6
"""Attempts for each file, with pauses of 1, 2, 4, 8 and 16 seconds. Drivers repeat throttled requests besides."""


def is_path(url: str) -> bool:
    """Return whether a URL is that of a file system of this machine."""
    return "://" not in url or url.startswith("file://")


def open_url(url: str) -> tuple[Any, str]:
    """Return the file system of a URL or path by fsspec, and the path in it. Listings are not cached.

    Raises:
        ImportError: the driver of the URL is not installed.
        ValueError: fsspec knows no such URL.
    """
    import fsspec.core

    options: dict[str, Any] = {"use_listings_cache": False, "skip_instance_cache": True}
    if is_path(url):
        options["auto_mkdir"] = True
    system, path = fsspec.core.url_to_fs(url, **options)
    return system, path.rstrip("/")


def put_file(system: Any, source: Path, target: str) -> None:
    """Upload one file, and compare its size in the storage."""
    for attempt in range(_ATTEMPTS):
        try:
            system.put_file(str(source), target)
            if (stored := system.info(target)["size"]) != source.stat().st_size:
                raise OSError(f"{target} has {stored:,} bytes instead of {source.stat().st_size:,}")
            return
        except Exception as error:  # drivers raise errors of their own libraries
            if attempt == _ATTEMPTS - 1 or isinstance(error, PermissionError):
                raise
            time.sleep(2**attempt)


def main() -> None:
    """Upload the files that standard input names. Prints the reason on stderr if that fails."""
    task = json.loads(sys.stdin.readline())
    threading.Thread(target=lambda: (sys.stdin.read(), os._exit(1)), daemon=True).start()
    os.nice(19)
    try:
        system, root = open_url(task["url"])
        for file in task["files"]:
            put_file(system, Path(task["folder"]) / file, f"{root}/{file}")
        if is_path(task["url"]):
            os.sync()
    except Exception as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(1)
    os._exit(0)  # threads of the driver may run on


if __name__ == "__main__":
    main()
