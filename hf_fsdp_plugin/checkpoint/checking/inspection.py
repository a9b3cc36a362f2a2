"""Whether a checkpoint is complete, and a summary of its contents, within milliseconds. Does not import torch.

Only names, sizes, headers and metadata are read: the manifest, or the structure of the files if there is none.
:mod:`hf_fsdp_plugin.checkpoint.checking.verify` checks the bytes.
"""

from __future__ import annotations

import math
import os
import re
import stat
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from hf_fsdp_plugin.checkpoint import names as file_names
from hf_fsdp_plugin.checkpoint.checking.trainer_state import check_trainer_state
from hf_fsdp_plugin.checkpoint.errors import problem
from hf_fsdp_plugin.checkpoint.formats.deepspeed import read_engine_state
from hf_fsdp_plugin.checkpoint.formats.known_formats import format_named, read_stored_model, read_stored_optimizer
from hf_fsdp_plugin.checkpoint.formats.manifest import Manifest, read_manifest, readable_manifest
from hf_fsdp_plugin.checkpoint.formats.safetensors import num_bytes
from hf_fsdp_plugin.checkpoint.formats.stored_tensors import StoredTensor, shared_tensors
from hf_fsdp_plugin.checkpoint.formats.torch_files import NotAnArchive, ZipEntry, is_archive, stored_entries
from hf_fsdp_plugin.checkpoint.io import object_in
from hf_fsdp_plugin.problems import CheckpointError, Problem
from hf_fsdp_plugin.text import format_names, plural

_PART = re.compile(rf"({file_names.FSDP_MODEL}|{file_names.OPTIMIZER})_\d+")
_ARCHIVES = ("*.pt", "*.pth", "*.bin", "*.pkl")
_RESUME_EARLIER = "Resume from an earlier checkpoint."


def why_incomplete(folder: Path) -> str | None:
    """Return the reason why a checkpoint cannot be used, in one line; ``None`` if it is complete."""
    problems = completeness_problems(folder)
    if not problems:
        return None
    origin, message = problems[0].origin, problems[0].message
    if origin is not None and origin.source_line != str(folder):
        message = f"{origin.source_line.removeprefix(f'{folder}/')}: {message}"
    return message + (f" (and {plural(len(problems) - 1, 'more problem')})" if len(problems) > 1 else "")


def completeness_problems(folder: Path) -> list[Problem]:
    """Return all problems because of which a checkpoint cannot be used; empty if it is complete."""
    try:
        manifest = read_manifest(folder)
        return structure_problems(folder) if manifest is None else file_problems(folder, manifest)
    except CheckpointError as error:
        return list(error.problems)


def first_complete(folders: Iterable[Path]) -> tuple[Path | None, list[tuple[Path, str]]]:
    """Return the first folder that is a complete checkpoint, and those before it with the reasons."""
    skipped: list[tuple[Path, str]] = []
    for folder in folders:
        reason = why_incomplete(folder)
        if reason is None:
            return folder, skipped
        skipped.append((folder, reason))
    return None, skipped


def numbered_checkpoints(run_folder: Path, prefix: str) -> list[Path]:
    """Return the folders ``<prefix><number>`` in ``run_folder``, highest number first; empty if it does not exist."""
    if not run_folder.is_dir():
        return []
    pattern = re.compile(re.escape(prefix) + r"(\d+)")
    found = [(int(match[1]), path) for path in run_folder.iterdir() if (match := pattern.fullmatch(path.name))]
    return [path for _, path in sorted(found, reverse=True) if path.is_dir()]


def checkpoint_of(path: Path) -> Path:
    """Return the checkpoint that contains ``path`` (``pytorch_model_fsdp_0``), or ``path`` itself."""
    parent = path.resolve().parent
    is_part = _PART.fullmatch(path.resolve().name) and not (path / file_names.MANIFEST_NAME).exists()
    in_checkpoint = any((parent / name).is_file() for name in (file_names.MANIFEST_NAME, file_names.TRAINER_STATE))
    return parent if is_part and in_checkpoint else path


