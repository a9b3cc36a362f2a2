"""Problems of a checkpoint that does not match a model or an optimizer: one problem per kind, with a few examples."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from hf_fsdp_plugin.checkpoint.formats.strict_json import object_in
from hf_fsdp_plugin.problems import Origin, Problem
from hf_fsdp_plugin.text import format_names, plural

Shapes = tuple[tuple[int, ...], tuple[int, ...]]
"""The shape in the model, and the shape in the checkpoint."""


def missing_tensors(checkpoint: Path, names: Collection[str]) -> Iterator[Problem]:
    if names:
        message = f"has no values for {plural(len(names), 'tensor')} of the model: {format_names(names)}."
        yield _problem("FSDP-E421", checkpoint, message)


def unexpected_tensors(checkpoint: Path, names: Collection[str]) -> Iterator[Problem]:
    if names:
        message = f"has {plural(len(names), 'tensor')} that the model does not have: {format_names(names)}."
        yield _problem("FSDP-E422", checkpoint, message)


def different_shapes(checkpoint: Path, shapes: Mapping[str, Shapes]) -> Iterator[Problem]:
    if shapes:
        examples = [f"{name} {list(stored)}, in the model {list(own)}" for name, (own, stored) in shapes.items()]
        message = f"has {plural(len(shapes), 'tensor')} with another shape than in the model: {format_names(examples)}."
        yield _problem("FSDP-E423", checkpoint, message)


def no_optimizer(checkpoint: Path) -> Problem:
    fix = "Resume from a checkpoint with optimizer state (save_only_model: false), or start with a new optimizer."
    return _problem("FSDP-E424", checkpoint, "has no optimizer state.", fix)


def different_groups(checkpoint: Path, own: list[frozenset[str]], saved: list[frozenset[str]]) -> Problem:
    """Return the problem of parameter groups that do not contain the same parameters."""
    here, there = frozenset[str]().union(*own), frozenset[str]().union(*saved)
    found = [f"the optimizer has {_groups(own)}, but the checkpoint has {_groups(saved)}"]
    if here - there:
        found.append(f"not in the checkpoint: {format_names(sorted(here - there))}")
    if there - here:
        found.append(f"only in the checkpoint: {format_names(sorted(there - here))}")
    if here == there:
        split = [name for group in own for name in sorted(group)[:1] if group not in saved]
        found.append(f"the same parameters are grouped differently, such as {format_names(split)}")
    fix = "Create the optimizer with the same trainable parameters and parameter groups as in the run that was saved."
    return _problem("FSDP-E425", checkpoint, f"{'; '.join(found)}.", fix)


def unsupported_state(checkpoint: Path, shapes: Mapping[str, Shapes]) -> Iterator[Problem]:
    """Yield the problem of state tensors that are not laid out like their parameter."""
    if shapes:
        examples = [f"{key} {list(stored)}, parameter {list(own)}" for key, (own, stored) in shapes.items()]
        message = f"has optimizer state that cannot be sharded like its parameters: {format_names(examples)}."
        yield _problem("FSDP-E426", checkpoint, message)


def state_of_other_shards(checkpoint: Path, ranges: Mapping[str, Collection[str]]) -> Iterator[Problem]:
    """Yield the problem of state (quantized, for example) that was saved for other shards than this rank has."""
    if ranges:
        count = plural(max(len(elements) for elements in ranges.values()), "shard")
        names = format_names(list(ranges))
        message = f"has optimizer state that only fits its own {count} per parameter; this rank has others: {names}."
        fix = "Resume with the same FSDP version, strategy and number of ranks, or start with a new optimizer."
        yield _problem("FSDP-E426", checkpoint, message, fix)


def other_quantization(checkpoint: Path, name: str) -> Problem:
    """Return the problem of quantized state that this optimizer would quantize in another way."""
    fix = "Create the optimizer with the settings of the run that was saved (block_size)."
    return _problem("FSDP-E426", checkpoint, f"has quantized optimizer state that differs in {name}.", fix)


def _problem(code: str, checkpoint: Path, message: str, fix: str = "") -> Problem:
    if not fix:
        kind = _model_type(checkpoint)
        fix = f"Load it into the model that was saved{f', a {kind}' if kind else ''}, or load another checkpoint."
    return Problem(code=code, message=message, fix=fix, origin=Origin(source=str(checkpoint)))


def _model_type(checkpoint: Path) -> str:
    """Return the config's model type, such as ``LlamaForCausalLM (llama)``; empty without a config."""
    for folder in (checkpoint, checkpoint.parent):
        if config := object_in(folder / "config.json"):
            classes = config.get("architectures")
            names = [*(classes[:1] if isinstance(classes, list) else ()), config.get("model_type")]
            shown = [str(name) for name in names if name]
            return f"{shown[0]} ({shown[1]})" if len(shown) == 2 else "".join(shown)
    return ""


def _groups(groups: list[frozenset[str]]) -> str:
    sizes = " + ".join(str(len(group)) for group in groups) or "0"
    return f"{plural(len(groups), 'parameter group')} of {sizes} parameters"
