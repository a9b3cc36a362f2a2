"""Writes the format of ``torch.distributed.checkpoint`` (DCP) without DCP's planner. Any DCP reader can read the files.

Each rank has a file of ``torch.save`` entries. ``.metadata`` maps each entry to a box of a tensor. torch's
planner exchanges plans between all ranks before every save. Here each rank writes its shards, and rank 0 joins the
ranks' lists of entries when it commits the checkpoint. Checked against torch 2.13.0
(``distributed/checkpoint/filesystem.py``).

With 1,024 ranks and AdamW, ``.metadata`` describes millions of chunks. Creating and pickling torch's objects for them
takes minutes under the GIL. Here one chunk of a tensor is pickled, with placeholders instead of its numbers, and numpy
repeats its bytes with the numbers of all chunks.
"""

from __future__ import annotations

import functools
import io
import itertools
import pickle
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION
from torch.serialization import skip_data

from hf_fsdp_plugin.checkpoint.formats.index_file import METADATA_TAIL, index_bytes, pack_segments
from hf_fsdp_plugin.checkpoint.formats.stored_tensors import StatePath, TiedPaths, entry_name
from hf_fsdp_plugin.checkpoint.formats.torch_files import TorchZip
from hf_fsdp_plugin.checkpoint.io import open_for_reading
from hf_fsdp_plugin.checkpoint.names import DCP_METADATA, ENTRY_ALIGNMENT, INDEX_FILE, dcp_file
from hf_fsdp_plugin.checkpoint.shards import LocalShard, shards_to_write
from hf_fsdp_plugin.checkpoint.writing.file_parts import Content, FilePart, Item, bytes_of, whole_file
from hf_fsdp_plugin.text import format_dtype
from hf_fsdp_plugin.torch_private.functions import StorageInfo

_SHARED = (
    dcp.Metadata, dcp.ChunkStorageMetadata, dcp.MetadataIndex, StorageInfo, dcp.TensorStorageMetadata,
    dcp.TensorProperties, torch.Size,
    "offsets", "sizes", "fqn", "offset", "index", "relative_path", "length", "properties", "size", "chunks",
)  # fmt: skip
"""What the pickle of a chunk refers to: classes, and the names of attributes."""
_NARROW, _WIDE = 0x7A5A7A00, 0x7A5A7A5A7A5A7A00
"""The first placeholders, whose pickles have four and eight bytes after their instruction."""


class Chunks(NamedTuple):
    """The chunks of a tensor, as arrays of int64 with a row for each chunk.

    Attributes:
        places: number of its file, first byte, number of bytes, byte offset of its first element.
        offsets, sizes: the box of each chunk, with a column for each dim.
    """

    places: NDArray[Any]
    offsets: NDArray[Any]
    sizes: NDArray[Any]


TensorLayout = tuple[StatePath, str, tuple[int, ...]]
"""Path, dtype and global shape."""
_FIXED = 4


@dataclass(frozen=True, slots=True)
class SmallEntry:
    """A scalar tensor (``data`` is its bytes), or any other object (``data`` is pickled, ``dtype`` is ``None``)."""

    path: StatePath
    data: bytes
    dtype: str | None = None


@dataclass(slots=True)
class FolderEntries:
    """The entries that one rank adds to one folder.

    Attributes:
        folder: path relative to the checkpoint.
        file: name of this rank's file in it.
        tensors: the tensors of which the file contains chunks. Ranks with equal tensors may share one sequence.
        chunks: int64, a row for each chunk: number of the tensor, first byte and number of bytes of the entry, byte
            offset of the chunk's first element; then offset and size in each dim. Unused dims are 0.
        smalls: entries that are not in this rank's file: rank 0 writes them when it commits.
        aliases: the other names of tied tensors.
    """

    folder: str
    file: str
    tensors: Sequence[TensorLayout]
    chunks: NDArray[Any]
    smalls: Sequence[SmallEntry] = ()
    aliases: TiedPaths = ()


