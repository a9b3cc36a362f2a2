"""The HTML pages of tools: self-contained files without scripts, from templates that escape all texts."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

from hf_fsdp_plugin.checkpoint.file_io import write_atomically
from hf_fsdp_plugin.problems import Problem, SpecError
from hf_fsdp_plugin.text import format_count, format_memory, printable
from hf_fsdp_plugin.tools.common import format_seconds
from hf_fsdp_plugin.tools.plan.estimate import types

COLORS: Final[dict[types.MemoryKind, str]] = {
    "params": "#0072b2", "grads": "#e69f00", "optimizer": "#009e73", "activations": "#cc79a7", "gathered": "#56b4e9",
    "other": "#8c8c8c",
}  # fmt: skip
"""The palette of Okabe and Ito, which color-blind readers can tell apart."""
WIDTH: Final = 1000
HEIGHT: Final = 200
"""Units of a picture. Browsers cannot hold coordinates in bytes: they limit them to about 2^25."""
_LEAST_HEIGHT: Final = 2.5
"""Height of a band with few bytes, so that it is visible."""


def refuse_present(args: argparse.Namespace) -> list[Problem]:
    """Return a problem if the file of ``--html`` exists and ``--force`` is not given (FSDP-E833)."""
    if args.html is None or args.force or not os.path.lexists(args.html):
        return []
    fix = "Pass --force to overwrite it, or another name."
    return [Problem(code="FSDP-E833", message=f"{args.html} exists.", fix=fix)]


def write_page(out: Path, page: str) -> list[str]:
    """Write a page, and return the line that names its file.

    Raises:
        SpecError: the file cannot be written (FSDP-E835).
    """
    try:
        write_atomically(out, page, preserve=True)
    except OSError as error:
        message = f"cannot write {out}: {error.strerror or error}."
        fix = "Choose a file in a folder that exists and is writable."
        raise SpecError([Problem(code="FSDP-E835", message=message, fix=fix)]) from error
    return [printable(f"written: {out}")]


def load_macros(template: str) -> Any:
    """Return the macros of a template, which return HTML and escape all texts.

    Args:
        template: its path below ``tools``.
    """
    from jinja2 import Environment, FunctionLoader, StrictUndefined

    def read(name: str) -> str:
        return files("hf_fsdp_plugin.tools").joinpath(name).read_text(encoding="utf-8")

    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, loader=FunctionLoader(read)
    )
    environment.filters |= {"count": format_count, "seconds": format_seconds, "size": format_memory, "id": id}
    environment.globals |= {"COLORS": COLORS, "KIND_NAMES": types.KIND_NAMES, "WIDTH": WIDTH, "HEIGHT": HEIGHT}
    return environment.get_template(template).module


def areas(moments: Sequence[types.Moment]) -> Iterator[tuple[str, list[tuple[float, float]]]]:
    """Yield the color and the corners of a stacked area for each kind of memory, in units of the picture."""
    top = max([1, *(moment.bytes for moment in moments)])
    heights = [
        {kind: max(_LEAST_HEIGHT, HEIGHT * size / top) for kind, size in moment.bytes_by_kind.items() if size}
        for moment in moments
    ]
    scale = HEIGHT / max([HEIGHT, *(sum(each.values()) for each in heights)])
    xs = [WIDTH * index / max(1, len(moments) - 1) for index in range(len(moments))]
    lower = [float(HEIGHT)] * len(moments)
    for kind in types.MEMORY_KINDS:
        upper = [below - scale * each.get(kind, 0) for below, each in zip(lower, heights, strict=True)]
        if upper != lower:
            yield COLORS[kind], [*zip(xs, upper, strict=True), *reversed([*zip(xs, lower, strict=True)])]
        lower = upper
