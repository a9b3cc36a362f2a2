"""Reads checkpoints of DeepSpeed: ZeRO 0 to 3 with a file for each rank, and universal checkpoints.

A folder contains a folder for each tag (``global_step30``), and names the last one in the file ``latest``. The stage
decides how tensors are stored, as DeepSpeed's ``zero_to_fp32.py`` and ``ds_to_universal.py`` read them:

- Stages 1 and 2: the parameters of each group of the optimizer are one vector, in the order of ``param_shapes``. Each
  rank has the next part of its fp32 weights, and the same part of each state of the optimizer.
- Stage 3: each rank has a part of each parameter, and its vector consists of these parts. The last part of a parameter
  is padded. The parts of frozen parameters are in the files of the model.
- A universal checkpoint has a folder for each parameter, with a file for its fp32 weights and for each state.

Everything else (buffers, frozen parameters of stages 1 and 2, all weights without ZeRO) is in the file of the model.
"""

from __future__ import annotations

import math
import re
import reprlib
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

from hf_fsdp_plugin.checkpoint import errors
from hf_fsdp_plugin.checkpoint.file_io import read_range
from hf_fsdp_plugin.checkpoint.formats import boxes, stored_tensors
from hf_fsdp_plugin.checkpoint.formats.known_formats import DEEPSPEED_FILES
from hf_fsdp_plugin.checkpoint.formats.pickles import PickledTensor
from hf_fsdp_plugin.checkpoint.formats.torch_files import open_archive, stored_values
from hf_fsdp_plugin.checkpoint.names import HF_MODEL_BIN, MANIFEST_NAME, numbered_from_one
from hf_fsdp_plugin.problems import CheckpointError
from hf_fsdp_plugin.text import format_names

FORMAT = "deepspeed"
LATEST = ("latest", "latest_universal")
"""The files that name the tag of the last save, and that of the last conversion to a universal checkpoint."""
_MODEL = re.compile(r"(?:zero_pp_rank_(\d{1,7})_)?mp_rank_00_model_states\.pt")
_OPTIMIZER = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d{1,7})_mp_rank_00_optim_states\.pt")
_OTHER_AXES = re.compile(r"layer_\d+.*\.pt|expp_rank_\d+.*\.pt|.*mp_rank_(?!00_)\d+.*\.pt")
_UNIVERSAL = "zero"
_WEIGHTS = "fp32"
_NO_HYPERPARAMETERS = ("params", "step", "bias_correction", "name")
"""Entries of DeepSpeed's parameter groups that groups of torch's optimizers do not have."""
_MAX_PADDING = 64
"""Maximum number of elements per rank by which stages 1 and 2 pad a vector. The versions up to 0.19 pad by up to 2."""
Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedEngine:
    """What one engine of DeepSpeed has saved.

    Attributes:
        optimizer: ``None`` if there is none, or if it has no names.
        why_no_optimizer: why an optimizer that is there is not read; empty otherwise.
        values: what is saved beside the tensors, such as ``global_steps`` and ``lr_scheduler``.
    """

    model: stored_tensors.StoredModel
    optimizer: stored_tensors.StoredOptimizer | None = None
    why_no_optimizer: str = ""
    values: Mapping[str, Any] = field(default_factory=dict)


def read_engines(root: Path) -> list[SavedEngine]:
    """Return what each engine has saved in a checkpoint, which is empty for another folder. No tensor is read.

    Raises:
        CheckpointError: files are missing, damaged or unsafe to read, or the model has other axes than data
            parallelism.
    """
    engines: list[SavedEngine] = []
    while (folder := tag_folder(root, len(engines))) is not None and not (engines and folder == root):
        engines.append(_read_engine(root, folder))
    return engines


def _read_engine(root: Path, folder: Path) -> SavedEngine:
    checkpoint = _Checkpoint(root, folder)
    reason, entries = "", dict[tuple[Any, ...], Any]()
    with _parsing(folder):
        weights = checkpoint.weights()
        try:
            entries = checkpoint.optimizer()
        except _OptimizerWithoutNames as error:
            reason = str(error)
    files = tuple(checkpoint.files)
    state = stored_tensors.StoredState(weights, files, folder, errors.COPY_ALL_RANKS)
    model, optimizer = state.checked(state.as_model(root, FORMAT)), None
    if entries:
        state = stored_tensors.StoredState(entries, files, folder, errors.COPY_ALL_RANKS)
        optimizer = state.checked(state.as_optimizer(root, FORMAT))
    return SavedEngine(model=model, optimizer=optimizer, why_no_optimizer=reason, values=checkpoint.engine)


