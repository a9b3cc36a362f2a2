"""The flags of ``hf-fsdp profile``, which precede SCRIPT together with those of ``hf-fsdp launch``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from hf_fsdp_plugin.integrations.profiling.options import ProfileOptions
from hf_fsdp_plugin.launcher.flags import LaunchArguments, UsageError, parse_launch_arguments, takes_value
from hf_fsdp_plugin.sources.command_line import flag_name

DEFAULT_FOLDER: Final = "fsdp_profile"
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


def parse_profile_arguments(argv: Sequence[str], environ: Mapping[str, str]) -> ProfileArguments:
    """Parse the arguments after ``profile``.

    Raises:
        UsageError: an unknown flag, or an invalid value.
    """
    own, rest = _split(argv)
    numbers = {field: _number(name, own[name], least) for name, (field, least, _) in NUMBERS.items() if name in own}
    options = ProfileOptions(
        folder=str(Path(own.get("output", DEFAULT_FOLDER)).expanduser().absolute()),
        memory="no_memory" not in own,
        stops="to_end" not in own,
        **numbers,  # type: ignore[arg-type]
    )
    launch = parse_launch_arguments(rest)
    if "dry_run" in launch.options:
        raise UsageError("--dry_run is a flag of hf-fsdp launch. A profile needs a run.")
    variables = {name: value for name, value in (_KINETO | _MALLOC).items() if name not in environ}
    return ProfileArguments(
        launch=replace(launch, env={**variables, **options.to_env()}),
        options=options,
        json="json" in own,
        force="force" in own,
    )


def _split(argv: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Return the values of the flags of this verb, and the other words."""
    own: dict[str, str] = {}
    rest, words = [], list(argv)
    while words and words[0].startswith("-"):
        word = words.pop(0)
        written, equals, value = word.partition("=")
        name = flag_name(written) if written.startswith("--") else ""
        if name in SWITCHES:
            if equals:
                raise UsageError(f"{written} takes no value, but is given {value!r}.")
            own[name] = "true"
        elif name in NUMBERS or name == "output":
            if not equals and (not words or words[0].startswith("--")):
                raise UsageError(f"{written} needs a value")
            own[name] = value if equals else words.pop(0)
        else:
            rest.append(word)
            if word == "--" or name == "module" or word == "-m":
                break
            if not equals and takes_value(written) and words and not words[0].startswith("--"):
                rest.append(words.pop(0))
    return own, [*rest, *words]


def _number(name: str, value: str, least: int) -> int:
    if not value.isdecimal() or int(value) < least:
        raise UsageError(f"--{name} is {value!r}; expected a whole number from {least}.")
    return int(value)


FLAG_ROWS: Final = (
    ("--output DIR", f"folder for the result (default: {DEFAULT_FOLDER})"),
    *((f"--{name} N", text) for name, (_, _, text) in NUMBERS.items()),
    *((f"--{name}", text) for name, text in SWITCHES.items()),
)
"""Flag with its value, and its help."""


def help_lines() -> list[str]:
    """Return the table of flags for the help."""
    return [f"  {flag}".ljust(18) + text for flag, text in FLAG_ROWS]
