"""The options of ``hf-fsdp plan`` that write pictures: ``--html`` and ``--png``."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

from hf_fsdp_plugin.problems import Problem, SpecError

if TYPE_CHECKING:
    from hf_fsdp_plugin.estimate.pictures.data import PictureData

FLAGS: Final = frozenset({"html", "png", "force"})


def add_picture_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("pictures")
    group.add_argument("--html", metavar="OUT", help="write an HTML page with pictures; it needs no network")
    group.add_argument("--png", metavar="OUT", help="write the pictures as a PNG; needs matplotlib")
    group.add_argument("--force", action="store_true", help="overwrite the files of --html and --png")


def check_targets(args: argparse.Namespace) -> list[Problem]:
    """Return a problem for each file that exists, unless it may be overwritten."""
    targets = [target for target in (args.html, args.png) if target is not None]
    return [
        Problem(code="FSDP-E833", message=f"{target} exists.", fix="Pass --force to overwrite it, or another name.")
        for target in targets
        if os.path.lexists(target) and not args.force
    ]


def write_pictures(args: argparse.Namespace, data: PictureData) -> list[str]:
    """Write the files and return their names.

    Raises:
        SpecError: matplotlib is missing (FSDP-E834), or a file cannot be written (FSDP-E835).
    """
    from hf_fsdp_plugin.estimate.pictures.image import image
    from hf_fsdp_plugin.estimate.pictures.page import page

    contents = [(args.html, lambda: page(data).encode()), (args.png, lambda: image(data))]
    written = []
    for target, content in contents:
        if target is not None:
            write_file(Path(target), content())
            written.append(target)
    return written


def write_file(path: Path, content: bytes) -> None:
    """Write a file, complete or not at all. Raises ``SpecError`` (FSDP-E835)."""
    staging = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        staging.write_bytes(content)
        staging.replace(path)
    except OSError as error:
        staging.unlink(missing_ok=True)
        message = f"cannot write {path}: {error.strerror or error}."
        fix = "Choose a file in a folder that exists and is writable."
        raise SpecError([Problem(code="FSDP-E835", message=message, fix=fix)]) from error
