"""The flags of ``hf-fsdp profile``, which precede SCRIPT together with those of ``hf-fsdp launch``."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from hf_fsdp_plugin.integrations.profiling.options import ProfileOptions
from hf_fsdp_plugin.launcher.flags import (
    LaunchArguments,
    Parser,
    UsageError,
    add_launch_flags,
    read_launch_arguments,
)

DEFAULT_FOLDER: Final = "fsdp_profile"
_OUTPUT: Final = f"folder for the result (default: {DEFAULT_FOLDER})"
NUMBERS: Final[Mapping[str, tuple[str, int, str]]] = {
    "wait": ("wait", 0, "optimizer steps before the profiler starts (default: 1)"),
    "warmup": ("warmup", 0, "steps with the profiler that are not analyzed (default: 2)"),
    "active": ("active", 1, "steps that are analyzed (default: 4)"),
    "after": ("after", 0, "steps without the profiler, to measure its overhead (default: 3; the first is not counted)"),
    "traces": ("traces", 0, "ranks that keep a Chrome trace, from rank 0 (default: 8)"),
}
"""Flag -> field of :class:`ProfileOptions`, smallest value, help."""
SWITCHES: Final[Mapping[str, str]] = {
    "json": "print one JSON object and nothing else on stdout; the script's output goes to stderr",
    "no_memory": "do not record the memory of a step",
    "to_end": "let the script run to its end; by default it ends after these steps",
    "force": "replace an earlier profile in the folder",
}
_KINETO: Final = {"KINETO_LOG_LEVEL": "6", "TORCH_CPP_LOG_LEVEL": "ERROR"}
"""Kineto prints a line for each start and end, torch a warning for each freed block that is older than the profile."""
_MALLOC: Final = {"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=1048576:glibc.malloc.hugetlb=1"}
"""Tensors of 1 MiB or more get memory of their own, in huge pages where the system has them.

The profiler allocates small blocks between the tensors. Before glibc 2.38, the heap does not reuse the gap between two
blocks for an aligned tensor of the same size, so it would grow by all tensors of a step, and a step on CPU ranks would
take twice as long.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileArguments:
    """What ``hf-fsdp profile`` does. ``launch`` contains the options for the ranks in its ``env``."""

    launch: LaunchArguments
    options: ProfileOptions
    json: bool
    force: bool

    @property
    def folder(self) -> Path:
        return Path(self.options.folder)


def add_profile_flags(parser: Parser) -> None:
    """Add the flags of this verb and those of ``launch``, and SCRIPT with its arguments."""
    group = parser.add_argument_group("profile")
    group.add_argument("--output", metavar="DIR", default=DEFAULT_FOLDER, help=_OUTPUT)
    for name, (field, least, text) in NUMBERS.items():
        group.add_argument(f"--{name}", metavar="N", type=_number(least), dest=f"profile.{field}", help=text)
    for name, text in SWITCHES.items():
        group.add_argument(f"--{name}", action="store_true", help=text)
    add_launch_flags(parser)


def read_profile_arguments(args: argparse.Namespace, environ: Mapping[str, str]) -> ProfileArguments:
    """Return what the verb does. Raises ``UsageError`` without a script, or with a flag for ``launch`` alone."""
    launch = read_launch_arguments(args)
    if "dry_run" in launch.options:
        raise UsageError("--dry_run is a flag of hf-fsdp launch. A profile needs a run.")
    if not launch.script:
        raise UsageError("no script. Usage: hf-fsdp profile [FLAGS] SCRIPT [ARGS ...]")
    numbers = {field: vars(args)[f"profile.{field}"] for field, _, _ in NUMBERS.values()}
    options = ProfileOptions(
        folder=str(Path(args.output).expanduser().absolute()),
        memory=not args.no_memory,
        stops=not args.to_end,
        **{field: number for field, number in numbers.items() if number is not None},
    )
    variables = {name: value for name, value in (_KINETO | _MALLOC).items() if name not in environ}
    return ProfileArguments(
        launch=replace(launch, env={**variables, **options.to_env()}), options=options, json=args.json, force=args.force
    )


def _number(least: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {least}")
        return int(text)

    return read


FLAG_ROWS: Final = (
    ("--output DIR", _OUTPUT),
    *((f"--{name} N", text) for name, (_, _, text) in NUMBERS.items()),
    *((f"--{name}", text) for name, text in SWITCHES.items()),
)
"""Flag with its value, and its help."""