def _joined_chunks(ranks: Sequence[FolderEntries]) -> Iterator[tuple[StatePath, str, tuple[int, ...], Chunks]]:
    """Yield each tensor with its chunks of all ranks, in the order of the ranks. Each rank has the file of its number.

    No loop over chunks: with 1,024 ranks there are millions.
    """
    # Most ranks share one sequence of tensors. The sequences are alive, so that their ids are distinct.
    sequences = {id(own.tensors): own.tensors for own in ranks}
    tensors = {tensor[0]: tensor for sequence in sequences.values() for tensor in sequence}
    order = {path: number for number, path in enumerate(tensors)}
    numbers = {key: numpy.array([order[path] for path, _, _ in found], "i8") for key, found in sequences.items()}
    width = max(own.chunks.shape[1] for own in ranks)
    rows = numpy.concatenate([numpy.pad(own.chunks, ((0, 0), (0, width - own.chunks.shape[1]))) for own in ranks])
    of_row = numpy.concatenate([numbers[id(own.tensors)][own.chunks[:, 0]] for own in ranks])
    rows[:, 0] = numpy.repeat(numpy.arange(len(ranks)), [len(own.chunks) for own in ranks])
    by_tensor = numpy.argsort(of_row, kind="stable")
    bounds = numpy.searchsorted(of_row[by_tensor], numpy.arange(len(tensors) + 1))
    for (start, stop), (path, dtype, shape) in zip(itertools.pairwise(bounds), tensors.values(), strict=True):
        found = rows.take(by_tensor[start:stop], axis=0)
        boxes = found[:, _FIXED : _FIXED + 2 * len(shape)]
        yield path, dtype, shape, Chunks(found[:, :_FIXED], boxes[:, ::2], boxes[:, 1::2])


@dataclass(frozen=True, slots=True)
class StateFiles:
    """This rank's part of a model's or an optimizer's files, and the entries that rank 0 lists in ``.metadata``."""

    parts: list[FilePart]
    entries: tuple[FolderEntries, ...] = ()


MIN_INDEXED = 500
"""Minimum number of chunks of a folder with an index. A rank reads ``.metadata`` of fewer in a tenth of a second."""


def rank_file(
    folder: str, tensors: Sequence[tuple[StatePath, LocalShard]], values: Mapping[StatePath, Any], aliases: TiedPaths
) -> StateFiles:
    """Return this rank's file in ``folder``, and its entries. Each tensor is in the file of one of its replicas.

    Scalars and objects are in no rank's file: rank 0 writes them when it commits.
    """
    smalls = _scalar_entries({path: shard.pieces[0].tensor for path, shard in tensors if not shard.shape})
    for path, value in values.items():
        buffer = io.BytesIO()
        torch.save(value, buffer)
        smalls.append(SmallEntry(path, buffer.getvalue()))
    file = dcp_file(dist.get_rank())
    paths = {shard.name: path for path, shard in tensors}
    items: list[Item] = []
    keys: list[TensorLayout] = []
    rows: list[list[int]] = []
    for shard in shards_to_write(shard for _, shard in tensors if shard.shape):
        for piece in shard.pieces:
            head, tail = _frame(shard.dtype, piece.box.sizes)
            start = _add_item(items, (head, piece.tensor, tail), paths[shard.name])
            box = itertools.chain.from_iterable(zip(piece.box.offsets, piece.box.sizes, strict=True))
            rows.append([len(keys), start, items[-1].stop - start, start + len(head), *box])
        keys.append((paths[shard.name], shard.dtype_name, shard.shape))
    width = max(map(len, rows), default=_FIXED)
    chunks = numpy.array([row + [0] * (width - len(row)) for row in rows], dtype=numpy.int64).reshape(-1, width)
    entries = FolderEntries(folder, file, keys, chunks, smalls, aliases)
    return StateFiles([whole_file(f"{folder}/{file}", items)], (entries,))


def _scalar_entries(tensors: Mapping[StatePath, torch.Tensor]) -> list[SmallEntry]:
    """Return the entries of scalars, which are read from their devices with one copy per device and dtype."""
    data: dict[StatePath, bytes] = {}
    groups: dict[tuple[torch.device, torch.dtype], dict[StatePath, torch.Tensor]] = {}
    for path, tensor in tensors.items():
        groups.setdefault((tensor.device, tensor.dtype), {})[path] = tensor.detach()
    for group in groups.values():
        for path, value in zip(group, torch.stack(list(group.values())).cpu(), strict=True):
            data[path] = bytes_of(value).numpy().tobytes()
    return [SmallEntry(path, data[path], format_dtype(tensor.dtype)) for path, tensor in tensors.items()]


