"""Comparison of a checkpoint's names and shapes with those of the model that ``config.json`` describes.

Only this comparison imports torch and Transformers, and only if there is a config.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hf_fsdp_plugin.checkpoint.formats.errors import problem, refuse
from hf_fsdp_plugin.checkpoint.formats.stored import StoredModel
from hf_fsdp_plugin.checkpoint.formats.table import format_named
from hf_fsdp_plugin.checkpoint.io import read_file
from hf_fsdp_plugin.problems import CheckpointError, Problem
from hf_fsdp_plugin.text import format_names, format_shape, plural

_NOT_COMPARED = "names and shapes were not compared with a model"
_OTHER = "Use the config.json of the checkpoint's model, or a checkpoint of this config's model."
_REPLACE = "Replace it with the config.json of the model."


def config_problems(stored: StoredModel, folder: Path) -> list[Problem]:
    """Return errors for missing names, unexpected names and different shapes; a note if the model cannot be built."""
    path = folder / "config.json"
    try:
        config = read_config(folder)
    except CheckpointError as error:
        return list(error.problems)
    if config is None:
        return [problem("FSDP-N475", folder, f"has no config.json; {_NOT_COMPARED}.")]
    if any(name.startswith("base_model.model.") for name in stored.tensors):
        return [problem("FSDP-N475", path, f"the checkpoint contains the weights of an adapter; {_NOT_COMPARED}.")]
    if "quantization_config" in config:
        return [problem("FSDP-N475", path, f"the model is quantized when it is loaded; {_NOT_COMPARED}.")]
    from hf_fsdp_plugin.plan.load_model import meta_model

    try:
        model = meta_model(folder)
    except ValueError as error:
        reason = " ".join(str(error).removeprefix(f"{folder}: ").split())
        return [problem("FSDP-N475", path, f"{_NOT_COMPARED}: {reason}")]
    return _compare(stored, model, path)


def read_config(folder: Path, fix: str = _REPLACE) -> dict[str, Any] | None:
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
        refuse("FSDP-E476", path, f"cannot be read as JSON: {error}.", fix)
    if not isinstance(config, dict):
        refuse("FSDP-E476", path, "is not a JSON object.", fix)
    return config


def _compare(stored: StoredModel, model: Any, path: Path) -> list[Problem]:
    state = model.state_dict(keep_vars=True)
    expected = {name: tuple(tensor.shape) for name, tensor in state.items()}
    names, merged = _loaded_names(stored, model)
    # Tensors that Transformers merges or splits when it loads them have different shapes in the files.
    shapes = {names[name]: tensor.shape for name, tensor in stored.tensors.items() if names[name] not in merged}
    present = set(names.values())
    tied: dict[int, set[str]] = {}
    for name, tensor in state.items():
        tied.setdefault(id(tensor), set()).add(name)
    missing = [name for name, tensor in state.items() if present.isdisjoint(tied[id(tensor)])]
    missing = required_names(model, missing)
    unexpected = [name for name in stored.tensors if names[name] not in expected]
    unexpected = _not_matching(unexpected, getattr(model, "_keys_to_ignore_on_load_unexpected", None))
    other = [
        f"{name} ({format_shape(shape)} in the checkpoint, {format_shape(expected[name])} in the model)"
        for name, shape in shapes.items()
        if expected.get(name, shape) != shape
    ]
    target = f"the {type(model).__name__} of its config.json"
    found = [
        ("FSDP-E477", missing, f"does not contain {len(missing)} of the {len(expected)} parameters of {target}"),
        ("FSDP-E478", unexpected, f"contains {plural(len(unexpected), 'parameter')} that {target} does not have"),
        ("FSDP-E479", other, f"contains {plural(len(other), 'parameter')} with other shapes than in {target}"),
    ]
    return [problem(code, path.parent, f"{text}: {format_names(n, 3)}.", _OTHER) for code, n, text in found if n]


def _loaded_names(stored: StoredModel, model: Any) -> tuple[dict[str, str], set[str]]:
    """Return stored name -> name in the model, and the names in the model that are merged from several stored tensors.

    Hugging Face folders keep the names of the architecture's first release; other formats have the names of the model.
    """
    own = {name: name for name in stored.tensors}
    if not format_named(stored.format).hugging_face_names or own.keys() <= model.state_dict().keys():
        return own, set()
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    names, merged = {}, set()
    for name in own:
        loaded, pattern = rename_source_key(
            name, renamings, converters, base_model_prefix=model.base_model_prefix, meta_state_dict=model.state_dict()
        )
        names[name] = loaded
        if pattern is not None:
            merged.add(loaded)
    return names, merged


def required_names(model: Any, names: Iterable[str]) -> list[str]:
    """Return the names that a checkpoint of the model must contain."""
    return _not_matching(names, getattr(model, "_keys_to_ignore_on_load_missing", None))


def _not_matching(names: Iterable[str], patterns: Iterable[str] | None) -> list[str]:
    """Return the names that match none of the patterns that the model's class ignores."""
    return [name for name in names if not any(re.search(pattern, name) for pattern in patterns or ())]
