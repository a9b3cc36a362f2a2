"""``hf-fsdp verify``: whether a checkpoint is, byte for byte, what was saved."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from hf_fsdp_plugin.checkpoint import Progress, Verdict, checkpoints_of_run, read_stored_model, verify
from hf_fsdp_plugin.checkpoint.names import MANIFEST_NAME
from hf_fsdp_plugin.problems import CheckpointError

HELP = "Check every byte of a checkpoint against its manifest, and every name and shape against its config."
EXAMPLES = (
    "hf-fsdp verify out/checkpoint-500",
    "hf-fsdp verify out/checkpoint-500 --no-config-check --json",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", type=Path, help="a checkpoint of any kind, or a Hugging Face folder")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else on stdout")
    parser.add_argument(
        "--no-config-check", action="store_true", help="do not build the model of config.json, which imports torch"
    )


def run(args: argparse.Namespace) -> int:
    """Prints the verdict. Returns 0 for a whole checkpoint, 1 for any damage, 2 where there is no such folder."""
    if not args.checkpoint.is_dir():
        print(f"hf-fsdp verify: {args.checkpoint} is no folder. Give the folder of a checkpoint.", file=sys.stderr)
        return 2
    if (newest := _newest_of_run(args.checkpoint)) is not None:
        message = f"{args.checkpoint} is a run's folder. Name one of its checkpoints, such as {newest}."
        print(f"hf-fsdp verify: {message}", file=sys.stderr)
        return 2
    verdict = verify(args.checkpoint, config_check=not args.no_config_check, progress=_bar())
    if args.json:
        print(json.dumps(verdict.to_json(), indent=2, ensure_ascii=False))
    else:
        print(_text(verdict))
        for problem in verdict.problems:
            print(problem, file=sys.stderr)
    return 0 if verdict.ok else 1


def _newest_of_run(folder: Path) -> Path | None:
    """The newest checkpoint in a folder that is none itself."""
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
    found = "whole" if verdict.ok else f"{errors} problem{'s' if errors > 1 else ''}"
    return f"{verdict.checkpoint}: {found}; {verdict.num_files:,} files, {verdict.num_bytes:,} bytes"


def _bar() -> Progress | None:
    """A progress bar on a terminal's stderr; nothing elsewhere."""
    if not sys.stderr.isatty():
        return None
    from tqdm import tqdm

    bar = tqdm(unit="B", unit_scale=True, leave=False)

    def show(done: int, total: int) -> None:
        bar.total = total
        bar.update(done - bar.n)
        if done == total:
            bar.close()

    return show
