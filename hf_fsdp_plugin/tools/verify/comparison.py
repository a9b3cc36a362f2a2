"""Compares a checkpoint with its manifest, and with the model of a config, which is built on the meta device."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hf_fsdp_plugin.checkpoint import errors
from hf_fsdp_plugin.checkpoint.file_io import read_file
from hf_fsdp_plugin.checkpoint.formats.manifest import Manifest
from hf_fsdp_plugin.checkpoint.formats.stored_tensors import StoredModel
from hf_fsdp_plugin.checkpoint.names import is_adapter, is_wrapped_by_peft
from hf_fsdp_plugin.problems import CheckpointError, Problem
from hf_fsdp_plugin.text import format_names, format_shape, plural

_NOT_COMPARED = "names and shapes were not compared with a model"
_OTHER = "Use the config.json of the checkpoint's model, or a checkpoint of this config's model."
_REPLACE = "Replace it with the config.json of the model."


def config_problems(stored: StoredModel, folder: Path) -> list[Problem]:
    """Return errors for missing names, unexpected names and different shapes; a note if the model cannot be built."""
    path = folder / "config.json"
    try:
        config = _read_config(folder)
    except CheckpointError as error:
        return list(error.problems)
    if config is None:
        return [errors.problem("FSDP-N475", folder, f"has no config.json; {_NOT_COMPARED}.")]
    if any(name.startswith("base_model.model.") for name in stored.tensors):
        reason = "the checkpoint contains the weights of an adapter"
    elif "quantization_config" in config:
        reason = "the model is quantized when it is loaded"
    else:
        try:
            from hf_fsdp_plugin.tools.meta_model import meta_model

            model = meta_model(folder)
        except (ImportError, ValueError) as error:
            reason = " ".join(str(error).removeprefix(f"{folder}: ").split()).removesuffix(".")
        else:
            return _differences(stored, model, path)
    return [errors.problem("FSDP-N475", path, f"{reason}; {_NOT_COMPARED}.")]


def _read_config(folder: Path) -> dict[str, Any] | None:
    """Return the ``config.json`` of a folder, or ``None`` if there is none.

    Raises:
        CheckpointError: it is not a JSON object.
    """
    path = folder / "config.json"
    try:
        config = json.loads(read_file(path))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        errors.refuse("FSDP-E476", path, f"cannot be read as JSON: {error}.", _REPLACE)
    if not isinstance(config, dict):
        errors.refuse("FSDP-E476", path, "is not a JSON object.", _REPLACE)
    return config


def _differences(stored: StoredModel, model: Any, path: Path) -> list[Problem]:
    from hf_fsdp_plugin.tools.loaded_weights import loaded_groups, loaded_names, without_root

    state = model.state_dict(keep_vars=True)
    expected = {name: tuple(tensor.shape) for name, tensor in state.items()}
    stored = without_root(stored, state.keys())
    loaded = loaded_names(stored, model)
    names = {name: target for name, (target, _) in loaded.items()}
    merged = {target for target, pattern in loaded.values() if pattern is not None}
    # Tensors that Transformers merges or splits when it loads them have different shapes in the files.
    shapes = {names[name]: tensor.shape for name, tensor in stored.tensors.items() if names[name] not in merged}
    found = set(names.values())
    if merged:
        with contextlib.suppress(Exception):  # of operations that need values, which tensors on meta do not have
            found.update(name for group in loaded_groups(stored, model) for name in group.targets)
    present = {id(state[name]) for name in found if name in state}  # tied names have the same tensor
    missing = [name for name, tensor in state.items() if id(tensor) not in present]
    missing = _not_matching(missing, getattr(model, "_keys_to_ignore_on_load_missing", None))
    unexpected = [name for name in stored.tensors if names[name] not in expected]
    unexpected = _not_matching(unexpected, getattr(model, "_keys_to_ignore_on_load_unexpected", None))
    other = [
        f"{name} ({format_shape(shape)} in the checkpoint, {format_shape(expected[name])} in the model)"
        for name, shape in shapes.items()
        if expected.get(name, shape) != shape
    ]
    target = f"the {type(model).__name__} of its config.json"
    return difference_problems(path.parent, missing, unexpected, other, len(expected), target, _OTHER)


def manifest_problems(model: StoredModel, manifest: Manifest) -> list[Problem]:
    """Return an error if the checkpoint lacks parameters of its manifest. The hashes of its files cover the rest."""
    group_of = {name: tie for tie in manifest.ties for name in tie}
    # The files need to contain only one name of each group of tied names.
    stored = {other for name in model.tensors for other in group_of.get(name, (name,))}
    missing = [name for name in manifest.parameters if name not in stored]
    if is_adapter(model.tensors) and is_wrapped_by_peft(manifest.parameters):
        # Earlier versions listed the base model of an adapter too, which the Trainer does not save.
        missing = [name for name in missing if ".lora_" in name]
    num_expected = len(manifest.parameters)
    return difference_problems(model.root, missing, [], [], num_expected, "its manifest", errors.COPY_AGAIN)


def difference_problems(
    place: Path, missing: list[str], unexpected: list[str], other: list[str], num_expected: int, target: str, fix: str
) -> list[Problem]:
    """Return an error for each kind of difference between a checkpoint and ``target``, with a few examples."""
    found = [
        ("FSDP-E477", missing, f"does not contain {len(missing)} of the {num_expected} parameters of {target}"),
        ("FSDP-E478", unexpected, f"contains {plural(len(unexpected), 'parameter')} that {target} does not have"),
        ("FSDP-E479", other, f"contains {plural(len(other), 'tensor')} with another dtype or shape than in {target}"),
    ]
    return [errors.problem(code, place, f"{text}: {format_names(own, 3)}.", fix) for code, own, text in found if own]


def _not_matching(names: Iterable[str], patterns: Iterable[str] | None) -> list[str]:
    """Return the names that match none of the patterns that the model's class ignores."""
    return [name for name in names if not any(re.search(pattern, name) for pattern in patterns or ())]