def tag_folder(root: Path, number: int = 0) -> Path | None:
    """Return the folder with DeepSpeed's files: ``root`` itself, or that of a tag in it. ``None`` if there is none.

    Args:
        number: index of the model; Accelerate has a tag for each of several models.

    Raises:
        CheckpointError: the tag of the last save does not exist, or there are several tags and none is named.
    """
    if (root / MANIFEST_NAME).is_file():  # this package has written another checkpoint into the folder
        return None
    for folder in (root, root / numbered_from_one(HF_MODEL_BIN, number)):
        if any(folder.glob(DEEPSPEED_FILES)):
            return folder
    if number:
        return None
    tags = sorted({path.parent for path in root.glob(f"*/{DEEPSPEED_FILES}")})
    found = f"It contains {format_names([tag.name for tag in tags])}." if tags else "It contains no other tag."
    named = next((root / name for name in LATEST if (root / name).is_file()), None)
    if named is None and len(tags) > 1:
        message = f"has several checkpoints of DeepSpeed, and no file {LATEST[0]!r} that names one. {found}"
        errors.refuse("FSDP-E414", root, message, f"Give the folder of one of them: {tags[-1]}.")
    if named is None:
        return tags[0] if tags else None
    tag = read_range(named, 0, errors.MAX_PATH).decode(errors="replace").strip()
    if (outside := errors.name_problem(tag, named)) is not None:
        raise CheckpointError([outside])
    if root / tag in tags:
        return root / tag
    if not tags and any(any(root.glob(pattern)) for pattern in ("*.safetensors", "*.bin")):
        return None  # only the weights for `from_pretrained` were kept
    fix = f"Copy the folder {tag!r} with the files of all ranks, or give the folder of another tag."
    errors.refuse("FSDP-E414", named, f"names {tag!r}, which has no files of DeepSpeed in {root}. {found}", fix)


