"""What is said where a checkpoint and a model do not go together: all of it at once, each with a few examples."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from hf_fsdp_plugin.problems import Origin, Problem

NUM_EXAMPLES = 3

Shapes = tuple[tuple[int, ...], tuple[int, ...]]
"""In the model, in the checkpoint."""


def missing(checkpoint: Path, names: Collection[str]) -> Iterable[Problem]:
    if names:
        message = f"holds nothing for {_some(names, 'tensor')} of the model: {_few(names)}."
        yield problem(checkpoint, message, _remedy(checkpoint))


def unexpected(checkpoint: Path, names: Collection[str]) -> Iterable[Problem]:
    if names:
        message = f"holds {_some(names, 'tensor')} that the model does not have: {_few(names)}."
        yield problem(checkpoint, message, _remedy(checkpoint))


def other_shapes(checkpoint: Path, shapes: Mapping[str, Shapes]) -> Iterable[Problem]:
    if shapes:
        examples = [f"{name} is {list(own)}, there {list(theirs)}" for name, (own, theirs) in shapes.items()]
        message = f"holds {_some(shapes, 'tensor')} in other shapes than the model's: {_few(examples)}."
        yield problem(checkpoint, message, _remedy(checkpoint))


def no_optimizer(checkpoint: Path) -> Problem:
    fix = "Resume from a checkpoint that was saved with it (save_only_model: false), or start with a fresh optimizer."
    return problem(checkpoint, "holds no optimizer state.", fix)


def other_groups(checkpoint: Path, own: list[frozenset[str]], saved: list[frozenset[str]]) -> Problem:
    """Parameter groups of which the names cannot be paired."""
    here, there = frozenset().union(*own), frozenset().union(*saved)
    said = [
        f"the optimizer has {_some(own, 'parameter group')} of {_sizes(own)} parameters, "
        f"the checkpoint {len(saved)} of {_sizes(saved)}"
    ]
    if here - there:
        said.append(f"not among the saved are {_few(sorted(here - there))}")
    if there - here:
        said.append(f"only among the saved are {_few(sorted(there - here))}")
    if here == there:
        split = [name for group in own for name in sorted(group)[:1] if group not in saved]
        said.append(f"the same parameters are dealt out otherwise, such as {_few(split)}")
    fix = "Give the optimizer the parameters and groups that it was saved with (what is trainable, what decays)."
    return problem(checkpoint, f"{'; '.join(said)}.", fix)


def foreign_state(checkpoint: Path, shapes: Mapping[str, Shapes]) -> Iterable[Problem]:
    """State tensors that are not laid out like their parameter."""
    if shapes:
        examples = [f"{key} is {list(theirs)}, the parameter {list(own)}" for key, (own, theirs) in shapes.items()]
        message = f"the optimizer's state cannot be cut like the parameters: {_few(examples)}."
        yield problem(checkpoint, message, _remedy(checkpoint))


def problem(checkpoint: Path, message: str, fix: str) -> Problem:
    return Problem(message=message, fix=fix, origin=Origin(source=str(checkpoint)))


def _remedy(checkpoint: Path) -> str:
    kind = _model_type(checkpoint)
    return f"Load it into the model that it was saved from{f', a {kind}' if kind else ''}, or name another checkpoint."


def _model_type(checkpoint: Path) -> str:
    """As the checkpoint's config tells: ``LlamaForCausalLM (llama)``; empty where it does not."""
    for folder in (checkpoint, checkpoint.parent):
        with suppress(OSError, ValueError, AttributeError):
            config = json.loads((folder / "config.json").read_text())
            names = [*(config.get("architectures") or ())[:1], config.get("model_type")]
            shown = [str(name) for name in names if name]
            return f"{shown[0]} ({shown[1]})" if len(shown) == 2 else "".join(shown)
    return ""


def _some(things: Collection[object], noun: str) -> str:
    return f"{len(things)} {noun}{'' if len(things) == 1 else 's'}"


def _few(names: Collection[str]) -> str:
    shown = list(names)[:NUM_EXAMPLES]
    return ", ".join(shown) + (f", … ({len(names) - len(shown)} more)" if len(names) > len(shown) else "")


def _sizes(groups: list[frozenset[str]]) -> str:
    return " + ".join(str(len(group)) for group in groups) or "0"
