"""``hf-fsdp verify``: checks that a checkpoint has exactly the bytes that were saved."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from hf_fsdp_plugin.checkpoint import Verdict, checkpoints_of_run, read_stored_model, verify
from hf_fsdp_plugin.checkpoint.names import MANIFEST_NAME
from hf_fsdp_plugin.cli.progress import ProgressBars
from hf_fsdp_plugin.problems import CheckpointError
from hf_fsdp_plugin.text import plural

HELP = "Check every byte of a checkpoint against its manifest, and every name and shape against its config."
EXAMPLES = ("hf-fsdp verify out/checkpoint-500", "hf-fsdp verify out/checkpoint-500 --no-config-check --json")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", type=Path, help="a checkpoint of any kind, or a Hugging Face folder")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else on stdout")
    parser.add_argument(
        "--no-config-check",
        action="store_true",
        help="skip the comparison with the model of config.json, which needs torch",
    )


def run(args: argparse.Namespace) -> int:
    """Print the result. Returns 0 for an undamaged checkpoint, 1 for damage, 2 if the folder does not exist."""
    if not args.checkpoint.is_dir():
        print(f"hf-fsdp verify: {args.checkpoint} is not a folder. Give the folder of a checkpoint.", file=sys.stderr)
        return 2
    if (newest := _newest_of_run(args.checkpoint)) is not None:
        message = f"{args.checkpoint} is the folder of a run. Give one of its checkpoints, such as {newest}."
        print(f"hf-fsdp verify: {message}", file=sys.stderr)
        return 2
    with ProgressBars() as progress:
        verdict = verify(args.checkpoint, config_check=not args.no_config_check, progress=progress)
    if args.json:
        print(json.dumps(verdict.to_json(), indent=2, ensure_ascii=False))
    else:
        print(_text(verdict))
        for problem in verdict.problems:
            print(problem, file=sys.stderr)
    return 0 if verdict.ok else 1


def _newest_of_run(folder: Path) -> Path | None:
    """Return the newest checkpoint in a folder that is not a checkpoint itself."""
    paths = checkpoints_of_run(folder)
    if not paths or (folder / MANIFEST_NAME).exists():
        return None
    try:
        read_stored_model(folder)
    except CheckpointError:
        return paths[0]
    return None


def _text(verdict: Verdict) -> str:
    errors = sum(problem.severity == "error" for problem in verdict.problems)
    result = "undamaged" if verdict.ok else plural(errors, "problem")
    return f"{verdict.checkpoint}: {result}; {plural(verdict.num_files, 'file')}, {verdict.num_bytes:,} bytes"
