"""``hf-fsdp export``: Write the newest complete checkpoint of a run, or its best one, as a Hugging Face folder. (In a
running Trainer, call trainer.save_model instead.)

Examples::

    hf-fsdp export out model
    hf-fsdp export out model --best --max-shard-size 2GB
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from hf_fsdp_plugin.checkpoint.checking.completeness import first_complete, numbered_checkpoints
from hf_fsdp_plugin.checkpoint.errors import refuse
from hf_fsdp_plugin.checkpoint.file_io import object_in
from hf_fsdp_plugin.checkpoint.names import PREFIXES, TRAINER_STATE
from hf_fsdp_plugin.text import printable
from hf_fsdp_plugin.tools.common import check_folder
from hf_fsdp_plugin.tools.merge import verb as merge


def add_arguments(parser: argparse.ArgumentParser) -> None:
    about = "output folder of a Trainer, or folder of Accelerate's checkpoints"
    parser.add_argument("run", metavar="RUN", help=about)
    merge.add_options(parser)
    parser.add_argument("--best", action="store_true", help="export the best checkpoint by the Trainer's metric")


def run(args: argparse.Namespace) -> int:
    """Merge the checkpoint. Returns 0 if the output folder is complete, 1 otherwise, 2 if RUN does not exist."""
    args.run = check_folder(args.run)
    args.checkpoint = find_checkpoint(args.run, best=args.best)
    return merge.run(args)


def find_checkpoint(folder: Path, *, best: bool = False) -> Path:
    """Return the newest complete checkpoint of a run, or the best one. Prints the incomplete ones to stderr.

    Raises:
        CheckpointError: there is no such checkpoint.
    """
    skipped: list[tuple[Path, str]] = []
    for prefix in PREFIXES:
        before = len(skipped)
        found = first_complete(numbered_checkpoints(folder, prefix), lambda *each: skipped.append(each))
        if found is not None:
            for path, why in skipped[before:]:
                print(printable(f"{path} is skipped: {why}"), file=sys.stderr)
            return _best(found) if best else found
    if skipped:
        reasons = "; ".join(f"{path.name}: {why}" for path, why in skipped)
        refuse("FSDP-E497", folder, f"contains no complete checkpoint ({reasons}).", "Use another run.")
    refuse("FSDP-E496", folder, "contains no checkpoint-N.", "Give the folder of a run; use merge for a checkpoint.")


def _best(newest: Path) -> Path:
    """Return the best checkpoint according to the newest checkpoint's trainer state."""
    state = newest / TRAINER_STATE
    recorded = object_in(state).get("best_model_checkpoint")
    if not recorded or not isinstance(recorded, str):
        fix = "Train with metric_for_best_model and load_best_model_at_end, or omit --best."
        refuse("FSDP-E498", state, "does not name a best checkpoint.", fix)
    # Only the name is used, because the run may have been moved.
    best = newest.parent / Path(recorded).name
    if not re.fullmatch(rf"({'|'.join(PREFIXES)})\d+", best.name) or not best.is_dir():
        fix = "Copy the checkpoint back, or omit --best."
        refuse("FSDP-E498", best, "was the best checkpoint, but no longer exists.", fix)
    return best
