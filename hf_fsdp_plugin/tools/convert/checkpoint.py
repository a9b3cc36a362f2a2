"""Converts a checkpoint of DeepSpeed into one of this package, in batches of tensors, so that memory is bounded.

Model and optimizer become folders of ``torch.distributed.checkpoint``, with a manifest, as a save writes them. The
files of the Trainer and of Accelerate beside them are copied. The schedule of the engine becomes the file that both
read. The output is written to a staging folder and renamed, so it is complete or does not exist.
"""

from __future__ import annotations

import datetime
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Final

from hf_fsdp_plugin.checkpoint import names as file_names
from hf_fsdp_plugin.checkpoint.errors import file_problems_inside, problem, raise_if_any, refuse
from hf_fsdp_plugin.checkpoint.formats.known_formats import DEEPSPEED_FILES
from hf_fsdp_plugin.checkpoint.formats.manifest import Manifest
from hf_fsdp_plugin.checkpoint.formats.optimizer_state import unsupported_values
from hf_fsdp_plugin.checkpoint.formats.stored_tensors import StoredModel, StoredTensor, labelled_tensors, shared_tensors
from hf_fsdp_plugin.problems import Problem
from hf_fsdp_plugin.text import format_names, plural
from hf_fsdp_plugin.tools.common import Progress
from hf_fsdp_plugin.tools.convert.deepspeed_files import FORMAT, SavedEngine, read_engines
from hf_fsdp_plugin.tools.merge.merge_plan import MergeStaging, prepare_output
from hf_fsdp_plugin.version import __version__

_BATCH: Final = 1 << 30
"""Bytes of tensors that are in memory at once. A larger tensor is in memory alone."""
_STRATEGIES: Final = ("no_shard", "shard_grad_op", "shard_grad_op", "full_shard")
"""Stage of ZeRO -> the sharding strategy that does the same."""
_OF_DEEPSPEED: Final = (
    DEEPSPEED_FILES, "*_optim_states.pt", "latest*", "zero_to_fp32.py", f"{file_names.HF_MODEL}*.safetensors*",
    f"{file_names.HF_MODEL_BIN}*.bin*",
)  # fmt: skip
"""Files that are not copied: the tensors, and what only DeepSpeed reads."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ConvertedCheckpoint:
    """The result of a conversion.

    Attributes:
        dialect: what wrote the source: ``deepspeed``, or the name of its format.
        step: number of optimizer steps; ``None`` for a model without a training.
        world_size: number of ranks that wrote the checkpoint.
        num_tensors, num_bytes: tensors of all models and optimizers, and their bytes.
        copied: the other files.
        problems: warnings about states that the checkpoint lacks.
    """

    dialect: str = FORMAT
    out: Path
    step: int | None
    world_size: int
    num_tensors: int
    num_bytes: int
    copied: tuple[str, ...]
    problems: tuple[Problem, ...]

    def to_json(self) -> dict[str, Any]:
        facts = {"step": self.step, "world_size": self.world_size, "copied": list(self.copied)}
        facts |= {"num_tensors": self.num_tensors, "num_bytes": self.num_bytes}
        return {"dialect": self.dialect, "path": str(self.out), **facts}


def convert_checkpoint(source: Path, out: Path, *, force: bool, progress: Progress) -> ConvertedCheckpoint:
    """Write the checkpoint of DeepSpeed in ``source`` to the folder ``out``, from which a run with FSDP resumes.

    Args:
        force: replace an existing output folder.

    Raises:
        CheckpointError: the checkpoint is damaged, incomplete or unsupported, or ``out`` is in use or on a disk that is
            too small. ``out`` is then unchanged.
        OSError: writing failed. ``out`` is then unchanged.
    """
    out = prepare_output(out, [source], force=force, is_complete=True)
    engines = read_engines(source)
    if not engines:
        fix = "Give the folder of a checkpoint of DeepSpeed, or a config."
        refuse("FSDP-E451", source, "contains no files of DeepSpeed.", fix)
    stored = [each for engine in engines for each in (engine.model, engine.optimizer) if each is not None]
    tensors = [tensor for each in stored for _, tensor in labelled_tensors(each)]
    num_bytes = sum(tensor.num_bytes for tensor in tensors)
    copied, step = _files_to_copy(source), _number(engines[0], "global_steps")
    with MergeStaging(out) as staging:
        progress("convert", 0, num_bytes)
        for name in copied:
            shutil.copyfile(source / name, staging.folder / name)
        problems = [*_write_schedules(source, engines, staging.folder, step), *_missing_states(source, engines, copied)]
        write_states(engines, staging.folder, _manifest(engines[0]), progress, num_bytes)
        staging.commit()
    return ConvertedCheckpoint(
        out=out,
        step=step,
        world_size=_number(engines[0], "dp_world_size"),
        num_tensors=len(tensors),
        num_bytes=num_bytes,
        copied=tuple(copied),
        problems=tuple(problems),
    )


def _files_to_copy(source: Path) -> list[str]:
    """Return the files beside the tensors: config, tokenizer, state of the Trainer, random states.

    Raises:
        CheckpointError: a file is a link out of the folder.
    """
    files = sorted(path.name for path in source.iterdir() if path.is_file())
    names = [name for name in files if not any(fnmatch(name, pattern) for pattern in _OF_DEEPSPEED)]
    raise_if_any(file_problems_inside(source, names, source))
    return names


def _write_schedules(source: Path, engines: Sequence[SavedEngine], folder: Path, step: int) -> Iterator[Problem]:
    """Write the schedules of the engines that have no files yet. Yields a warning for others than torch's."""
    import torch

    is_trainers = (folder / file_names.TRAINER_STATE).is_file()
    for number, engine in enumerate(engines):
        name = file_names.numbered_from_one("scheduler", number)
        path = folder / (file_names.TRAINER_SCHEDULE if is_trainers else f"{name}.bin")
        if path.exists():
            continue
        saved = engine.values.get("lr_scheduler")
        if not isinstance(saved, dict) or "last_epoch" not in saved or unsupported_values(saved):
            steps = step - _number(engine, "skipped_steps")
            message = f"has no schedule of torch: that of the resumed run continues after {plural(steps, 'step')}."
            yield problem("FSDP-W415", source, message, "Compare the learning rate with that of the saved run.")
            saved = {"last_epoch": steps, "_step_count": steps + 1, "lr_lambdas": []}
        torch.save(saved, path)


