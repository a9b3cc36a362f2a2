"""Loads what a checkpoint has stored into the shards of this rank, with any world size, mesh and FSDP version.

The lines of :func:`load_stored` are the steps of loading one model or optimizer. The steps of a whole resume are in
``integrations.accelerate.checkpoint_hooks.load_state``. Boxes of whole tensors describe both the stored tensors
(:mod:`hf_fsdp_plugin.checkpoint.formats.stored_tensors`) and the shards
(:mod:`hf_fsdp_plugin.checkpoint.saved_state`), so that each rank reads the intersections of its boxes with the stored
ones. The ranks communicate only to check that no rank failed. :func:`load_model` loads a model this way, and
:mod:`hf_fsdp_plugin.checkpoint.reading.optimizer` an optimizer.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import increment_version

from hf_fsdp_plugin.backends.ranks.agreement import broadcast_object, on_all_ranks
from hf_fsdp_plugin.backends.sharding.buffers import persistent_buffers
from hf_fsdp_plugin.backends.torch_types import PinnedWindows, wait_for_reads
from hf_fsdp_plugin.checkpoint.checking.hashes import check_headers, files_of_checkpoint
from hf_fsdp_plugin.checkpoint.errors import problem, raise_if_any
from hf_fsdp_plugin.checkpoint.file_io import MAX_SPAN, InputFiles
from hf_fsdp_plugin.checkpoint.folders import check_visible
from hf_fsdp_plugin.checkpoint.formats import boxes
from hf_fsdp_plugin.checkpoint.formats.known_formats import read_stored_model
from hf_fsdp_plugin.checkpoint.formats.stored_tensors import Stored, StoredModel, StoredTensor
from hf_fsdp_plugin.checkpoint.saved_state import Piece, model_shards
from hf_fsdp_plugin.messages import progress_bar
from hf_fsdp_plugin.plan.names import unwrapped
from hf_fsdp_plugin.text import format_names, plural

OTHER_MODEL: Final = "Load it into the model that was saved, or load another checkpoint."
"""Remedy for a checkpoint that does not match a model or an optimizer."""
ReadElements = Callable[[InputFiles], None]
"""Reads the elements of stored tensors into the shards of this rank."""


def load_stored(
    checkpoint: Path, into: str, read: Callable[[], Stored], match: Callable[[Stored], ReadElements], *, verify: bool
) -> None:
    """Load a model or an optimizer from a checkpoint of any world. Collective.

    Args:
        into: what is loaded, for messages: ``model``.
        read: returns where the tensors are stored, from headers and metadata.
        match: compares the stored tensors with this rank's shards, and returns the function that reads the elements.
        verify: compare the bytes that are read with the hashes of the manifest.

    Raises:
        CheckpointError, SpecError: some rank has a problem. Nothing has been changed before the last step.
    """
    if broadcast_object(checkpoint.exists()):  # the result of rank 0
        with on_all_ranks(f"reading {checkpoint}"):
            check_visible(checkpoint, "reads")  # another machine may see the folder later
    with on_all_ranks(f"reading {checkpoint}"):
        stored = read()  # names, boxes, files and offsets; of a large checkpoint, from its index
        files = files_of_checkpoint(checkpoint, stored, verify=verify)  # their reads compare hashes of blocks
        with files:
            check_headers(files, stored, dist.get_rank(), dist.get_world_size())  # each rank compares a share
    with on_all_ranks(f"comparing {checkpoint} with the {into}"):
        read_elements = match(stored)  # compares by name, and raises all differences at once
    with on_all_ranks(f"reading {checkpoint}"), files:
        read_elements(files)  # intersects the boxes, and reads them in the order of their bytes


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


def plan_transfers(stored: StoredTensor, pieces: Iterable[Piece]) -> Iterator[Transfer]:
    """Yield the transfers that fill ``pieces`` from ``stored``, which may be sharded differently."""
    dtype = getattr(torch, stored.dtype)
    for piece in pieces:
        for source, common, offset in stored.parts_of(piece.box):
            into = piece.tensor[boxes.relative_slices(common, piece.box)]
            yield Transfer(source.file, offset, source.strides, dtype, into)


@torch.no_grad()
def execute_transfers(files: InputFiles, work: Iterable[Transfer]) -> None:
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
            _execute(files, windows, transfer)
            update(transfer.into.nbytes)


def _execute(files: InputFiles, windows: PinnedWindows, work: Transfer) -> None:
    into, strides, size = work.into, work.strides, work.dtype.itemsize
    contiguous = into.is_contiguous() and boxes.is_row_major(strides, into.shape)
    if contiguous and into.dtype == work.dtype and into.device.type == "cpu":
        files.read(work.file, work.offset, _memory(into))
        increment_version(into)  # torch does not see that its memory has changed
        return
    pinned = into.device.type != "cpu"
    for part in boxes.strided_parts(strides, into.shape, MAX_SPAN // size):
        num_bytes = boxes.element_span(strides, part.sizes) * size
        buffer = windows.take(num_bytes) if pinned else torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
        files.read(work.file, work.offset + sum(map(operator.mul, part.offsets, strides)) * size, _memory(buffer))
        values = buffer.view(work.dtype).as_strided(part.sizes, strides)
        into[boxes.relative_slices(part, boxes.whole_box(into.shape))].copy_(values, non_blocking=pinned)


def _memory(tensor: torch.Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data


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
    missing: list[str] = []

    def match(stored: StoredModel) -> ReadElements:
        fill, absent = _match_model(model, checkpoint, stored, adapter_only=adapter_only)
        missing.extend(absent)
        return fill

    load_stored(checkpoint, "model", lambda: read_stored_model(checkpoint, number), match, verify=verify)
    return IncompatibleKeys(missing, [])


def _match_model(
    model: nn.Module, place: Path, stored: StoredModel, *, adapter_only: bool
) -> tuple[ReadElements, list[str]]:
    """Match the shards with the stored tensors that have one of their names: its own, tied ones, or those of PEFT.

    Args:
        adapter_only: frozen weights and buffers may be missing.

    Returns:
        The function that fills the shards, and the names of those that are not stored.

    Raises:
        CheckpointError: with one problem for each kind of difference, and a few examples of each.
    """
    shards, inner = model_shards(model), unwrapped(model)
    names = shards.names()
    optional: set[str] = set()
    if adapter_only:
        optional = {shard.name for shard in shards.tensors if shard.frozen}
        optional |= {name for name, _ in persistent_buffers(model)}
        for adapter in getattr(inner, "peft_config", {}):
            # Names in PEFT's files: …q_proj.lora_A.default.weight -> …q_proj.lora_A.weight
            pattern = rf"(\.modules_to_save)?\.{re.escape(adapter)}(?=\.|$)"
            for known in names.values():
                known += [short for name in known if (short := re.sub(pattern, "", name)) != name]
    ignored = getattr(inner, "_keys_to_ignore_on_load_unexpected", None) or ()  # mostly old buffers
    found = {own: next((name for name in known if name in stored.tensors), None) for own, known in names.items()}
    pairs = [(shard, stored.tensors[name]) for shard in shards.tensors if (name := found[shard.name]) is not None]
    absent = [own for own, name in found.items() if name is None]
    missing = [name for name in absent if name not in optional]
    expected = {name for known in names.values() for name in known}
    unexpected = [
        name
        for name in (*stored.tensors, *stored.objects)
        if name not in expected and not any(re.search(pattern, name) for pattern in ignored)
    ]
    shapes = [
        f"{shard.name} {list(tensor.shape)}, in the model {list(shard.shape)}"
        for shard, tensor in pairs
        if shard.shape != tensor.shape
    ]
    rows = [
        ("FSDP-E421", missing, f"has no values for {plural(len(missing), 'tensor')} of the model"),
        ("FSDP-E422", unexpected, f"has {plural(len(unexpected), 'tensor')} that the model does not have"),
        ("FSDP-E423", shapes, f"has {plural(len(shapes), 'tensor')} with another shape than in the model"),
    ]
    raise_if_any(
        [problem(code, place, f"{text}: {format_names(wrong)}.", OTHER_MODEL) for code, wrong, text in rows if wrong]
    )

    def fill(files: InputFiles) -> None:
        execute_transfers(files, (item for shard, tensor in pairs for item in plan_transfers(tensor, shard.pieces)))

    return fill, absent
