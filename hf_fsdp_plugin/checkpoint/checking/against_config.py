"""A checkpoint's names and shapes against those of the model that its ``config.json`` describes.

Only here does the verification need torch and Transformers, and only once it has a config to build from.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hf_fsdp_plugin.checkpoint.checking.completeness import listed
from hf_fsdp_plugin.checkpoint.formats.stored import StoredModel
from hf_fsdp_plugin.problems import Origin, Problem, Severity

_NOT_COMPARED = "names and shapes were not compared with a model"
_OTHER = "Use the config.json of this checkpoint's own model, or the checkpoint of this config."

Shapes = Mapping[str, tuple[int, ...]]


def config_problems(index: StoredModel, folder: Path) -> list[Problem]:
    """Missing and unexpected names and differing shapes as errors; a note where there is no model to compare with."""
    path = folder / "config.json"
    config = _config(path)
    if isinstance(config, Problem):
        return [config]
    if any(name.startswith("base_model.model.") for name in index.tensors):
        return [_problem(path, f"these are the weights of an adapter; {_NOT_COMPARED}.", severity="note")]
    if "quantization_config" in config:
        return [_problem(path, f"the model is quantized when it is loaded; {_NOT_COMPARED}.", severity="note")]
    from hf_fsdp_plugin.plan.load_model import meta_model

    try:
        model = meta_model(folder)
    except ValueError as error:
        said = " ".join(str(error).removeprefix(f"{folder}: ").split())
        return [_problem(path, f"{_NOT_COMPARED}: {said}", severity="note")]
    return _compared(index, model, path)


def _config(path: Path) -> dict[str, Any] | Problem:
    try:
        config = json.loads(path.read_bytes())
    except FileNotFoundError:
        return _problem(path.parent, f"has no config.json; {_NOT_COMPARED}.", severity="note")
    except (OSError, ValueError, RecursionError) as error:
        return _problem(path, f"cannot be read: {error}.", "Put the model's own config.json in its place.")
    if not isinstance(config, dict):
        return _problem(path, "is no JSON object.", "Put the model's own config.json in its place.")
    return config


def _compared(index: StoredModel, model: Any, path: Path) -> list[Problem]:
    state = model.state_dict(keep_vars=True)
    expected = {name: tuple(tensor.shape) for name, tensor in state.items()}
    names, merged = _loaded_names(index, model)
    # Entries that Transformers merges or splits while it loads have other shapes on disk, by design.
    stored = {names[name]: tensor.shape for name, tensor in index.tensors.items() if names[name] not in merged}
    present = set(names.values())
    tied: dict[int, set[str]] = {}
    for name, tensor in state.items():
        tied.setdefault(id(tensor), set()).add(name)
    missing = [name for name, tensor in state.items() if present.isdisjoint(tied[id(tensor)])]
    missing = _not_matching(missing, getattr(model, "_keys_to_ignore_on_load_missing", None))
    unexpected = [name for name in index.tensors if names[name] not in expected]
    unexpected = _not_matching(unexpected, getattr(model, "_keys_to_ignore_on_load_unexpected", None))
    other = [
        f"{name} ({_shape(shape)} here, {_shape(expected[name])} there)"
        for name, shape in stored.items()
        if expected.get(name, shape) != shape
    ]
    whose = f"the {type(model).__name__} of its config.json"
    said = [
        (missing, f"{len(missing)} of the {len(expected)} parameters of {whose} are missing"),
        (unexpected, f"{len(unexpected)} parameters are unknown to {whose}"),
        (other, f"{len(other)} parameters have other shapes than those of {whose}"),
    ]
    return [_problem(path.parent, f"{text}: {listed(found)}.") for found, text in said if found]


def _loaded_names(index: StoredModel, model: Any) -> tuple[dict[str, str], set[str]]:
    """Stored name -> the name it is loaded under, and those of them that loading puts together from several.

    Hugging Face folders keep the names of the architecture's first release; everything else has the model's own.
    """
    own = {name: name for name in index.tensors}
    if index.format not in ("full", "bin") or own.keys() <= model.state_dict().keys():
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


def _not_matching(names: Iterable[str], patterns: Iterable[str] | None) -> list[str]:
    """Without the names that the model's class declares harmless."""
    return [name for name in names if not any(re.search(pattern, name) for pattern in patterns or ())]


def _shape(shape: tuple[int, ...]) -> str:
    return "×".join(str(size) for size in shape) or "scalar"


def _problem(path: Path, message: str, fix: str = "", severity: Severity = "error") -> Problem:
    if severity == "error":
        fix = fix or _OTHER
    return Problem(severity=severity, message=message, fix=fix, origin=Origin(source=str(path)))