@contextmanager
def _parsing(place: Path) -> Iterator[None]:
    """Raise ``CheckpointError`` if the block fails because a file is not in the form that DeepSpeed writes."""
    try:
        yield
    except (AttributeError, KeyError, TypeError, ValueError, IndexError, ArithmeticError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        message = f"is not in the form that DeepSpeed writes ({type(error).__name__}: {str(error)[:200]})."
        errors.refuse("FSDP-E453", place, message)


class _Vector(NamedTuple):
    """A contiguous tensor in the file of one rank."""

    file: str
    offset: int
    numel: int
    dtype: str


class _RankFiles:
    """A file of each rank. Its pickle is read with the first of its tensors.

    Attributes:
        files: the files in the order of the ranks, relative to ``root``.

    Args:
        tensors: (contents of a file) -> its tensors by name.
    """

    def __init__(self, root: Path, files: Sequence[str], tensors: Callable[[Any], Mapping[str, Any]]) -> None:
        self.root, self.files, self._tensors = root, files, tensors
        self._vectors: dict[int, dict[str, _Vector]] = {}

    def vector(self, rank: int, name: str) -> _Vector:
        """Return a tensor of a rank."""
        file = self.files[rank]
        if rank not in self._vectors:
            archive, value = open_archive(self.root, file)
            with _parsing(self.root / file):
                self._vectors[rank] = {
                    each: _Vector(file, archive.tensor_offset(tensor), math.prod(tensor.shape), tensor.dtype)
                    for each, tensor in self._tensors(value).items()
                    if isinstance(tensor, PickledTensor) and boxes.is_row_major(tensor.strides, tensor.shape)
                }
        if name not in self._vectors[rank]:
            errors.refuse("FSDP-E459", self.root / file, f"does not contain {name}.", errors.COPY_ALL_RANKS)
        return self._vectors[rank][name]


def _vectors(contents: Any) -> dict[str, Any]:
    """Return the vectors in the file of an optimizer: the fp32 weights of each group, and each state."""
    optimizer = contents["optimizer_state_dict"]
    groups = optimizer["fp32_flat_groups" if "fp32_flat_groups" in optimizer else "single_partition_of_fp32_groups"]
    states = _inner(optimizer)["state"] if isinstance(_inner(optimizer), dict) else {}
    found = {_vector_name(_WEIGHTS, number): tensor for number, tensor in enumerate(groups)}
    for number, state in states.items():
        found |= {_vector_name(key, number): value for key, value in state.items()}
    return found


def _vector_name(key: str, number: int) -> str:
    return f"{key} of group {number}"


def _inner(optimizer: Mapping[str, Any]) -> Any:
    """Return the state dict of torch's optimizer inside that of DeepSpeed."""
    return optimizer.get("optimizer_state_dict") or optimizer.get("base_optimizer_state") or optimizer


class _Checkpoint:
    """The files of one tag. Those of rank 0 are read here, and those of other ranks with the first of their tensors.

    Attributes:
        engine: the contents of the first file of the model, without its tensors.
        files: the files that were read here, relative to the root.
    """

    def __init__(self, root: Path, folder: Path) -> None:
        self._root, self._folder = root, folder
        self._prefix = "" if folder == root else f"{folder.relative_to(root).as_posix()}/"
        names = sorted(path.name for path in folder.iterdir())
        if others := [name for name in names if _OTHER_AXES.fullmatch(name)]:
            self._refuse_axes(others)
        model_files = self._of_ranks(names, _MODEL)
        if not model_files:
            message = f"has no file of the model whose name is as DeepSpeed writes it ({DEEPSPEED_FILES})."
            errors.refuse("FSDP-E453", folder, message)
        self._is_stage3 = "zero_pp_rank_" in model_files[0]
        self._is_universal = (folder / _UNIVERSAL).is_dir()
        self._model_ranks = _RankFiles(root, model_files, lambda state: state["frozen_param_fragments"] or {})
        self._ranks = _RankFiles(root, self._of_ranks(names, _OPTIMIZER), _vectors)
        self.files = [model_files[0]]
        archive, self.engine = open_archive(root, model_files[0])
        with _parsing(root / model_files[0]):
            self._module: dict[str, Any] = stored_values(model_files[0], archive, self.engine.pop("module"))
            degrees = {"mp_world_size": self.engine.get("mp_world_size")}
            degrees |= self.engine.get("checkpoint_parallel_dimensions") or {}
            others = [f"{name} {degree}" for name, degree in degrees.items() if degree not in (None, 1)]
            others += [key for key in ("ds_autoep_layers", "autoep_layers") if self.engine.get(key) is not None]
            self._shapes = [_checked_shapes(shapes) for shapes in self.engine.get("param_shapes") or []]
        if others:
            self._refuse_axes(others)
        self._optimizer: dict[str, Any] = {}
        if self._shapes:
            with _parsing(root / model_files[0]):
                self._read_optimizer()

    def weights(self) -> dict[tuple[Any, ...], Any]:
        """Return the entries of the model's state dict, in its order."""
        divided = {**self._trained(), **self._frozen()}
        shared = self.engine.get("shared_params") or {}
        found: dict[tuple[Any, ...], Any] = {}
        for name, value in self._module.items():
            owner = name if name in divided else shared.get(name)
            is_empty = isinstance(value, stored_tensors.StoredTensor) and 0 in value.shape
            if owner in divided:
                found[name,] = divided[owner]
            elif not is_empty or name in self.engine["buffer_names"]:
                found[name,] = value  # stage 3 has empty tensors in place of divided parameters
        return found | {(name,): tensor for name, tensor in divided.items() if (name,) not in found}

    def optimizer(self) -> dict[tuple[Any, ...], Any]:
        """Return the state dict of the optimizer. Without ZeRO, parameters are numbered."""
        if not self._shapes:
            return self._plain_optimizer()
        inner = _inner(self._optimizer)
        if not isinstance(inner, dict):
            raise _OptimizerWithoutNames("it was saved with 'elastic_checkpoint', which omits the parameter groups")
        state: dict[str, dict[str, Any]] = {name: {} for name in chain.from_iterable(self._shapes)}
        for number, entry in inner.get("state", {}).items():
            for key, value in entry.items():
                if not isinstance(value, PickledTensor) or not value.shape:
                    common = stored_values(*self._first, value)
                    values = dict.fromkeys(self._shapes[number], common)
                else:  # that of a universal checkpoint is only the part of rank 0
                    values = {} if self._is_universal else self._of_group(key, number)
                for name, stored in values.items():
                    state[name][key] = stored
        groups = []
        for group in inner["param_groups"]:
            names = [name for number in group["params"] for name in self._shapes[number]]
            for name in names:
                state[name] |= self._of_parameter(name) if self._is_universal else {}
                if state[name] and "step" in group:  # as early versions of FusedAdam
                    state[name].setdefault("step", group["step"])
            plain = {key: value for key, value in group.items() if key not in _NO_HYPERPARAMETERS}
            groups.append({**stored_values(*self._first, plain), "params": names})
        return {(): {"state": {name: entry for name, entry in state.items() if entry}, "param_groups": groups}}

    def _plain_optimizer(self) -> dict[tuple[Any, ...], Any]:
        stored = self.engine.get("optimizer")
        if stored and "fp32_groups_flat" in stored:
            raise _OptimizerWithoutNames("the fp32 weights of 16-bit weights without ZeRO are stored without names")
        file = self._model_ranks.files[0]
        return {(): stored_values(file, open_archive(self._root, file)[0], stored)} if stored else {}

    def _read_optimizer(self) -> None:
        """Read the file that describes the optimizer, and check that the files of all ranks are there."""
        if not self._ranks.files and not self._is_universal:
            like = "zero_pp_rank_0_mp_rank_00_optim_states.pt"
            self._check_ranks((), _size(self.engine.get("dp_world_size", 1)), like)
        file = f"{self._prefix}{_UNIVERSAL}/optimizer_state.pt" if self._is_universal else self._ranks.files[0]
        archive, value = open_archive(self._root, file)
        self._first = file, archive
        self.files.append(file)
        with _parsing(self._root / file):
            self._optimizer = value if self._is_universal else value["optimizer_state_dict"]
            count = self._optimizer["partition_count"]
            count = _size(max(count) if isinstance(count, list) else count)
        model_files = self._model_ranks.files if self._is_stage3 else []
        for files in filter(None, (self._ranks.files, model_files)):
            self._check_ranks(range(len(files)), count, files[0])
            if len(files) > count:
                message = f"has files of {len(files)} ranks, but {count} ranks have written the checkpoint."
                fix = "Move the files of the other checkpoint to another folder, or copy this one again."
                errors.refuse("FSDP-E459", self._folder, message, fix)

    def _trained(self) -> dict[str, stored_tensors.StoredTensor]:
        """Return the fp32 weights of the parameters that the optimizer updates."""
        found: dict[str, stored_tensors.StoredTensor] = {}
        for number, shapes in enumerate(self._shapes):
            if self._is_universal:
                found |= {name: self._in_own_file(name, _WEIGHTS, shape) for name, shape in shapes.items()}
            else:
                found |= self._of_group(_WEIGHTS, number)
        return found

    def _frozen(self) -> dict[str, stored_tensors.StoredTensor]:
        """Return the frozen parameters of stage 3."""
        shapes = _checked_shapes(self.engine.get("frozen_param_shapes") or {}) if self._is_stage3 else {}
        count = len(self._model_ranks.files)
        return {
            name: _divided(self._model_ranks, name, name, shape, -(-math.prod(shape) // count))
            for name, shape in shapes.items()
        }

    def _of_group(self, key: str, number: int) -> dict[str, stored_tensors.StoredTensor]:
        """Return the weights or one state of a group of parameters, by parameter."""
        name, count = _vector_name(key, number), len(self._ranks.files)
        vector = self._ranks.vector(0, name)
        paddings = self._optimizer.get("param_alignment_paddings")
        found: dict[str, stored_tensors.StoredTensor] = {}
        begin = 0
        for index, (parameter, shape) in enumerate(self._shapes[number].items()):
            numel = math.prod(shape)
            if self._is_stage3:
                size = -(-numel // count)
                found[parameter] = _divided(self._ranks, name, parameter, shape, size, start=begin)
                begin += size
            else:
                found[parameter] = _divided(self._ranks, name, parameter, shape, vector.numel, shift=begin)
                begin += numel + (_size(paddings[number][index]) if paddings else 0)
        available = vector.numel * (1 if self._is_stage3 else count)
        if not begin <= available <= begin + (0 if self._is_stage3 else _MAX_PADDING * count):
            message = f"has {available:,} elements of {name}; the parameters of the group need {begin:,}."
            errors.refuse("FSDP-E459", self._root / vector.file, message, errors.COPY_ALL_RANKS)
        return found

    def _of_parameter(self, name: str) -> dict[str, Any]:
        """Return the states of a parameter in a universal checkpoint."""
        shape = next(shapes[name] for shapes in self._shapes if name in shapes)
        found = sorted(path.stem for path in (self._folder / _UNIVERSAL / name).glob("*.pt"))
        return {key: self._in_own_file(name, key, shape) for key in found if key != _WEIGHTS}

    def _in_own_file(self, name: str, key: str, shape: Shape) -> Any:
        """Return a value of a universal checkpoint. The tensors of stage 3 are stored without a shape."""
        file = f"{self._prefix}{_UNIVERSAL}/{name}/{key}.pt"
        archive, value = open_archive(self._root, file)
        self.files.append(file)
        value = value["param"] if isinstance(value, dict) else value
        if not isinstance(value, PickledTensor) or (not value.shape and key != _WEIGHTS):
            return stored_values(file, archive, value)
        if math.prod(value.shape) != math.prod(shape) or not boxes.is_row_major(value.strides, value.shape):
            message = f"has a tensor of shape {list(value.shape)}; {list(shape)} was expected."
            errors.refuse("FSDP-E459", self._root / file, message)
        return stored_tensors.tensor_in_file(name, value.dtype, shape, file, archive.tensor_offset(value))

    def _of_ranks(self, names: Iterable[str], pattern: re.Pattern[str]) -> list[str]:
        """Return the files whose names match, in the order of their ranks."""
        found: dict[int, str] = {}
        for name in names:
            if match := pattern.fullmatch(name):
                rank = int(match[1] or 0)
                if rank in found:
                    files = f"{found[rank]}, {name}"
                    message = f"has two files of rank {rank}, which are of different checkpoints: {files}."
                    fix = "Move the files of the other checkpoint to another folder."
                    errors.refuse("FSDP-E459", self._folder, message, fix)
                found[rank] = name
        if found:
            self._check_ranks(found, max(found) + 1, next(iter(found.values())))
        return [self._prefix + found[rank] for rank in sorted(found)]

    def _check_ranks(self, found: Container[int], count: int, like: str) -> None:
        """Check that the ranks below ``count`` have a file with a name such as ``like``."""
        missing = islice((rank for rank in range(count) if rank not in found), stored_tensors.MAX_PROBLEMS)
        files = [self._folder / re.sub(r"pp_rank_\d+", f"pp_rank_{rank}", Path(like).name) for rank in missing]
        message = f"is missing; {count} ranks have written the checkpoint."
        errors.raise_if_any([errors.problem("FSDP-E457", file, message, errors.COPY_ALL_RANKS) for file in files])

    def _refuse_axes(self, found: Sequence[str]) -> None:
        message = "has a model that was divided by tensor or pipeline parallelism, or by experts"
        fix = "Load it with DeepSpeed in the world that wrote it, and save whole weights with save_16bit_model."
        errors.refuse("FSDP-E413", self._folder, f"{message}: {format_names(found, 3)}.", fix)


class _OptimizerWithoutNames(Exception):
    """The state of an optimizer is stored without what maps it to parameters; the text is the reason."""


def _divided(
    ranks: _RankFiles, vector: str, name: str, shape: Shape, size: int, *, shift: int = 0, start: int = 0
) -> stored_tensors.StoredTensor:
    """Return a tensor whose elements are divided over the ranks, in their order and without regard to the shape.

    Rank ``r`` has the elements from ``r * size - shift`` on, ``size`` at most, at ``start`` in its vector ``vector``.
    """
    size, numel, dtype = max(size, 1), math.prod(shape), ranks.vector(0, vector).dtype
    pieces = []
    for rank in range(shift // size, -(-(numel + shift) // size)) if numel else ():
        begin, end = max(0, rank * size - shift), min(numel, (rank + 1) * size - shift)
        found, at = ranks.vector(rank, vector), start + begin + shift - rank * size
        if found.dtype != dtype or at + end - begin > found.numel:
            message = f"has {found.numel:,} elements of {vector} in {found.dtype}; "
            message += f"{at + end - begin:,} in {dtype} were expected."
            errors.refuse("FSDP-E459", ranks.root / found.file, message, errors.COPY_ALL_RANKS)
        offset = found.offset + at * stored_tensors.SIZES[dtype]
        for run in boxes.flat_range(shape, begin, end):
            pieces.append(stored_tensors.StoredPiece(run, found.file, offset, boxes.row_major(run.sizes)))
            offset += run.numel * stored_tensors.SIZES[dtype]
    return stored_tensors.StoredTensor(name, dtype, shape, tuple(pieces))


def _checked_shapes(shapes: Mapping[str, Any]) -> dict[str, Shape]:
    """Return name -> shape. Raises ``TypeError`` or ``ValueError`` for other values."""
    if not all(isinstance(name, str) for name in shapes):
        raise TypeError("a name of a parameter that is not a text")
    return {name: tuple(_size(size) for size in shape) for name, shape in shapes.items()}


def _size(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{reprlib.repr(value)} is not a size")
    return value