class MetadataPickle:
    """The contents of ``.metadata``, in the order of a pickle.

    Args:
        files: the names of all files of the folder; chunks refer to them by number.
        save_id: identifies the save.
    """

    def __init__(self, files: Sequence[str], save_id: str) -> None:
        self._files = files
        self._save_id = save_id
        self._buffer = io.BytesIO()
        self._pickler = pickle.Pickler(self._buffer, protocol=2)
        self._num_shared = 0
        self._head: list[bytes] = [b"\x80\x02"]
        self._entries: list[bytes] = []
        self._storage: list[bytes] = []
        self._paths: list[bytes] = []
        for shared in _SHARED:
            self._share(shared)
        self._file_places = numpy.array([self._share(name) for name in files], dtype=numpy.int64)

    def add_tensor(self, path: StatePath, dtype: str, shape: Sequence[int], chunks: Chunks) -> None:
        name = self._add_name(path)
        count, ndim = chunks.sizes.shape

        def chunk(*numbers: int) -> list[Any]:
            return [dcp.ChunkStorageMetadata(torch.Size(numbers[:ndim]), torch.Size(numbers[ndim:]))]

        def place(file: Any, start: int, length: int, index: int, *offsets: int) -> list[Any]:
            return [dcp.MetadataIndex(name, offsets, index), StorageInfo(file, start, length)]

        tensor = dcp.TensorStorageMetadata(dcp.TensorProperties(dtype=getattr(torch, dtype)), torch.Size(shape), [])
        described = self._pickled(tensor)
        assert described.endswith(b"]ub"), "the empty list of chunks is the last attribute"
        rows = self._rows(count, chunk, [*chunks.offsets.T, *chunks.sizes.T])
        self._entries.append(b"".join([self._pickled(name), described[:-2], b"(", rows, b"eub"]))
        files, starts, lengths, _ = chunks.places.T
        columns = [self._file_places[files], starts, lengths, numpy.arange(count), *chunks.offsets.T]
        self._storage.append(b"(" + self._rows(count, place, columns, reference=True) + b"u")

    def add_value(self, path: StatePath, file: int, start: int, length: int) -> None:
        """Add an object that is not a tensor."""
        name = self._add_name(path)
        self._entries.append(self._pickled(name) + self._pickled(dcp.BytesStorageMetadata()))
        key, value = dcp.MetadataIndex(name), StorageInfo(self._files[file], start, length)
        self._storage.append(b"(" + self._pickled(key) + self._pickled(value) + b"u")

    def finished(self) -> tuple[bytes, ...]:
        """Return the bytes of the pickle, in small parts. The last ones contain the ``save_id``."""
        return (
            b"".join(self._head), self._pickled(dcp.Metadata), b")\x81}(",  # a new object, and its attributes
            self._pickled("state_dict_metadata"), b"}(", *self._entries, b"u",
            self._pickled("planner_data"), b"}(", b"".join(self._paths), b"u",
            self._pickled("storage_data"), b"}", *self._storage,
            self._pickled("version"), self._pickled(CURRENT_DCP_VERSION),
            self._pickled("storage_meta"), self._pickled(dcp.StorageMeta(save_id=self._save_id)), b"ub.",
        )  # fmt: skip

    def _add_name(self, path: StatePath) -> str:
        name = entry_name(path)
        self._share(name)
        self._paths += [self._pickled(name), self._pickled(path)]
        return name

    def _share(self, value: Any) -> int:
        """Create a name or a class at the beginning of the pickle, and return its place in the pickle's memo."""
        self._head += [self._pickled(value, fast=False), b"0"]
        self._num_shared += 1
        return self._num_shared - 1

    def _pickled(self, value: Any, *, fast: bool = True) -> bytes:
        """Return the instructions that create a value. With ``fast``, nothing is added to the memo."""
        self._pickler.fast = fast
        self._pickler.dump(value)
        data = self._buffer.getvalue()[2:-1]  # without the version and the STOP
        self._buffer.seek(0)
        self._buffer.truncate()
        return data

    def _rows(
        self, count: int, create: Callable[..., list[Any]], columns: Sequence[NDArray[Any]], *, reference: bool = False
    ) -> bytes:
        """Return the pickles of the objects that ``create`` returns for each row of numbers.

        Args:
            reference: the first number is a place in the memo, and stands for the object there.
        """
        wide = [bool(column.max(initial=0) >> 31) for column in columns]
        marks = [(_WIDE if is_wide else _NARROW) + number for number, is_wide in enumerate(wide)]
        one = b"".join(map(self._pickled, create(*marks)))
        if reference:
            place = marks[0].to_bytes(4, "little")
            one = one.replace(pickle.BININT + place, pickle.LONG_BINGET + place)
        rows = numpy.tile(numpy.frombuffer(one, numpy.uint8), (count, 1))
        for mark, is_wide, column in zip(marks, wide, columns, strict=True):
            size = 8 if is_wide else 4
            at = one.index(mark.to_bytes(size, "little"))
            rows[:, at : at + size] = column.astype(f"<i{size}").reshape(-1, 1).view(numpy.uint8)
        return rows.tobytes()


