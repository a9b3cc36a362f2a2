"""Loads a checkpoint of any format into a live model. Each rank reads only its own shards.

The stored tensors (:mod:`hf_fsdp_plugin.checkpoint.formats.table`) and the rank's shards
(:mod:`hf_fsdp_plugin.checkpoint.shards`) are both described by boxes of whole tensors. So a checkpoint can be loaded
with another world size, mesh or FSDP version. The ranks communicate only to check that no rank failed.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from hf_fsdp_plugin.backends.agreement import broadcast_object, on_all_ranks
from hf_fsdp_plugin.backends.buffers import persistent_buffers
from hf_fsdp_plugin.backends.pinned_windows import PinnedWindows, wait_for_reads
from hf_fsdp_plugin.checkpoint.checking.verified_files import check_headers, files_of_checkpoint
from hf_fsdp_plugin.checkpoint.folders import check_visible
from hf_fsdp_plugin.checkpoint.formats.boxes import intersect, row_major, slices, span, whole
from hf_fsdp_plugin.checkpoint.formats.safetensors import read_safetensors_model
from hf_fsdp_plugin.checkpoint.formats.stored import StoredModel, StoredTensor
from hf_fsdp_plugin.checkpoint.formats.table import read_stored_model
from hf_fsdp_plugin.checkpoint.io import MAX_SPAN, InputFiles, object_in
from hf_fsdp_plugin.checkpoint.names import index_file, safetensors_file
from hf_fsdp_plugin.checkpoint.shards import ModelShards, Piece, model_shards
from hf_fsdp_plugin.plan.names import unwrapped
from hf_fsdp_plugin.problems import CheckpointError, Origin, Problem
from hf_fsdp_plugin.progress import progress_bar
from hf_fsdp_plugin.text import format_names, plural


@dataclass(frozen=True, slots=True)
class Transfer:
    """A box of elements in a file, and the tensor into which they are read.

    Attributes:
        offset: byte offset of the first element in the file.
        strides: strides in the file, in elements.
        dtype: dtype in the file. The elements are cast to the dtype of ``into``.
        into: a tensor with the shape of the box, on any device.
    """

    file: str
    offset: int
    strides: tuple[int, ...]
    dtype: torch.dtype
    into: torch.Tensor


def transfers(stored: StoredTensor, pieces: Iterable[Piece]) -> Iterator[Transfer]:
    """Yield the transfers that fill ``pieces`` from ``stored``, which may be sharded differently."""
    dtype = getattr(torch, stored.dtype)
    for piece in pieces:
        for source in stored.within(piece.box):
            common = intersect(piece.box, source.box)
            if common is None:
                continue
            starts = (part.start for part in slices(common, source.box))
            first = sum(start * stride for start, stride in zip(starts, source.strides, strict=True))
            into = piece.tensor[slices(common, piece.box)]
            yield Transfer(source.file, source.offset + first * dtype.itemsize, source.strides, dtype, into)


@torch.no_grad()
def fill(files: InputFiles, work: Iterable[Transfer]) -> None:
    """Execute all transfers in the order of their bytes in the files.

    Data is read directly into contiguous CPU memory, through a buffer of at most ``MAX_SPAN`` bytes otherwise. Copies
    to an accelerator are asynchronous; later operations of the current stream see the data.

    Raises:
        CheckpointError: a file ends too early, or has other bytes than those that were saved.
    """
    ordered = sorted(work, key=lambda transfer: (transfer.file, transfer.offset))
    total = sum(transfer.into.nbytes for transfer in ordered)
    wait_for_reads(transfer.into for transfer in ordered)
    windows = PinnedWindows()
    with progress_bar("loading", total) as update:
        for transfer in ordered:
            _fill_one(files, windows, transfer.file, transfer.offset, transfer.strides, transfer.dtype, transfer.into)
            update(transfer.into.nbytes)


def _fill_one(
    files: InputFiles,
    windows: PinnedWindows,
    file: str,
    offset: int,
    strides: tuple[int, ...],
    dtype: torch.dtype,
    into: torch.Tensor,
) -> None:
    contiguous = into.is_contiguous() and _is_row_major(strides, into.shape)
    if contiguous and into.dtype == dtype and into.device.type == "cpu":
        files.read(file, offset, _memory(into))
        return
    num_bytes = span(strides, into.shape) * dtype.itemsize
    if num_bytes <= MAX_SPAN:
        pinned = into.device.type != "cpu"
        buffer = windows.take(num_bytes) if pinned else torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
        files.read(file, offset, _memory(buffer))
        into.copy_(buffer.view(dtype).as_strided(into.shape, strides), non_blocking=pinned)
        return
    dim = max((dim for dim, size in enumerate(into.shape) if size > 1), key=lambda dim: strides[dim])
    step = max(1, min(MAX_SPAN // (strides[dim] * dtype.itemsize), into.shape[dim] // 2))
    for start in range(0, into.shape[dim], step):
        part = into.narrow(dim, start, min(step, into.shape[dim] - start))
        _fill_one(files, windows, file, offset + start * strides[dim] * dtype.itemsize, strides, dtype, part)


def _is_row_major(strides: Iterable[int], shape: torch.Size) -> bool:
    return all(
        size == 1 or stride == dense for stride, dense, size in zip(strides, row_major(shape), shape, strict=True)
    )


def _memory(tensor: torch.Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data


Shapes = tuple[tuple[int, ...], tuple[int, ...]]
"""The shape in the model, and the shape in the checkpoint."""


def missing_tensors(checkpoint: Path, names: Collection[str]) -> Iterator[Problem]:
    if names:
        message = f"has no values for {plural(len(names), 'tensor')} of the model: {format_names(names)}."
        yield _problem("FSDP-E421", checkpoint, message)


def unexpected_tensors(checkpoint: Path, names: Collection[str]) -> Iterator[Problem]:
    if names:
        message = f"has {plural(len(names), 'tensor')} that the model does not have: {format_names(names)}."
        yield _problem("FSDP-E422", checkpoint, message)


def different_shapes(checkpoint: Path, shapes: Mapping[str, Shapes]) -> Iterator[Problem]:
    if shapes:
        examples = [f"{name} {list(stored)}, in the model {list(own)}" for name, (own, stored) in shapes.items()]
        message = f"has {plural(len(shapes), 'tensor')} with another shape than in the model: {format_names(examples)}."
        yield _problem("FSDP-E423", checkpoint, message)


def no_optimizer(checkpoint: Path) -> Problem:
    fix = "Resume from a checkpoint with optimizer state (save_only_model: false), or start with a new optimizer."
    return _problem("FSDP-E424", checkpoint, "has no optimizer state.", fix)


def different_groups(checkpoint: Path, own: list[frozenset[str]], saved: list[frozenset[str]]) -> Problem:
    """Return the problem of parameter groups that do not contain the same parameters."""
    here, there = frozenset[str]().union(*own), frozenset[str]().union(*saved)
    found = [f"the optimizer has {_groups(own)}, but the checkpoint has {_groups(saved)}"]
    if here - there:
        found.append(f"not in the checkpoint: {format_names(sorted(here - there))}")
    if there - here:
        found.append(f"only in the checkpoint: {format_names(sorted(there - here))}")
    if here == there:
        split = [name for group in own for name in sorted(group)[:1] if group not in saved]
        found.append(f"the same parameters are grouped differently, such as {format_names(split)}")
    fix = "Create the optimizer with the same trainable parameters and parameter groups as in the run that was saved."
    return _problem("FSDP-E425", checkpoint, f"{'; '.join(found)}.", fix)


def unsupported_state(checkpoint: Path, shapes: Mapping[str, Shapes]) -> Iterator[Problem]:
    """Yield the problem of state tensors that are not laid out like their parameter."""
    if shapes:
        examples = [f"{key} {list(stored)}, parameter {list(own)}" for key, (own, stored) in shapes.items()]
        message = f"has optimizer state that cannot be sharded like its parameters: {format_names(examples)}."
        yield _problem("FSDP-E426", checkpoint, message)


def state_of_other_shards(checkpoint: Path, ranges: Mapping[str, Collection[str]]) -> Iterator[Problem]:
    """Yield the problem of state (quantized, for example) that was saved for other shards than this rank has."""
    if ranges:
        count = plural(max(len(elements) for elements in ranges.values()), "shard")
        names = format_names(list(ranges))
        message = f"has optimizer state that only fits its own {count} per parameter; this rank has others: {names}."
        fix = "Resume with the same FSDP version, strategy and number of ranks, or start with a new optimizer."
        yield _problem("FSDP-E426", checkpoint, message, fix)


def other_quantization(checkpoint: Path, name: str) -> Problem:
    """Return the problem of quantized state that this optimizer would quantize in another way."""
    fix = "Create the optimizer with the settings of the run that was saved (block_size)."
    return _problem("FSDP-E426", checkpoint, f"has quantized optimizer state that differs in {name}.", fix)


def _problem(code: str, checkpoint: Path, message: str, fix: str = "") -> Problem:
    if not fix:
        kind = _model_type(checkpoint)
        fix = f"Load it into the model that was saved{f', a {kind}' if kind else ''}, or load another checkpoint."
    return Problem(code=code, message=message, fix=fix, origin=Origin(source=str(checkpoint)))


def _model_type(checkpoint: Path) -> str:
    """Return the config's model type, such as ``LlamaForCausalLM (llama)``; empty without a config."""
    for folder in (checkpoint, checkpoint.parent):
        if config := object_in(folder / "config.json"):
            classes = config.get("architectures")
            names = [*(classes[:1] if isinstance(classes, list) else ()), config.get("model_type")]
            shown = [str(name) for name in names if name]
            return f"{shown[0]} ({shown[1]})" if len(shown) == 2 else "".join(shown)
    return ""


