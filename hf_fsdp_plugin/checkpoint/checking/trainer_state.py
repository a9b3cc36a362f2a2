"""Checks whether a checkpoint has all that a Trainer continues with, and the values of its state.

The Trainer skips what is missing without a message, and reads JSON without checks.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from hf_fsdp_plugin.checkpoint import names as file_names
from hf_fsdp_plugin.checkpoint.errors import problem, refuse
from hf_fsdp_plugin.checkpoint.formats.known_formats import read_stored_optimizer
from hf_fsdp_plugin.checkpoint.io import read_file
from hf_fsdp_plugin.problems import CheckpointError, Problem
from hf_fsdp_plugin.text import format_names

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
        check_object(config)
    missing = _missing_states(checkpoint)
    if state.exists():
        check_object(state)
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


def _missing_states(checkpoint: Path) -> tuple[str, ...]:
    """Return what is missing, as regular files, of optimizer, schedule and random state."""
    found = (
        read_stored_optimizer(checkpoint) is not None,
        (checkpoint / file_names.TRAINER_SCHEDULE).is_file(),
        any(path.is_file() for path in checkpoint.glob(f"{file_names.TRAINER_RNG}*.pth")),
    )
    return tuple(name for name, is_found in zip(_MODEL_ONLY, found, strict=True) if not is_found)


def check_object(path: Path) -> None:
    """Raise ``CheckpointError`` if a file is not a JSON object."""
    try:
        tree = json.loads(read_file(path))
    except CheckpointError:  # it is too large
        raise
    except OSError as error:
        refuse("FSDP-E472", path, f"cannot be read: {error.strerror or error}.")
    except (ValueError, RecursionError) as error:
        refuse("FSDP-E453", path, f"is not valid JSON: {error}.")
    if not isinstance(tree, dict):
        refuse("FSDP-E453", path, f"contains {tree!r:.40} instead of a JSON object.")
