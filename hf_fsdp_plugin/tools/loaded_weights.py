"""The weights of a checkpoint under the names of a model's modules, as ``from_pretrained`` loads them.

Hugging Face folders keep the names of the architecture's first release, and some architectures compute a parameter from
several stored tensors: the experts of a layer are one parameter. Transformers' own table of conversions is used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch

from hf_fsdp_plugin.checkpoint.file_io import InputFiles, object_in
from hf_fsdp_plugin.checkpoint.formats.boxes import whole_box
from hf_fsdp_plugin.checkpoint.formats.known_formats import format_named
from hf_fsdp_plugin.checkpoint.formats.stored_tensors import StoredModel, StoredPiece, StoredTensor
from hf_fsdp_plugin.checkpoint.names import is_adapter, is_wrapped_by_peft
from hf_fsdp_plugin.checkpoint.reading.resharding import execute_transfers, plan_transfers
from hf_fsdp_plugin.checkpoint.saved_state import whole_shard

ROOT: Final = "model."
"""The beginning of all names if torch's ``HuggingFaceStorageWriter`` has saved ``{"model": state}``: it joins keys."""


@dataclass(frozen=True, slots=True)
class ComputedTensor(StoredTensor):
    """A tensor that is computed from stored ones when it is written. Its piece is in no file."""

    compute: Callable[[InputFiles], torch.Tensor] = field(kw_only=True, compare=False)


def computed(
    name: str, dtype: str, shape: tuple[int, ...], compute: Callable[[InputFiles], torch.Tensor]
) -> ComputedTensor:
    """Return a tensor that ``compute`` returns with this dtype and shape, from files that are open for reading."""
    piece = StoredPiece(whole_box(shape), f"<{name}>", 0, ())
    return ComputedTensor(name, dtype, shape, (piece,), compute=compute)


def read_tensor(files: InputFiles, tensor: StoredTensor) -> torch.Tensor:
    """Return a tensor with the stored or computed elements, in memory of its own."""
    if isinstance(tensor, ComputedTensor):
        return tensor.compute(files)
    values = torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype))
    execute_transfers(files, plan_transfers(tensor, whole_shard(tensor.name, values).pieces))
    return values


def without_root(stored: StoredModel, names: Set[str]) -> StoredModel:
    """Return the model without the :data:`ROOT` of its names, if all names have it and those of its class do not.

    Args:
        names: those in the state dict of the model.
    """
    short = {name: name.removeprefix(ROOT) for name in stored.tensors}
    if not has_root(stored) or not names.isdisjoint(short) or names.isdisjoint(short.values()):
        return stored
    tensors = {short[name]: replace(tensor, name=short[name]) for name, tensor in stored.tensors.items()}
    return replace(stored, tensors=tensors)


def has_root(stored: StoredModel) -> bool:
    """Whether all names begin with :data:`ROOT`, which can also be that of a module of the model."""
    return all(name.startswith(ROOT) for name in stored.tensors)


def loaded_names(stored: StoredModel, model: Any) -> dict[str, tuple[str, str | None]]:
    """Return stored name -> name in the model, and the pattern of the conversion that computes this parameter.

    The pattern is ``None`` for a tensor that is loaded as it is. Only the first of several parameters that are computed
    from one tensor is named. Formats with shards have the names of the model.
    """
    own: dict[str, tuple[str, str | None]] = {name: (name, None) for name in stored.tensors}
    state = model.state_dict()
    if format_named(stored.format).state_dict_type != "full" or own.keys() <= state.keys():
        return own
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    mapping = _mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]

    names = {}
    for name in sorted(own, key=dot_natural_key):  # the order of experts
        names[name] = rename_source_key(name, renamings, converters, model.base_model_prefix, state)
        if names[name][0] not in state and name in state:  # the model's own name, which a rule has changed
            names[name] = rename_source_key(name, [], [], model.base_model_prefix, state)
    return names


def _mapping(model: Any) -> Any:
    from transformers.conversion_mapping import get_model_conversion_mapping

    return get_model_conversion_mapping(model)


@dataclass(frozen=True, slots=True)
class LoadedGroup:
    """Parameters of a model, and the stored tensors from which they are loaded.

    Attributes:
        sources: the names of the stored tensors.
        targets: name in the model -> the tensor.
    """

    sources: tuple[str, ...]
    targets: Mapping[str, StoredTensor]


def loaded_groups(stored: StoredModel, model: Any) -> list[LoadedGroup]:
    """Return the parameters and buffers of ``model`` that a checkpoint contains. No tensor is read.

    Args:
        model: on the meta device.
    """
    groups: list[LoadedGroup] = []
    converted: dict[str, list[tuple[str, str]]] = {}
    for name, (target, pattern) in loaded_names(stored, model).items():
        if pattern is None:
            groups.append(LoadedGroup((name,), {target: replace(stored.tensors[name], name=target)}))
        else:
            converted.setdefault(target, []).append((name, pattern))
    from transformers.core_model_loading import WeightConverter

    rules = [entry for entry in _mapping(model) if isinstance(entry, WeightConverter)] if converted else []
    kept: dict[str, torch.Tensor] = {}
    return [*groups, *(_converted(stored, model, rules, target, each, kept) for target, each in converted.items())]


def _converted(
    stored: StoredModel,
    model: Any,
    rules: list[Any],
    target: str,
    sources: list[tuple[str, str]],
    kept: dict[str, torch.Tensor],
) -> LoadedGroup:
    """Return the parameters that one of the rules computes from ``sources``: names and patterns.

    Args:
        kept: for the groups of one model: the parameters of the last conversion that were not read yet.
    """
    rule = next(entry for entry in rules if sources[0][1] in entry.source_patterns)

    def convert(read: Callable[[StoredTensor], torch.Tensor]) -> dict[str, torch.Tensor]:
        converter: Any = deepcopy(rule)
        for name, pattern in sources:
            converter.add_tensor(target, name, pattern, read(stored.tensors[name]))
        done = converter.convert(target, model=model, config=model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in done.items()}

    def on_meta(tensor: StoredTensor) -> torch.Tensor:
        return torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype), device="meta")

    def one(name: str, files: InputFiles) -> torch.Tensor:
        if name not in kept:
            kept.clear()
            kept.update(convert(lambda tensor: read_tensor(files, tensor)))
        return kept.pop(name)

    found = convert(on_meta).items()
    dtypes = {name: str(value.dtype).removeprefix("torch.") for name, value in found}
    targets = {name: computed(name, dtypes[name], tuple(value.shape), partial(one, name)) for name, value in found}
    return LoadedGroup(tuple(name for name, _ in sources), targets)


def why_not_whole(stored: StoredModel, folder: Path | None) -> str:
    """Return why the tensors are not those of a model's modules; empty if they are.

    Args:
        folder: the folder with the ``config.json`` of the model.
    """
    if is_adapter(stored.tensors) or is_wrapped_by_peft(stored.tensors):
        return "contains an adapter"
    return "is quantized" if folder is not None and "quantization_config" in object_in(folder / "config.json") else ""


def fp32_names(stored: StoredModel, model: Any, dtype: str | None) -> list[str]:
    """Return the tensors that ``model`` keeps in fp32 if it is loaded in ``dtype``: their stored names and its own."""
    from hf_fsdp_plugin.integrations.transformers.private import is_kept_in_fp32

    if dtype is None:
        return []
    is_kept = is_kept_in_fp32(model, getattr(torch, dtype))
    pairs = loaded_names(stored, model).items()
    return [each for name, (target, _) in pairs if is_kept(target) for each in (name, target)]