def _groups(groups: list[frozenset[str]]) -> str:
    sizes = " + ".join(str(len(group)) for group in groups) or "0"
    return f"{plural(len(groups), 'parameter group')} of {sizes} parameters"


class IncompatibleKeys(NamedTuple):
    """The result of ``load_state_dict``, as torch names it."""

    missing_keys: list[str]
    unexpected_keys: list[str]


def load_model(
    model: nn.Module, checkpoint: Path, number: int = 0, *, adapter_only: bool = False, verify: bool = True
) -> IncompatibleKeys:
    """Load the parameters and persistent buffers of a sharded model in place. Collective.

    Args:
        checkpoint: a checkpoint's folder in any format, or the folder of its model.
        number: index of the model in the checkpoint.
        adapter_only: frozen weights may be missing, and keep their values.
        verify: compare the bytes that are read with the hashes of the manifest.

    Returns:
        The names that are missing in the checkpoint (none unless ``adapter_only``), and an empty list of unexpected
        names.

    Raises:
        CheckpointError: files are missing or truncated, elements or tensors are missing, or tensors are unexpected or
            have a different shape. The error contains all problems, and no weight has been changed. Or bytes differ
            from those that were saved; then weights may have been changed.
        SpecError: only some ranks have problems. The message names these ranks.
    """
    on_rank_0 = broadcast_object(checkpoint.exists())
    with on_all_ranks(f"reading {checkpoint}"):
        if on_rank_0:
            check_visible(checkpoint, "reads")
        stored = read_stored_model(checkpoint, number, partial=True)
        files = files_of_checkpoint(checkpoint, stored, verify=verify)
        with files:
            check_headers(files, stored, dist.get_rank(), dist.get_world_size())
    with on_all_ranks(f"comparing {checkpoint} with the model"):
        shards = model_shards(model)
        names = _stored_names(model, shards, adapter_only)
        found = {name: [known for known in names[name] if known in stored.tensors] for name in names}
        missing = [name for name, known in found.items() if not known]
        pairs = [(shard, stored.tensors[found[shard.name][0]]) for shard in shards.tensors if found[shard.name]]
        optional: set[str] = set()
        if adapter_only:
            optional = {shard.name for shard in shards.tensors if shard.frozen}
            optional |= {name for name, _ in persistent_buffers(model)}
        problems = [
            *missing_tensors(checkpoint, [name for name in missing if name not in optional]),
            *unexpected_tensors(checkpoint, _unexpected(model, stored, names)),
            *different_shapes(
                checkpoint,
                {shard.name: (shard.shape, tensor.shape) for shard, tensor in pairs if shard.shape != tensor.shape},
            ),
        ]
        if problems:
            raise CheckpointError(problems)
    with on_all_ranks(f"reading {checkpoint}"), files:
        fill(files, (item for shard, tensor in pairs for item in transfers(tensor, shard.pieces)))
    return IncompatibleKeys(missing, [])