def _missing_states(source: Path, engines: Sequence[SavedEngine], copied: Sequence[str]) -> Iterator[Problem]:
    """Yield warnings about optimizers that cannot be read, and about random states of other ranks."""
    for engine in engines:
        if objects := engine.model.objects:
            message = f"has entries that are not tensors and are not converted: {format_names(objects, 3)}."
            yield problem("FSDP-W415", source, message, "Set them in the script after the model was loaded.")
        if engine.why_no_optimizer:
            message = f"has an optimizer whose state is not converted: {engine.why_no_optimizer}."
            fix = "Start with a new optimizer, or resume with DeepSpeed and save with ZeRO 1."
            yield problem("FSDP-W415", source, message, fix)
    world_size = _number(engines[0], "dp_world_size")
    stems = (file_names.TRAINER_RNG, file_names.ACCELERATE_RNG)
    found = sum(name.startswith(stems) for name in copied)
    if found != world_size:
        saved = f"the random states of {plural(found, 'rank')}" if found else "no random states"
        message = f"has {saved}, but {plural(world_size, 'rank')} wrote it: dropout and other random operations of the "
        yield problem("FSDP-W415", source, f"{message}resumed run differ from those of the uninterrupted one.")


def _manifest(engine: SavedEngine) -> Manifest:
    """Return the manifest without files."""
    zero = (engine.values.get("ds_config") or {}).get("zero_optimization") or {}
    stage = zero.get("stage", 0) if isinstance(zero, dict) else 0
    strategy = _STRATEGIES[stage] if stage in range(len(_STRATEGIES)) else "full_shard"
    world_size, version = _number(engine, "dp_world_size"), engine.values.get("ds_version")
    versions = {FORMAT: version} if isinstance(version, str) else {}
    return manifest_without_files(
        engine.model, FORMAT, strategy, world_size, step=_number(engine, "global_steps"), versions=versions
    )


