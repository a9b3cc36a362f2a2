"""The files that ``from_pretrained`` reads: a checkpoint of any state dict type, and errors about damaged files.

All ranks raise one error that names file and tensor, before they load.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

from hf_fsdp_plugin import checkpoint
from hf_fsdp_plugin.backends.ranks.collective_entry import load_failures
from hf_fsdp_plugin.integrations.patching import has_fsdp_settings
from hf_fsdp_plugin.integrations.saving import bind_call
from hf_fsdp_plugin.integrations.transformers import private
from hf_fsdp_plugin.problems import CheckpointError, Origin, Problem, SpecError

_COPY = "Copy the file again, or add the key."


@lru_cache(maxsize=1)
def _read_headers(files: tuple[str, ...]) -> dict[str, checkpoint.ModelTensor]:
    """Return the tensors of the files. They are kept from when the files are found until the weights are loaded."""
    return checkpoint.read_model_headers(files)


@contextmanager
def raised_everywhere() -> Iterator[None]:
    """Make all ranks raise the error of a damaged file."""
    try:
        yield
    except SpecError as error:
        load_failures.raise_everywhere(error)


def get_shard_files(
    original: Callable[..., Any], pretrained_model_name_or_path: Any, index_filename: Any, *args: Any, **kwargs: Any
) -> Any:
    """Check the index of a model before the names of its files are read from it."""
    if not has_fsdp_settings() or not os.path.isfile(index_filename):
        return original(pretrained_model_name_or_path, index_filename, *args, **kwargs)
    with raised_everywhere():
        checkpoint.check_model_index(Path(index_filename), is_local=os.path.isdir(pretrained_model_name_or_path))
        try:
            return original(pretrained_model_name_or_path, index_filename, *args, **kwargs)
        except KeyError as error:
            message = f"is not a valid index of weights: it has no {error}, which Transformers requires."
            origin = Origin(source=os.fspath(index_filename))
            raise CheckpointError([Problem(code="FSDP-E453", message=message, fix=_COPY, origin=origin)]) from error


def resolve_files(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Find the files of a model, which may be those of a merged copy of a checkpoint, and read their headers."""
    load_failures.close()  # this rank tries another load, or the next one
    _read_headers.cache_clear()
    if not has_fsdp_settings():
        return original(*args, **kwargs)
    call = bind_call(original, args, kwargs)
    source = call["pretrained_model_name_or_path"]
    if source is not None and os.path.isdir(source) and not call["gguf_file"]:
        with raised_everywhere():
            call["pretrained_model_name_or_path"] = os.fspath(checkpoint.with_whole_weights(Path(source)))
    files, metadata = original(**call)
    if files:
        with raised_everywhere():
            _read_headers(tuple(files))
    return files, metadata


def check_model(model: Any, files: Sequence[str], load_config: Any) -> dict[str, checkpoint.ModelTensor]:
    """Compare the tensors of the files with the index and with the model. No weights are read.

    Returns:
        name -> tensor of the safetensors files.

    Raises:
        SpecError: on all ranks; the model needs a tensor that is missing, or that has another shape.
    """
    with raised_everywhere():
        tensors = _read_headers(tuple(files))
        _read_headers.cache_clear()
        if tensors and not load_config.is_quantized and load_config.device_mesh is None:
            _compare(model, files, load_config, tensors)
    return tensors


def _compare(model: Any, files: Sequence[str], load_config: Any, tensors: Mapping[str, checkpoint.ModelTensor]) -> None:
    """Raise the error of :func:`check_model` on this rank."""
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items() if hasattr(tensor, "shape")}
    weight_map = (load_config.sharded_metadata or {}).get("weight_map") or {}
    absent = weight_map.keys() - tensors.keys()
    odd = {name for name, tensor in tensors.items() if expected.get(name) != tensor.shape}
    if not absent and (not odd or load_config.ignore_mismatched_sizes):
        return
    loaded = private.loaded_names(model, load_config.weight_mapping, [*absent, *odd])
    if absent:
        given = {loaded.get(name, (name, True))[0] for name in tensors}
        tied = private.tied_weights(model)
        needed = set(checkpoint.required_names(model, expected.keys() - given - tied.keys() - set(tied.values())))
        lacking = [name for name in absent if loaded[name][0] in needed]
        checkpoint.raise_absent_tensors(lacking, weight_map, files)
    if not load_config.ignore_mismatched_sizes:
        mismatches = [
            checkpoint.ShapeMismatch(target, tensors[name].file, tensors[name].shape, expected[target])
            for name in odd
            for target, is_unchanged in [loaded[name]]
            if is_unchanged and target in expected and expected[target] != tensors[name].shape
        ]
        checkpoint.raise_shape_mismatches(mismatches, type(model).__name__, "")


def check_loaded(model: Any, loading_info: Any, load_config: Any) -> None:
    """Raise the error about shapes that were only known after weights had been converted."""
    if load_config.ignore_mismatched_sizes or not loading_info.mismatched_keys:
        return
    with raised_everywhere():
        mismatches = [
            checkpoint.ShapeMismatch(name, "", tuple(stored), tuple(expected))
            for name, stored, expected in loading_info.mismatched_keys
        ]
        checkpoint.raise_shape_mismatches(
            mismatches, type(model).__name__, str(load_config.pretrained_model_name_or_path)
        )
