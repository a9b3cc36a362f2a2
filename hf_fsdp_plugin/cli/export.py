"""``hf-fsdp export``: what a run has come to, as a Hugging Face folder. It finds the checkpoint; ``merge`` does it."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from hf_fsdp_plugin.checkpoint import newest_complete
from hf_fsdp_plugin.checkpoint.names import PREFIXES, TRAINER_STATE
from hf_fsdp_plugin.cli import merge
from hf_fsdp_plugin.problems import CheckpointError, Origin, Problem

HELP = (
    "Write the newest complete checkpoint of a run, or its best one, as a Hugging Face folder. (A running Trainer does "
    "so itself: trainer.save_model.)"
)
EXAMPLES = (
    "hf-fsdp export out model",
    "hf-fsdp export out model --best --max-shard-size 2GB",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help="a Trainer's output folder, or Accelerate's checkpoints")
    merge.add_options(parser)
    parser.add_argument("--best", action="store_true", help="the best checkpoint by the Trainer's metric")


def run(args: argparse.Namespace) -> int:
    """Returns 0 when the folder is there, 1 otherwise."""
    try:
        args.checkpoint = find_checkpoint(args.run, best=args.best)
    except CheckpointError as error:
        if args.json:
            print(json.dumps({"ok": False, "problems": [problem.to_json() for problem in error.problems]}, indent=2))
        else:
            print(error, file=sys.stderr)
        return 1
    return merge.run(args)


def find_checkpoint(folder: Path, *, best: bool = False) -> Path:
    """The newest complete checkpoint of a run, or the one that its Trainer found best; incomplete ones are told.

    Raises:
        CheckpointError: there is none.
    """
    passed_over: list[tuple[Path, str]] = []
    for prefix in PREFIXES:
        found, others = newest_complete(folder, prefix) if folder.is_dir() else (None, [])
        passed_over += others
        if found is not None:
            for path, why in others:
                print(f"{path} is passed over: {why}", file=sys.stderr)
            return _best(found) if best else found
    if passed_over:
        reasons = "; ".join(f"{path.name}: {why}" for path, why in passed_over)
        raise CheckpointError([_problem(folder, f"no checkpoint in it is complete ({reasons}).", "Use another run.")])
    raise CheckpointError(
        [_problem(folder, "there is no checkpoint-N in it.", "Name a run's folder; for one checkpoint use merge.")]
    )


def _best(newest: Path) -> Path:
    """The newest checkpoint knows which one was best when it was written."""
    try:
        recorded = json.loads((newest / TRAINER_STATE).read_text(encoding="utf-8")).get("best_model_checkpoint")
    except (OSError, ValueError):
        recorded = None
    if not recorded:
        fix = "Train with metric_for_best_model and load_best_model_at_end, or leave --best out."
        raise CheckpointError([_problem(newest / TRAINER_STATE, "it names no best checkpoint.", fix)])
    # By its name only: the run may have been moved since.
    best = newest.parent / Path(recorded).name
    if not best.is_dir():
        fix = "Fetch it from where it was copied to, or leave --best out."
        raise CheckpointError([_problem(best, "the best checkpoint of the run is not there any more.", fix)])
    return best


def _problem(place: Path, message: str, fix: str) -> Problem:
    return Problem(severity="error", message=message, fix=fix, origin=Origin(source=str(place)))