def manifest_without_files(
    model: StoredModel, backend: str, strategy: str, world_size: int, *, step: int | None, versions: Mapping[str, str]
) -> Manifest:
    """Return the manifest of a converted checkpoint without files.

    Args:
        backend: what has written ``model``.
        strategy: the sharding strategy with which ``world_size`` ranks did.
        versions: those of the libraries that did.
    """
    return Manifest(
        kind="sharded",
        backend=backend,
        world_size=world_size,
        mesh={"replicate": 1, "shard": world_size},
        strategy=strategy,
        step=step,
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        versions={"hf_fsdp_plugin": __version__, **versions},
        settings={},
        parameters={name: (tensor.dtype, tensor.shape) for name, tensor in model.tensors.items()},
        ties=tuple(shared_tensors(model)),
        files=(),
        batch={},
    )


def _number(engine: SavedEngine, key: str) -> int:
    value = engine.values.get(key)
    return value if type(value) is int and value >= 0 else 0


def write_states(
    engines: Sequence[SavedEngine], folder: Path, manifest: Manifest, progress: Progress, total: int
) -> None:
    """Write models and optimizers, a file for each batch of tensors, and the manifest.

    Args:
        total: bytes of all tensors.
    """
    from hf_fsdp_plugin.checkpoint.checking.hashes import files_of_checkpoint
    from hf_fsdp_plugin.checkpoint.saved_state import ModelShards, OptimizerShards, whole_shard
    from hf_fsdp_plugin.checkpoint.writing.file_parts import PartWriter
    from hf_fsdp_plugin.checkpoint.writing.staging_folder import RankRecord, complete_checkpoint
    from hf_fsdp_plugin.checkpoint.writing.state_files import optimizer_files, sharded_model_files
    from hf_fsdp_plugin.tools.loaded_weights import read_tensor

    writer, records = PartWriter(), []

    def write(state: Any, tensors: Iterable[StoredTensor]) -> None:
        records.append(RankRecord(tuple(writer.write(folder, state.parts)), state.entries))
        progress("convert", sum(tensor.num_bytes for tensor in tensors), total)

    def shard(files: Any, label: str, value: Any) -> Any:
        """Return the elements of a tensor; another value as it is."""
        return whole_shard(label, read_tensor(files, value)) if isinstance(value, StoredTensor) else value

    for number, engine in enumerate(engines):
        model, optimizer = engine.model, engine.optimizer
        aliases = {alias: first for first, *others in shared_tensors(model) for alias in others}
        own = {name: tensor for name, tensor in model.tensors.items() if name not in aliases}
        with files_of_checkpoint(model.root, model, verify=True) as files:
            for rank, batch in enumerate(_batches(own, lambda tensor: [tensor])):
                shards = tuple(shard(files, name, tensor) for name, tensor in batch.items())
                ties = {alias: name for alias, name in aliases.items() if name in batch}
                write(sharded_model_files(ModelShards(shards, ties), number, rank), batch.values())
            if optimizer is None:
                continue
            for rank, batch in enumerate(_batches(optimizer.state, _tensors_of)):
                state = {
                    name: {key: shard(files, f"state.{name}.{key}", value) for key, value in entry.items()}
                    for name, entry in batch.items()
                }
                groups = tuple(optimizer.groups) if rank == 0 else ()
                tensors = [tensor for entry in batch.values() for tensor in _tensors_of(entry)]
                write(optimizer_files(OptimizerShards(state, groups), number, rank), tensors)
    complete_checkpoint(folder, records, manifest)


def _tensors_of(entry: Mapping[str, Any]) -> list[StoredTensor]:
    return [value for value in entry.values() if isinstance(value, StoredTensor)]


def _batches(
    values: Mapping[str, Any], tensors_of: Callable[[Any], Iterable[StoredTensor]]
) -> Iterator[dict[str, Any]]:
    """Divide values by name into batches with about ``_BATCH`` bytes of tensors; at least one, which may be empty."""
    batch: dict[str, Any] = {}
    size = 0
    for name, value in values.items():
        added = sum(tensor.num_bytes for tensor in tensors_of(value))
        if batch and size + added > _BATCH:
            yield batch
            batch, size = {}, 0
        batch[name] = value
        size += added
    yield batch
