"""Whether a checkpoint has all that a Trainer continues with, and valid values. Does not import torch.

The Trainer skips what is missing without a message, and reads JSON without checks.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from types import NoneType
from typing import Any, Final

from hf_fsdp_plugin.checkpoint import names as file_names
from hf_fsdp_plugin.checkpoint.errors import problem, refuse
from hf_fsdp_plugin.checkpoint.file_io import read_file
from hf_fsdp_plugin.checkpoint.formats.known_formats import read_stored_optimizer
from hf_fsdp_plugin.problems import CheckpointError, Problem
from hf_fsdp_plugin.text import format_names

RESUME_EARLIER: Final = "Resume from an earlier checkpoint."
_MODEL_ONLY: Final = ("optimizer state", "learning rate schedule", "random state")
"""What a checkpoint of ``save_only_model=True`` lacks."""


def check_trainer_checkpoint(checkpoint: Path, *, model_only: bool) -> Problem | None:
    """Check that a Trainer continues with everything that a checkpoint should contain.

    Args:
        model_only: the run asks for checkpoints without optimizer, schedule and random state.

    Returns:
        A warning if the checkpoint is one of these, and ``model_only`` is set.

    Raises:
        CheckpointError: a file is not valid; or something is missing, so that the training would continue from less
            than was saved.
    """
    config, state = checkpoint / "config.json", checkpoint / file_names.TRAINER_STATE
    if config.exists():
        read_object(config)
    found = (
        read_stored_optimizer(checkpoint) is not None,
        (checkpoint / file_names.TRAINER_SCHEDULE).is_file(),
        any(path.is_file() for path in checkpoint.glob(f"{file_names.TRAINER_RNG}*.pth")),
    )
    missing = tuple(name for name, is_found in zip(_MODEL_ONLY, found, strict=True) if not is_found)
    if state.exists():
        check_trainer_state(state)
    else:
        missing += (f"step of the Trainer ({file_names.TRAINER_STATE})",)
    if not missing:
        return None
    lacks = f"has no {format_names(missing)}"
    if model_only and missing == _MODEL_ONLY:
        effect = "the optimizer and its schedule begin anew, and random numbers differ from the uninterrupted run"
        return problem("FSDP-W408", checkpoint, f"{lacks}: {effect}.", _REMEDY)
    refuse("FSDP-E424", checkpoint, f"{lacks}, from which the training would have to continue.", _REMEDY)


_REMEDY: Final = (
    "Resume from a checkpoint that was saved with save_only_model=False. To train its weights with a new optimizer, "
    "load them with from_pretrained, and call train() without resume_from_checkpoint."
)


_STATE_TYPES: Final[dict[str, tuple[type, ...]]] = {
    "global_step": (int,),
    "max_steps": (int,),
    "num_train_epochs": (int, float),
    "epoch": (int, float, NoneType),
    "log_history": (list,),
    "best_global_step": (int, NoneType),
    "best_metric": (int, float, NoneType),
    "best_model_checkpoint": (str, NoneType),
    "stateful_callbacks": (dict, NoneType),
}
"""Types of values with which the Trainer continues, in every version of ``transformers.TrainerState`` that has them."""


def check_trainer_state(path: Path) -> None:
    """Raise ``CheckpointError`` if the Trainer could not continue with the values of ``trainer_state.json``.

    The Trainer itself reads them without checks, and prints names and paths as they are.
    """
    tree = read_object(path)
    for name, value in tree.items():
        if not name.isidentifier():
            message = f"contains the name {name!a:.60}, which the Trainer never writes."
            refuse("FSDP-E453", path, message, RESUME_EARLIER)
        types = _STATE_TYPES.get(name, (object,))
        if not isinstance(value, types) or (isinstance(value, bool) and name in _STATE_TYPES):
            expected = " or ".join("null" if kind is NoneType else _JSON_TYPES[kind] for kind in types)
            refuse("FSDP-E453", path, f"has {name}: {value!a:.60}; expected {expected}.", RESUME_EARLIER)
    if (step := tree.get("global_step", 0)) < 0:
        refuse("FSDP-E453", path, f"has global_step: {step}; expected 0 or more.", RESUME_EARLIER)
    if not (best := tree.get("best_model_checkpoint") or "").isprintable():
        message = f"has best_model_checkpoint: {best!a:.60}, with characters that cannot be printed."
        refuse("FSDP-E453", path, message, RESUME_EARLIER)


_JSON_TYPES: Final = {int: "an integer", float: "a number", str: "a text", list: "a list", dict: "an object"}


def read_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file.

    Raises:
        CheckpointError: the file cannot be read, is too large, is not an object, or names a value twice.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        tree = dict(pairs)
        if len(tree) < len(pairs):
            [(twice, _)] = Counter(name for name, _ in pairs).most_common(1)
            raise ValueError(f"{twice!a:.60} occurs twice in an object")
        return tree

    try:
        tree = json.loads(read_file(path), object_pairs_hook=unique)
    except CheckpointError:  # it is too large
        raise
    except OSError as error:
        refuse("FSDP-E472", path, f"cannot be read: {error.strerror or error}.")
    except (ValueError, RecursionError) as error:
        refuse("FSDP-E453", path, f"is not valid JSON: {error}.")
    if not isinstance(tree, dict):
        refuse("FSDP-E453", path, f"contains {tree!r:.40} instead of a JSON object.")
    return tree