def regular_size(path: Path) -> int | None:
    """Return the size in bytes of a regular file; ``None`` for anything else."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None


def file_problems(folder: Path, manifest: Manifest) -> list[Problem]:
    """Return a problem for each file of the manifest that is missing or has a different size."""
    problems = []
    for record in manifest.files:
        path = folder / record.path
        size = regular_size(path)
        if size == record.size:
            continue
        code, message = "FSDP-E457", "is missing"
        if size is not None:
            code, message = "FSDP-E470", f"has {size:,} bytes; {record.size:,} were saved"
        lost = sorted({piece.name for piece in record.ranges if piece.name and piece.stop > (size or 0)})
        contents = f"; it contained {format_names(lost, 3)}" if lost else ""
        problems.append(problem(code, path, f"{message}{contents}.", _RESUME_EARLIER))
    return problems


def structure_problems(folder: Path) -> list[Problem]:
    """Return the problems in the structure of a checkpoint without a manifest: unreadable, truncated or unfinished."""
    if file_names.SAVING in (Path(name).suffix for name in (folder.resolve().name, folder.resolve().parent.name)):
        message = "is the staging folder of a save that is running or was interrupted."
        return [problem("FSDP-E452", folder, message, _RESUME_EARLIER)]
    try:  # the readers follow every reference, and reject references beyond the end of a file
        read_stored_model(folder)
        read_stored_optimizer(folder)
    except CheckpointError as error:
        return list(error.problems)
    return _archive_problems(folder) + _last_file_problems(folder)


def own_files(folder: Path) -> Iterator[Path]:
    """Yield the files of a checkpoint. Skips checkpoints inside it: the folder of a run can be a checkpoint too."""
    for place, inner, files in os.walk(folder):
        inner[:] = [name for name in inner if not re.fullmatch(r"\.?checkpoint([-_]\d+.*|s)", name)]
        yield from (Path(place) / name for name in files)


def archive_entries(
    path: Path, problems: list[Problem], fix: str, names_before: Callable[[int], list[str]] = lambda _: []
) -> list[ZipEntry]:
    """Return the entries of a file's archives; none for another file. Adds a problem if the file is damaged.

    Args:
        names_before: returns the names of the tensors that begin before a byte of the file.
    """
    try:
        return list(stored_entries(path)) if is_archive(path) else []
    except NotAnArchive as error:
        lost = sorted(set(names_before(error.stop)))
        contents = f"; they contain {format_names(lost, 3)}" if lost else ""
        problems.append(problem("FSDP-E453", path, f"is truncated or damaged: {error}{contents}.", fix))
    except OSError as error:
        problems.append(problem("FSDP-E472", path, f"cannot be read: {error.strerror}.", fix))
    return []


def _archive_problems(folder: Path) -> list[Problem]:
    """Return a problem for each empty or damaged file of ``torch.save`` next to the model."""
    problems: list[Problem] = []
    for path in sorted(path for pattern in _ARCHIVES for path in folder.glob(pattern) if path.is_file()):
        if path.stat().st_size == 0:
            problems.append(problem("FSDP-E453", path, "is empty.", _RESUME_EARLIER))
        else:
            archive_entries(path, problems, _RESUME_EARLIER)
    return problems


def _last_file_problems(folder: Path) -> list[Problem]:
    """Return a problem if the file that the Trainer or Accelerate writes last is missing or damaged."""
    name, path = folder.resolve().name, folder / file_names.TRAINER_STATE
    try:
        if re.fullmatch(rf"{file_names.TRAINER_PREFIX}\d+", name):
            path.stat()
            check_trainer_state(path)
        elif re.fullmatch(rf"{file_names.ACCELERATE_PREFIX}\d+", name):
            path = folder / file_names.accelerate_rng_file(0)
            path.stat()
    except FileNotFoundError:
        return [problem("FSDP-E452", folder, f"has no {path.name}: the save was not finished.", _RESUME_EARLIER)]
    except OSError as error:
        return [problem("FSDP-E472", path, f"cannot be read: {error.strerror}.", _RESUME_EARLIER)]
    except CheckpointError as error:
        return list(error.problems)
    return []


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
    engine = read_engine_state(folder) if model is not None and model.format == "deepspeed" else {}
    step = object_in(folder / file_names.TRAINER_STATE).get("global_step", engine.get("global_steps"))
    version = object_in(folder / "config.json").get("transformers_version")
    versions = {"transformers": version, "deepspeed": engine.get("ds_version")}
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
        world_size=manifest.world_size if manifest else engine.get("dp_world_size", _ranks(files)),
        parameters={name: TensorType(*kind) for name, kind in parameters.items()},
        ties=manifest.ties if manifest else tuple(shared_tensors(model)) if model else (),
        state=state,
        groups=tuple(optimizer.groups) if optimizer else (),
        files=files,
        versions=manifest.versions if manifest else {k: v for k, v in versions.items() if isinstance(v, str)},
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