def _stored_names(model: nn.Module, shards: ModelShards, adapter_only: bool) -> dict[str, list[str]]:
    """Return tensor -> its possible names in a checkpoint: its name, tied names, and the names in PEFT's files."""
    names = shards.names()
    if adapter_only:
        for adapter in getattr(unwrapped(model), "peft_config", {}):
            for known in names.values():
                known += [short for name in known if (short := _without_adapter(name, adapter)) != name]
    return names


def _without_adapter(name: str, adapter: str) -> str:
    """Return the name in PEFT's files: ``…q_proj.lora_A.default.weight`` -> ``…q_proj.lora_A.weight``."""
    return re.sub(rf"(\.modules_to_save)?\.{re.escape(adapter)}(?=\.|$)", "", name)


def _unexpected(model: nn.Module, stored: StoredModel, names: dict[str, list[str]]) -> list[str]:
    """Return the stored names that are not in the model, except those that its class ignores (mostly old buffers)."""
    expected = {name for known in names.values() for name in known}
    ignored = getattr(unwrapped(model), "_keys_to_ignore_on_load_unexpected", None) or ()
    return [
        name
        for name in (*stored.tensors, *stored.objects)
        if name not in expected and not any(re.search(pattern, name) for pattern in ignored)
    ]


def load_tensors(shards: ModelShards, checkpoint: Path, stem: str, *, verify: bool = True) -> bool:
    """Fill ``shards`` from ``STEM.safetensors``, or from the files that its index lists. Collective.

    Returns:
        Whether the checkpoint has these files. If not, nothing was loaded.

    Raises:
        CheckpointError: the tensors are not those of the shards, and nothing was loaded; or bytes are damaged.
    """
    name = safetensors_file(stem)
    if not broadcast_object((checkpoint / name).exists() or (checkpoint / index_file(name)).exists()):
        return False
    with on_all_ranks(f"reading {checkpoint}"):
        check_visible(checkpoint, "reads")
        stored = read_safetensors_model(checkpoint, name)
        assert stored is not None, "rank 0 has found the file, and all ranks see the same folder"
        files = files_of_checkpoint(checkpoint, stored, verify=verify)
        with files:
            check_headers(files, stored, dist.get_rank(), dist.get_world_size())
        names = shards.names()
        found = {own: next((n for n in known if n in stored.tensors), None) for own, known in names.items()}
        pairs = [(shard, stored.tensors[at]) for shard in shards.tensors if (at := found[shard.name]) is not None]
        known = {name for each in names.values() for name in each}
        shapes = {held.name: (held.shape, tensor.shape) for held, tensor in pairs if held.shape != tensor.shape}
        problems = [
            *missing_tensors(checkpoint / name, [own for own, at in found.items() if at is None]),
            *unexpected_tensors(checkpoint / name, [at for at in stored.tensors if at not in known]),
            *different_shapes(checkpoint / name, shapes),
        ]
        if problems:
            raise CheckpointError(problems)
    with on_all_ranks(f"reading {checkpoint}"), files:
        fill(files, (item for shard, tensor in pairs for item in transfers(tensor, shard.pieces)))
    return True


@torch.no_grad()
def copy_whole_tensors(state: Mapping[str, Any], shards: ModelShards) -> None:
    """Copy this rank's parts of whole tensors to its shards. No communication.

    Raises:
        ValueError: a tensor is missing or has another shape. Nothing was copied.
    """
    found: dict[str, Any] = {
        own: next((state[name] for name in known if name in state), None) for own, known in shards.names().items()
    }
    shapes = {own: getattr(tensor, "shape", None) for own, tensor in found.items()}
    wrong = [shard.name for shard in shards.tensors if shapes[shard.name] != shard.shape]
    if wrong:
        raise ValueError(f"the state_dict has no tensors with the names and shapes of {format_names(wrong, 3)}.")
    for shard in shards.tensors:
        for piece in shard.pieces:
            piece.tensor.copy_(found[shard.name][slices(piece.box, whole(shard.shape))])
