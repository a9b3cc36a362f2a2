"""``hf-fsdp profile``: Run a script for a few steps on every rank, and show where the time of a step goes: computation,
communication, units and slow ranks.

Examples::

    hf-fsdp profile --config_file fsdp.yaml train.py --per_device_train_batch_size 4
    hf-fsdp profile --config_file fsdp.yaml --active 8 --output profiles/first --json train.py
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

from hf_fsdp_plugin import observers
from hf_fsdp_plugin.cli import launch
from hf_fsdp_plugin.cli.output import print_failure, print_problems, print_result
from hf_fsdp_plugin.launcher import flags
from hf_fsdp_plugin.launcher.flags import LaunchArguments
from hf_fsdp_plugin.problems import Problem, SpecError, UsageError, has_errors
from hf_fsdp_plugin.text import format_bytes, format_table, plural
from hf_fsdp_plugin.tools.common import format_seconds, whole_number
from hf_fsdp_plugin.tools.profile import run_profile as profiling
from hf_fsdp_plugin.tools.profile.run_profile import OBSERVER, OPTIONS_VARIABLE, ProfileOptions, RunProfile

_FLAGS: Final[Mapping[str, tuple[str, str]]] = flags.FLAG_TABLES["profile"]
_VARIABLES: Final = {
    # Kineto prints a line for each start and end, torch a warning for each freed block that is older than the profile.
    "KINETO_LOG_LEVEL": "6",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    # Tensors of 1 MiB or more get memory of their own, in huge pages where the system has them. The profiler allocates
    # small blocks between the tensors. Before glibc 2.38, the heap does not reuse the gap between two blocks for an
    # aligned tensor of the same size, so it would grow by all tensors of a step, and a step on CPU ranks would take
    # twice as long.
    "GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=1048576:glibc.malloc.hugetlb=1",
}
"""Variables of the ranks, unless the user has set them."""
_MAX_ROWS: Final = 8
"""Maximum number of units, or of ranks, in a table."""
_LEAST_LATE: Final = 0.01
"""Share of a step by which a rank must be late to be listed."""


def add_arguments(parser: flags.Parser) -> None:
    """Add the flags of this verb and those of ``launch``, and SCRIPT with its arguments."""
    group = parser.add_argument_group("profile")
    for name, (value, text) in _FLAGS.items():
        kind: dict[str, Any] = {"metavar": value, "default": "fsdp_profile"} if value else {"action": "store_true"}
        if value == "N":
            kind |= {"type": whole_number(1 if name == "active" else 0), "default": getattr(ProfileOptions, name)}
            kind["dest"] = f"profile.{name}"
        group.add_argument(f"--{name}", help=text, **kind)
    flags.add_launch_flags(parser)


def read_arguments(args: argparse.Namespace, environ: Mapping[str, str]) -> tuple[LaunchArguments, ProfileOptions]:
    """Return the arguments of the launch, and the options of the profile, which the ranks get in their environment.

    Raises:
        UsageError: there is no script, or a flag is one of ``launch`` alone.
    """
    launched = flags.read_launch_arguments(args)
    if "dry_run" in launched.options:
        raise UsageError("--dry_run is a flag of hf-fsdp launch. A profile needs a run.")
    if not launched.script:
        raise UsageError("no script. Usage: hf-fsdp profile [FLAGS] SCRIPT [ARGS ...]")
    options = ProfileOptions(
        folder=str(Path(args.output).expanduser().absolute()),
        stops=not args.to_end,
        **{name: vars(args)[f"profile.{name}"] for name, (value, _) in _FLAGS.items() if value == "N"},
    )
    variables = {name: value for name, value in _VARIABLES.items() if name not in environ}
    variables |= {OPTIONS_VARIABLE: json.dumps(asdict(options)), observers.VARIABLE: OBSERVER}
    return replace(launched, env=variables), options


def run(args: argparse.Namespace) -> int:
    """Run the script and print its profile. Returns the exit code of the script, or 1 if there is no profile.

    Raises:
        SpecError: the profile cannot be written (FSDP-E772), or there is one (FSDP-E774).
    """
    launched, options = read_arguments(args, os.environ)
    folder = Path(options.folder)
    try:
        _prepare(folder, force=args.force)
        with _stdout_to_stderr() if args.json else contextlib.nullcontext():
            code = launch.run_launch(launched)
        ranks = profiling.read_ranks(folder)
        problems = profiling.missing_parts(ranks, options)
        is_complete = bool(ranks) and sum(rank.num_steps > 0 for rank in ranks) == ranks[0].world_size
        if has_errors(problems) or (code and not is_complete):
            profiling.remove_paths(profiling.files_of_profile(folder))
            failed = print_failure([_failure(code)] if code else problems, as_json=args.json)
            return code or failed
        with _writing(folder):
            tree = profiling.write_profile(folder, ranks, problems)
    finally:
        with contextlib.suppress(OSError):  # files that a rank could not complete, for example because it was killed
            profiling.remove_paths(list(folder.rglob(f"*{profiling.PARTIAL}")))
    if not args.json:
        print_problems(problems)
    traces = f"{plural(len(tree['files']['traces']), 'trace')} for ui.perfetto.dev or chrome://tracing"
    written = f"written: {folder / profiling.RESULT} and {traces}"
    print_result(args, tree, f"\n{profile_text(tree, ranks[0].facts.get('plan'))}\n\n{written}")
    return code


def _prepare(folder: Path, *, force: bool) -> None:
    """Create the folder for the result, and delete an earlier result.

    Raises:
        SpecError: it cannot be written, or has a result and ``--force`` is not given (FSDP-E772, FSDP-E774).
    """
    earlier = [path for path in profiling.files_of_profile(folder) if path.exists()]
    if earlier and not force:
        message = f"{folder} contains an earlier profile."
        fix = "Pass --force to replace it, or --output with another folder."
        raise SpecError([Problem(code="FSDP-E774", message=message, fix=fix)])
    with _writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        profiling.remove_paths(earlier)
        (folder / f"probe{profiling.PARTIAL}").write_bytes(b" " * 4096)  # deleted at the end


@contextlib.contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        message = f"the profile cannot be written to {folder}: {error.strerror or error}."
        fix = "Free space, or write to another folder: --output DIR."
        raise SpecError([Problem(code="FSDP-E772", message=message, fix=fix)]) from error


def _failure(code: int) -> Problem:
    """Return the problem of a script that did not succeed."""
    if code > 128:
        message = "the run was interrupted before the profile was complete. Nothing was written."
        return Problem(code="FSDP-E775", message=message, fix="Run it again, or profile fewer steps: --active 1.")
    message = f"the script failed with exit code {code} before the profile was complete. Nothing was written."
    return Problem(code="FSDP-E773", message=message, fix="Correct the failure above, then profile again.")


@contextlib.contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """Send the output of the script to stderr, because stdout contains one JSON object."""
    sys.stdout.flush()
    saved = os.dup(1)
    try:
        os.dup2(2, 1)
        yield
    finally:
        sys.stdout.flush()
        os.dup2(saved, 1)
        os.close(saved)


def profile_text(profile: RunProfile, plan: Mapping[str, Any] | None) -> str:
    """Return the tables: phases, units and ranks.

    Args:
        plan: the settings of the model; ``None`` without a sharded model.
    """
    model = f"{plan['model_class']}, {plan['backend']} {plan['strategy']}, " if plan else ""
    ranks, steps = plural(profile["world_size"], "rank"), plural(profile["num_steps"], "step")
    title = f"{model}{ranks} on {profile['device']}: average of {steps}"
    parts = [f"{title}\n{_phases(profile)}\n{_overhead(profile['overhead'])}"]
    if profile["units"]:
        parts.append(_units(profile["units"]))
    parts.append(_stragglers(profile))
    return "\n\n".join(parts)


def _phases(profile: RunProfile) -> str:
    rows = [("phase", "time", "computation", "communication", "share", "exposed", "idle")]
    for phase, times in [*profile["phases"].items(), ("total", profile["total"])]:
        whole, compute, communication, exposed, idle = (
            format_seconds(times[name])
            for name in ("seconds", "compute_seconds", "communication_seconds", "exposed_seconds", "idle_seconds")
        )
        name, share = "data loading" if phase == "data" else phase, f"{times['communication_share']:.0%}"
        rows.append((name, whole, compute, communication, share, exposed, idle))
    return format_table(rows, right=range(1, 7))


def _overhead(overhead: Mapping[str, float | None]) -> str:
    seconds, unprofiled = overhead["seconds"], overhead["unprofiled_seconds"]
    if seconds is None or not unprofiled:
        return "overhead of the profiler: unknown, because there was no step without it."
    return (
        f"overhead of the profiler: {format_seconds(seconds)} per step ({seconds / unprofiled:+.1%}); "
        f"a step without it takes {format_seconds(unprofiled)}."
    )


def _units(units: Sequence[Mapping[str, Any]]) -> str:
    calls = ("gather_forward", "gather_backward", "reduce")
    exposed = {unit["name"]: sum(unit[name]["exposed"] for name in calls) for unit in units}
    rows: list[tuple[str, ...]] = [
        ("slowest units", "forward gather", "backward gather", "reduction", "exposed", "forward", "size")
    ]
    for unit in sorted(units, key=lambda unit: -exposed[unit["name"]])[:_MAX_ROWS]:
        times = [*(unit[name]["seconds"] for name in calls), exposed[unit["name"]], unit["forward_seconds"]]
        rows.append((unit["name"] or "(root)", *map(format_seconds, times), format_bytes(unit["bytes"])))
    more = len(units) - _MAX_ROWS
    return format_table(rows, right=range(1, 7)) + (f"\n… and {more:,} more" if more > 0 else "")


def _stragglers(profile: RunProfile) -> str:
    """Return the table of the ranks for which all others wait, the latest first."""
    step = profile["total"]["seconds"]
    late = [rank for rank in profile["ranks"] if rank["late_seconds"] >= _LEAST_LATE * step]
    if not late:
        return "stragglers: none. No rank keeps the others waiting for 1% of a step."
    rows = [("stragglers", "others wait", "share of step", "last in", "computation")]
    for rank in sorted(late, key=lambda rank: -rank["late_seconds"])[:_MAX_ROWS]:
        waits, compute = format_seconds(rank["late_seconds"]), format_seconds(rank["compute_seconds"])
        share, last = f"{rank['late_seconds'] / step:.0%}", f"{rank['last_share']:.0%} of the calls"
        rows.append((f"rank {rank['rank']}", waits, share, last, compute))
    return format_table(rows, right=range(1, 5))
