"""Checks whether a checkpoint has all that a Trainer continues with, and the values of its state.

The Trainer skips what is missing without a message, and reads JSON without checks.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any, Final

from hf_fsdp_plugin.checkpoint import names as file_names
from hf_fsdp_plugin.checkpoint.errors import COPY_AGAIN, problem, refuse
from hf_fsdp_plugin.checkpoint.formats.known_formats import read_stored_optimizer
from hf_fsdp_plugin.checkpoint.io import parse_json, read_file
from hf_fsdp_plugin.problems import CheckpointError, Problem
from hf_fsdp_plugin.text import format_names, printable

_MODEL_ONLY: Final = ("optimizer state", "learning rate schedule", "random state")
"""What a checkpoint of ``save_only_model=True`` lacks."""
_NUMBERS = (
    "epoch", "max_steps", "logging_steps", "eval_steps", "save_steps", "train_batch_size", "num_train_epochs",
    "best_metric", "best_global_step", "num_input_tokens_seen", "total_flos",
)  # fmt: skip


def check_trainer_checkpoint(checkpoint: Path, fields: Collection[str], *, model_only: bool) -> Problem | None:
    """Check that a Trainer continues with everything that a checkpoint should contain.

    Args:
        fields: names of the values in ``trainer_state.json`` that the installed version of Transformers knows.
        model_only: the run asks for checkpoints without optimizer, schedule and random state.

    Returns:
        A warning if the checkpoint is one of these, and ``model_only`` is set.

    Raises:
        CheckpointError: a file is not valid; or something is missing, so that the training would continue from less
            than was saved.
    """
    config, state = checkpoint / "config.json", checkpoint / file_names.TRAINER_STATE
    if config.exists():
        _object_in(config)
    missing = _missing_states(checkpoint)
    if state.exists():
        check_trainer_state(state, fields)
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


def check_trainer_state(path: Path, fields: Collection[str] | None = None) -> None:
    """Raise ``CheckpointError`` if ``trainer_state.json`` is damaged, or has values that a Trainer cannot use.

    Args:
        fields: as in :func:`check_trainer_checkpoint`; ``None`` to accept any.
    """
    state = _object_in(path)
    _check_values(path, state, state.keys() if fields is None else fields)


def _missing_states(checkpoint: Path) -> tuple[str, ...]:
    """Return what is missing, as regular files, of optimizer, schedule and random state."""
    found = (
        read_stored_optimizer(checkpoint) is not None,
        (checkpoint / file_names.TRAINER_SCHEDULE).is_file(),
        any(path.is_file() for path in checkpoint.glob(f"{file_names.TRAINER_RNG}*.pth")),
    )
    return tuple(name for name, is_found in zip(_MODEL_ONLY, found, strict=True) if not is_found)


def _object_in(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raises ``CheckpointError`` if it is damaged."""
    try:
        tree = parse_json(read_file(path))
    except CheckpointError:  # it is too large
        raise
    except OSError as error:
        refuse("FSDP-E472", path, f"cannot be read: {error.strerror or error}.")
    except (ValueError, RecursionError) as error:
        refuse("FSDP-E453", path, f"is not valid JSON: {error}.")
    if not isinstance(tree, dict):
        refuse("FSDP-E453", path, f"contains {tree!r:.40} instead of a JSON object.")
    return tree


def _check_values(path: Path, state: dict[str, Any], fields: Collection[str]) -> None:
    """Raise ``CheckpointError`` for values that Transformers cannot use, or prints as they are."""
    wrong = [f"{name!r} is unknown to the installed version of Transformers" for name in state.keys() - set(fields)]
    step = state.get("global_step", 0)
    if type(step) is not int or step < 0:
        wrong.append(f"global_step is {step!r:.40} instead of a number of steps")
    for name in _NUMBERS:
        if type(value := state.get(name)) not in (int, float, type(None)):
            wrong.append(f"{name} is {value!r:.40} instead of a number")
    for name, kind in (("log_history", list), ("stateful_callbacks", dict)):
        if not isinstance(value := state.get(name), kind | None):
            wrong.append(f"{name} is {value!r:.40} instead of a {kind.__name__}")
    best = state.get("best_model_checkpoint")
    if best is not None and (not isinstance(best, str) or printable(best) != best):
        wrong.append(f"best_model_checkpoint is {best!r:.80} instead of a path")
    if wrong:
        fix = f"{COPY_AGAIN} If another version of Transformers has written it, resume with that version."
        raise CheckpointError([problem("FSDP-E418", path, f"{'; '.join(sorted(wrong))}.", fix)])
