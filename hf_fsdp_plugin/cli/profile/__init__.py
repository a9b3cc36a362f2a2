"""``hf-fsdp profile``: runs a script for a few steps on every rank, and shows where the time of a step goes."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hf_fsdp_plugin.cli import launch
from hf_fsdp_plugin.cli.output import PROBLEMS, print_json, print_problems
from hf_fsdp_plugin.cli.profile.arguments import ProfileArguments, add_profile_flags, read_profile_arguments
from hf_fsdp_plugin.integrations.profiling.files import PARTIAL, RESULT, read_ranks, remove, write_profile
from hf_fsdp_plugin.integrations.profiling.options import RANKS_FOLDER, TRACES_FOLDER, ProfileOptions
from hf_fsdp_plugin.launcher.flags import Parser
from hf_fsdp_plugin.observe.profile.output import profile_text
from hf_fsdp_plugin.observe.profile.run_profile import RunProfile
from hf_fsdp_plugin.observe.profile.suggestions import Suggestion, suggest
from hf_fsdp_plugin.problems import Problem, SpecError
from hf_fsdp_plugin.text import plural

HELP = (
    "Run a script for a few steps on every rank, and show where the time of a step goes: computation, communication, "
    "units, slow ranks, and which settings would change it."
)
EXAMPLES = (
    "hf-fsdp profile --config_file fsdp.yaml train.py --per_device_train_batch_size 4",
    "hf-fsdp profile --config_file fsdp.yaml --active 8 --output profiles/first --json train.py",
)


def add_arguments(parser: Parser) -> None:
    add_profile_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the script and print its profile. Returns 1 if there is none, or the exit code of the script."""
    args = read_profile_arguments(arguments, os.environ)
    folder = args.folder
    try:
        _prepare(folder, force=args.force)
        with _stdout_to_stderr() if args.json else contextlib.nullcontext():
            code = launch.run_launch(args.launch)
        profile, problems = _read(args.options, code)
        if profile is None:
            return _fail(args, problems, code or PROBLEMS)
        suggestions = suggest(profile)
        tree = _write(folder, profile, suggestions, problems)
    except SpecError as error:
        return _fail(args, error.problems, PROBLEMS)
    finally:
        _remove_partial(folder)
    if args.json:
        print_json(tree)
    else:
        print_problems(problems)
        print(f"\n{profile_text(profile, suggestions)}\n\nwritten: {folder / RESULT}", end="")
        print(f" and {plural(len(tree['files']['traces']), 'trace')} for ui.perfetto.dev or chrome://tracing")
    return code


def _prepare(folder: Path, *, force: bool) -> None:
    """Create the folder for the result, and delete an earlier result.

    Raises:
        SpecError: it cannot be written, or has a result and ``--force`` is not given (FSDP-E772, FSDP-E774).
    """
    earlier = [folder / name for name in (RANKS_FOLDER, TRACES_FOLDER, RESULT) if (folder / name).exists()]
    if earlier and not force:
        message = f"{folder} contains an earlier profile."
        fix = "Pass --force to replace it, or --output with another folder."
        raise SpecError([Problem(code="FSDP-E774", message=message, fix=fix)])
    try:
        folder.mkdir(parents=True, exist_ok=True)
        remove(earlier)
        probe = folder / f"probe{PARTIAL}"
        probe.write_bytes(b" " * 4096)
        probe.unlink()
    except OSError as error:
        raise SpecError([_not_writable(folder, error)]) from error


def _not_writable(folder: Path, error: OSError) -> Problem:
    message = f"the profile cannot be written to {folder}: {error.strerror or error}."
    return Problem(code="FSDP-E772", message=message, fix="Free space, or write to another folder: --output DIR.")


def _remove_partial(folder: Path) -> None:
    """Delete files that a rank could not complete, for example because it was killed."""
    with contextlib.suppress(OSError):
        remove(list(folder.rglob(f"*{PARTIAL}")))


def _read(options: ProfileOptions, code: int) -> tuple[RunProfile | None, list[Problem]]:
    """Return the profile of all ranks. Without the files of all ranks there is none, and nothing is kept."""
    folder = Path(options.folder)
    results = read_ranks(folder)
    if not results.paths or (code and not results.is_complete):
        remove([folder / RANKS_FOLDER, folder / TRACES_FOLDER])
        return None, [_failure(code) or results.nothing(options)]
    return results.merge(options)


def _failure(code: int) -> Problem | None:
    """Return the problem of a script that did not succeed."""
    if code > 128:
        message = "the run was interrupted before the profile was complete. Nothing was written."
        return Problem(code="FSDP-E775", message=message, fix="Run it again, or profile fewer steps: --active 1.")
    if code:
        message = f"the script failed with exit code {code} before the profile was complete. Nothing was written."
        return Problem(code="FSDP-E773", message=message, fix="Correct the failure above, then profile again.")
    return None


def _write(folder: Path, run: RunProfile, suggestions: Sequence[Suggestion], problems: Sequence[Problem]) -> Any:
    """Write ``profile.json`` and return its content. Raises ``SpecError`` (FSDP-E772)."""
    try:
        return write_profile(folder, run, suggestions, problems)
    except OSError as error:
        raise SpecError([_not_writable(folder, error)]) from error


def _fail(args: ProfileArguments, problems: Sequence[Problem], code: int) -> int:
    if args.json:
        print_json({"ok": False, "problems": [problem.to_json() for problem in problems]})
    else:
        print_problems(problems)
    return code


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