def final_files(ranks: Sequence[Sequence[FolderEntries]]) -> Iterator[list[FilePart]]:
    """Yield the files that rank 0 adds to each folder. ``ranks``: the entries that each rank has written."""
    by_folder: dict[str, list[FolderEntries]] = {}
    for entries in itertools.chain.from_iterable(ranks):
        by_folder.setdefault(entries.folder, []).append(entries)
    yield from map(_files_of_folder, by_folder.values())


def _files_of_folder(ranks: Sequence[FolderEntries]) -> list[FilePart]:
    """Return the files that complete a folder, from the entries of all ranks: small entries, ``.metadata``, the index.

    If several ranks have the same small entry, the first one is written. A small folder has no index.
    """
    folder = ranks[0].folder
    smalls: dict[StatePath, SmallEntry] = {}
    aliases: dict[StatePath, StatePath] = {}
    # Most ranks share one sequence, which may be as long as the list of the tensors.
    for shared_smalls in {id(own.smalls): own.smalls for own in ranks}.values():
        for small in shared_smalls:
            smalls.setdefault(small.path, small)
    for shared_aliases in {id(own.aliases): own.aliases for own in ranks}.values():
        aliases.update(shared_aliases)
    files = [*(entries.file for entries in ranks), dcp_file(len(ranks))]
    pickled = MetadataPickle(files, save_id=uuid.uuid4().hex)
    tensors = []
    tied: dict[StatePath, tuple[str, tuple[int, ...], Chunks]] = {}
    for path, dtype, shape, chunks in _joined_chunks(ranks):
        pickled.add_tensor(path, dtype, shape, chunks)
        places = numpy.concatenate([chunks.places[:, [0, 3]], chunks.offsets], axis=1)
        tensors.append((path, dtype, shape, pack_segments(places, chunks.sizes)))
        if path in aliases.values():
            tied[path] = dtype, shape, chunks
    items: list[Item] = []
    values = []
    no_dims = numpy.zeros((1, 0), dtype=numpy.int64)
    for small in smalls.values():
        head, tail = _frame(getattr(torch, small.dtype), ()) if small.dtype is not None else (b"", b"")
        start = _add_item(items, (head, small.data, tail), small.path)
        place = len(ranks), start, items[-1].stop - start
        values.append((small.path, *place))
        if small.dtype is None:
            pickled.add_value(small.path, *place)
        else:
            tied[small.path] = small.dtype, (), Chunks(numpy.array([[*place, 0]]), no_dims, no_dims)
            pickled.add_tensor(small.path, *tied[small.path])
    for alias, path in aliases.items():
        pickled.add_tensor(alias, *tied[path])
    parts = pickled.finished()
    metadata = whole_file(f"{folder}/{DCP_METADATA}", [Item(0, parts)])
    found = [whole_file(f"{folder}/{files[-1]}", items), metadata] if items else [metadata]
    if sum(len(own.chunks) for own in ranks) >= MIN_INDEXED:
        last = b"".join(parts[-8:])[-METADATA_TAIL:].hex()
        index = index_bytes(tensors, values, list(aliases.items()), files, (metadata.size, last))
        found.append(whole_file(f"{folder}/{INDEX_FILE}", [Item(0, (index,))]))
    return found


def _add_item(items: list[Item], contents: tuple[Content, ...], path: StatePath) -> int:
    """Add an archive to a file, after zeros up to an aligned offset. Returns its offset."""
    end = items[-1].stop if items else 0
    padding = bytes(-end % ENTRY_ALIGNMENT)
    # The name is without the key of the state dict: lm_head.weight, state.lm_head.weight.exp_avg.
    items.append(Item(end, (padding, *contents), name=entry_name(path[1:])))
    return end + len(padding)


@functools.lru_cache(maxsize=4096)
def _frame(dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[bytes, bytes]:
    """Return the bytes that ``torch.save`` writes before and after the data of a contiguous tensor.

    ``skip_data`` leaves a hole for the data. The data's checksum in the archive is 0, which torch accepts.
    """
    tensor = torch.empty(shape, dtype=dtype, device="cpu")  # never used, so it takes no memory
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "archive.pt"  # torch uses the stem as the name of the archive
        with skip_data():
            torch.save(tensor, path)
        with open_for_reading(path) as file:
            begin = TorchZip(file.fileno(), 0, path.stat().st_size, path).offset("data/0")
            head = file.read(begin)
            file.seek(begin + tensor.nbytes)
            return head, file.read()
