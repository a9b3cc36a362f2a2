"""``hf-fsdp verify``: Check every byte of a checkpoint against its manifest, and every name and shape against its
config.

Examples::

    hf-fsdp verify out/checkpoint-500
    hf-fsdp verify out --no-config-check --json
"""

from __future__ import annotations

import argparse
from pathlib import Path

from hf_fsdp_plugin.checkpoint.formats.known_formats import read_stored_model
from hf_fsdp_plugin.checkpoint.names import MANIFEST_NAME
from hf_fsdp_plugin.cli.output import OK, PROBLEMS, colored, print_json, print_problems
from hf_fsdp_plugin.problems import CheckpointError
from hf_fsdp_plugin.text import plural, printable
from hf_fsdp_plugin.tools.common import ProgressBars, check_folder
from hf_fsdp_plugin.tools.inspect.summary import checkpoints_of_run
from hf_fsdp_plugin.tools.verify.verification import Verdict, verify


def add_arguments(parser: argparse.ArgumentParser) -> None:
    about = "a checkpoint of any kind, a Hugging Face folder, or a run: all of its checkpoints"
    parser.add_argument("checkpoint", help=about)
    about = "skip the comparison with the model of config.json, which may need torch"
    parser.add_argument("--no-config-check", action="store_true", help=about)


def run(args: argparse.Namespace) -> int:
    """Print the result. Returns 0 if nothing is damaged, 1 for damage, 2 if the folder does not exist."""
    args.checkpoint = check_folder(args.checkpoint)
    found = _checkpoints_of_run(args.checkpoint)
    verdicts = []
    for checkpoint in found or [args.checkpoint]:
        with ProgressBars() as progress:
            verdict = verify(checkpoint, config_check=not args.no_config_check, progress=progress)
        verdicts.append(verdict)
        if not args.json:
            print_problems(verdict.problems)
            print(_text(verdict, printable(str(verdict.checkpoint))), flush=True)
    ok = all(verdict.ok for verdict in verdicts)
    if args.json:
        run_json = {"ok": ok, "run": args.checkpoint, "checkpoints": verdicts}
        print_json(run_json if found else verdicts[0].to_json())
    return OK if ok else PROBLEMS


def _checkpoints_of_run(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder that is not a checkpoint itself, oldest first."""
    paths = checkpoints_of_run(folder)
    if not paths or (folder / MANIFEST_NAME).exists():
        return []
    try:
        read_stored_model(folder)
    except CheckpointError:
        return paths[::-1]
    return []


def _text(verdict: Verdict, name: str) -> str:
    errors = sum(problem.severity == "error" for problem in verdict.problems)
    size = f"{plural(verdict.num_files, 'file')}, {verdict.num_bytes:,} bytes"
    if errors:
        return f"{name}: {colored(plural(errors, 'problem'), 'red')}; {size}"
    if verdict.num_checked_bytes == verdict.num_bytes:
        return f"{name}: {colored('undamaged', 'green')}; {size}"
    # Without a checksum, changed bytes cannot be found.
    count = f"{verdict.num_checked_bytes:,} of" if verdict.num_checked_bytes else "none of the"
    checked = f"{count} {verdict.num_bytes:,} bytes {'have' if verdict.num_checked_bytes else 'has'} a checksum"
    result = colored("no damage found", "yellow")
    return f"{name}: {result}, but {checked}; {plural(verdict.num_files, 'file')}"
