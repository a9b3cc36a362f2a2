"""A summary of a checkpoint's contents, from names, sizes, headers and metadata. Does not import torch."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from hf_fsdp_plugin.checkpoint import names as file_names
from hf_fsdp_plugin.checkpoint.checking.completeness import (
    checkpoint_of,
    numbered_checkpoints,
    own_files,
    why_incomplete,
)
from hf_fsdp_plugin.checkpoint.file_io import object_in
from hf_fsdp_plugin.checkpoint.formats.known_formats import format_named, read_stored_model, read_stored_optimizer
from hf_fsdp_plugin.checkpoint.formats.manifest import Manifest, readable_manifest
from hf_fsdp_plugin.checkpoint.formats.safetensors import num_bytes
from hf_fsdp_plugin.checkpoint.formats.stored_tensors import StoredTensor, shared_tensors
from hf_fsdp_plugin.problems import CheckpointError

_RANDOM_STATE = re.compile(rf"(?:{file_names.TRAINER_RNG}|{file_names.ACCELERATE_RNG})_(\d+)\.\w+")
_SHARDS = re.compile(rf"(?:__|_rank)(\d+)(?:_\d+\{file_names.DCP_SUFFIX}|\.\w+)")

_FACTS = (
    "incomplete", "format", "kind", "step", "world_size", "num_elements", "dtypes", "model_bytes", "optimizer_bytes",
    "ties", "files", "versions",
)  # fmt: skip
_MANIFEST_FACTS = ("backend", "mesh", "strategy", "asynchronous", "created", "settings", "batch")
"""Attributes of a summary, and fields of the manifest, in a summary as JSON."""


class TensorType(NamedTuple):
    """Dtype and shape of a stored tensor."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """Facts about a checkpoint; ``None`` or empty if the files do not contain them.

    Attributes:
        format: name of the :class:`CheckpointFormat` of the model.
        incomplete: reason why the checkpoint cannot be used; ``None`` if it is complete.
        step: number of optimizer steps.
        world_size: number of ranks that wrote the checkpoint, from the manifest or the file names.
        parameters: name -> dtype and shape, buffers included; all names of tied parameters.
        ties: names that share one tensor.
        state: optimizer state: parameter -> key -> dtype and shape of a tensor, or a plain value.
        groups: the optimizer's parameter groups.
        files: path relative to the checkpoint -> size in bytes.
        manifest: ``None`` for stock checkpoints.
    """

    path: Path
    format: str
    incomplete: str | None
    step: int | None
    world_size: int | None
    parameters: Mapping[str, TensorType]
    ties: tuple[tuple[str, ...], ...]
    state: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    groups: tuple[Mapping[str, Any], ...] = ()
    files: Mapping[str, int]
    versions: Mapping[str, str]
    manifest: Manifest | None = None

    @property
    def kind(self) -> str:
        """``sharded``, ``full`` or ``local``."""
        return self.manifest.kind if self.manifest is not None else format_named(self.format).state_dict_type

    @property
    def distinct(self) -> dict[str, TensorType]:
        """The parameters; of each group of tied parameters, only the first."""
        again = {name for tie in self.ties for name in [name for name in tie if name in self.parameters][1:]}
        return {name: kind for name, kind in self.parameters.items() if name not in again}

    @property
    def num_elements(self) -> int:
        return sum(math.prod(shape) for _, shape in self.distinct.values())

    @property
    def dtypes(self) -> dict[str, int]:
        """Dtype -> elements, the most frequent first."""
        counts: Counter[str] = Counter()
        for dtype, shape in self.distinct.values():
            counts[dtype] += math.prod(shape)
        return dict(counts.most_common())

    @property
    def model_bytes(self) -> int:
        return sum(num_bytes(*kind) for kind in self.distinct.values())

    @property
    def optimizer_bytes(self) -> int:
        values = (value for entry in self.state.values() for value in entry.values())
        return sum(num_bytes(*value) for value in values if isinstance(value, TensorType))

    def to_json(self, *, parameters: bool = False, optimizer: bool = False) -> dict[str, Any]:
        """Return the object that ``inspect --json`` prints, with optional tables of parameters and optimizer state."""
        state = {name: _as_json(entry) for name, entry in self.state.items()}
        return {
            "checkpoint": str(self.path),
            "complete": self.incomplete is None,
            "manifest": self.manifest is not None,
            "num_parameters": len(self.distinct),
            **{name: getattr(self, name) for name in _FACTS},
            **{name: getattr(self.manifest, name, None) for name in _MANIFEST_FACTS},
            **({"parameters": _as_json(self.parameters)} if parameters else {}),
            **({"optimizer": {"groups": list(self.groups), "state": state}} if optimizer else {}),
        }


def _as_json(entries: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value._asdict() if isinstance(value, TensorType) else value for name, value in entries.items()}


def summarize(path: Path) -> Summary:
    """Return the summary of the checkpoint or Hugging Face folder ``path``, or of the checkpoint that contains it.

    Raises:
        CheckpointError: there is neither a manifest nor a readable model.
    """
    folder = checkpoint_of(path)
    incomplete = why_incomplete(folder)  # reports the problems that are suppressed below
    manifest = readable_manifest(folder)
    model = optimizer = None
    try:
        model = read_stored_model(folder)
    except CheckpointError:
        if manifest is None:
            raise
    with suppress(CheckpointError):
        optimizer = read_stored_optimizer(folder)
    step = object_in(folder / file_names.TRAINER_STATE).get("global_step")
    version = object_in(folder / "config.json").get("transformers_version")
    paths = [file for file in sorted(own_files(folder)) if file.exists()]
    files = {file.relative_to(folder).as_posix(): file.stat().st_size for file in paths}
    stored = {name: (tensor.dtype, tensor.shape) for name, tensor in model.tensors.items()} if model else {}
    parameters = manifest.parameters if manifest else stored
    state = {
        name: {key: TensorType(v.dtype, v.shape) if isinstance(v, StoredTensor) else v for key, v in entry.items()}
        for name, entry in (optimizer.state if optimizer else {}).items()
    }
    return Summary(
        path=folder,
        format=model.format if model else ("full" if manifest is None or manifest.kind == "full" else "dcp"),
        incomplete=incomplete,
        step=manifest.step if manifest else (step if isinstance(step, int) else None),
        world_size=manifest.world_size if manifest else _ranks(files),
        parameters={name: TensorType(*kind) for name, kind in parameters.items()},
        ties=manifest.ties if manifest else tuple(shared_tensors(model)) if model else (),
        state=state,
        groups=tuple(optimizer.groups) if optimizer else (),
        files=files,
        versions=manifest.versions if manifest else {"transformers": version} if isinstance(version, str) else {},
        manifest=manifest,
    )


def checkpoints_of_run(folder: Path) -> list[Path]:
    """Return the checkpoints in a run's folder, or in Accelerate's ``checkpoints/`` below it; newest first.

    Staging folders of interrupted saves come last.
    """
    places = (folder, folder / file_names.ACCELERATE_RUN)
    found = [path for place in places for prefix in file_names.PREFIXES for path in numbered_checkpoints(place, prefix)]
    return found + [path for place in places for path in sorted(place.glob(f".checkpoint*{file_names.SAVING}"))]


def _ranks(files: Collection[str]) -> int | None:
    """Return the highest rank in a file name, plus 1. Each rank saves at least a file with its random state.

    Of files with shards, there can be one more, with what is the same on all ranks.
    """
    for pattern in (_RANDOM_STATE, _SHARDS):
        ranks = [int(match[1]) for file in files if (match := pattern.search(file.rpartition("/")[2]))]
        if ranks:
            return max(ranks) + 1
    return 1 if file_names.trainer_rng_file(None) in files else None
