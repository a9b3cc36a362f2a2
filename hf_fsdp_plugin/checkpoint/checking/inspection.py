"""Summaries of checkpoints from their metadata alone: no tensor is read, and torch is not imported."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_fsdp_plugin.checkpoint import names as file_names
from hf_fsdp_plugin.checkpoint.checking.completeness import (
    checkpoint_of,
    numbered_checkpoints,
    own_files,
    why_incomplete,
)
from hf_fsdp_plugin.checkpoint.formats.boxes import dtype_size
from hf_fsdp_plugin.checkpoint.formats.known_formats import (
    format_named,
    read_stored_model,
    read_stored_optimizer,
)
from hf_fsdp_plugin.checkpoint.formats.manifest import Manifest, read_manifest
from hf_fsdp_plugin.checkpoint.formats.stored_tensors import StoredOptimizer, StoredTensor, shared_tensors
from hf_fsdp_plugin.checkpoint.io import object_in
from hf_fsdp_plugin.problems import CheckpointError

_RANK_IN_NAME = re.compile(
    rf"(?:{file_names.TRAINER_RNG}_|{file_names.ACCELERATE_RNG}_|__|_rank)(\d+)(?:_\d+\{file_names.DCP_SUFFIX}|\.\w+)"
)

_MANIFEST_FACTS = ("backend", "mesh", "strategy", "asynchronous", "created", "settings", "batch")
"""Fields of the manifest in a summary as JSON."""

Kind = tuple[str, tuple[int, ...]]
"""Dtype and shape."""


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
    parameters: Mapping[str, Kind]
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
    def distinct(self) -> dict[str, Kind]:
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
        return _num_bytes(self.distinct.values())

    @property
    def optimizer_bytes(self) -> int:
        return _num_bytes(kind for entry in self.state.values() for kind in entry.values() if _is_kind(kind))

    def to_json(self, *, parameters: bool = False, optimizer: bool = False) -> dict[str, Any]:
        """Return the object that ``inspect --json`` prints, with optional tables of parameters and optimizer state."""
        return {
            "checkpoint": str(self.path),
            "complete": self.incomplete is None,
            "incomplete": self.incomplete,
            "format": self.format,
            "kind": self.kind,
            "manifest": self.manifest is not None,
            "step": self.step,
            "world_size": self.world_size,
            **{name: getattr(self.manifest, name, None) for name in _MANIFEST_FACTS},
            "num_parameters": len(self.distinct),
            "num_elements": self.num_elements,
            "dtypes": self.dtypes,
            "model_bytes": self.model_bytes,
            "optimizer_bytes": self.optimizer_bytes,
            "ties": [list(tie) for tie in self.ties],
            "files": dict(self.files),
            "versions": dict(self.versions),
            **({"parameters": _as_json(self.parameters)} if parameters else {}),
            **({"optimizer": self._optimizer_json()} if optimizer else {}),
        }

    def _optimizer_json(self) -> dict[str, Any]:
        return {"groups": list(self.groups), "state": {name: _as_json(entry) for name, entry in self.state.items()}}


def summarize(path: Path) -> Summary:
    """Return the summary of the checkpoint or Hugging Face folder ``path``, or of the checkpoint that contains it.

    Raises:
        CheckpointError: there is neither a manifest nor a readable model.
    """
    folder = checkpoint_of(path)
    incomplete = why_incomplete(folder)  # reports the problems that are suppressed below
    manifest = model = optimizer = None
    with suppress(CheckpointError):
        manifest = read_manifest(folder)
    try:
        model = read_stored_model(folder)
    except CheckpointError:
        if manifest is None:
            raise
    with suppress(CheckpointError):
        optimizer = read_stored_optimizer(folder)
    step = object_in(folder / file_names.TRAINER_STATE).get("global_step")
    version = object_in(folder / "config.json").get("transformers_version")
    files = {
        file.relative_to(folder).as_posix(): file.stat().st_size for file in sorted(own_files(folder)) if file.exists()
    }
    parameters = {name: (tensor.dtype, tensor.shape) for name, tensor in model.tensors.items()} if model else {}
    return Summary(
        path=folder,
        format=model.format if model else ("full" if manifest is None or manifest.kind == "full" else "dcp"),
        incomplete=incomplete,
        step=manifest.step if manifest else (step if isinstance(step, int) else None),
        world_size=manifest.world_size if manifest else _ranks(files),
        parameters=manifest.parameters if manifest else parameters,
        ties=manifest.ties if manifest else tuple(shared_tensors(model)) if model else (),
        state=_state(optimizer) if optimizer else {},
        groups=tuple(optimizer.groups) if optimizer else (),
        files=files,
        versions=manifest.versions if manifest else ({"transformers": version} if isinstance(version, str) else {}),
        manifest=manifest,
    )


def checkpoints_of_run(folder: Path) -> list[Path]:
    """Return the checkpoints in a run's folder, or in Accelerate's ``checkpoints/`` below it; newest first.

    Staging folders of interrupted saves come last.
    """
    places = (folder, folder / file_names.ACCELERATE_RUN)
    found = [path for place in places for prefix in file_names.PREFIXES for path in numbered_checkpoints(place, prefix)]
    return found + [path for place in places for path in sorted(place.glob(f".checkpoint*{file_names.SAVING}"))]


def _ranks(files: Iterable[str]) -> int | None:
    """Return the highest rank in a file name, plus 1. Each rank saves at least a file with its random state."""
    ranks = [int(match[1]) for file in files if (match := _RANK_IN_NAME.search(file.rpartition("/")[2]))]
    if not ranks and file_names.trainer_rng_file(None) in files:
        return 1
    return max(ranks) + 1 if ranks else None


def _state(optimizer: StoredOptimizer) -> dict[str, dict[str, Any]]:
    """Return the optimizer's state with each tensor replaced by its dtype and shape."""
    return {
        name: {key: (v.dtype, v.shape) if isinstance(v, StoredTensor) else v for key, v in entry.items()}
        for name, entry in optimizer.state.items()
    }


def _is_kind(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], tuple)


def _num_bytes(kinds: Iterable[Kind]) -> int:
    return sum(math.prod(shape) * dtype_size(dtype) for dtype, shape in kinds)


def _as_json(entries: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: {"dtype": value[0], "shape": list(value[1])} if _is_kind(value) else value
        for name, value in entries.items()
    }
