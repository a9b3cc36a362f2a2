"""The files of ``torch.save``: their zip archives, and the two formats of a state dict in them. No torch.

The records of an archive are uncompressed, so the file contains a tensor's bytes as they were in memory. A ``.bin`` or
``.pt`` file is one archive; a ``.distcp`` file of DCP is a sequence of archives. The directory is at the end of an
archive: https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT

The formats are ``bin``, a state dict in one file, and ``per_rank``, a file per rank with its parts, which Accelerate
writes with ``use_dcp=False``.
"""

from __future__ import annotations

import io
import math
import os
import re
import struct
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO, Final, NoReturn

from hf_fsdp_plugin.checkpoint import names as file_names
from hf_fsdp_plugin.checkpoint.errors import COPY_ALL_RANKS, file_problems_inside, problem, raise_if_any, refuse
from hf_fsdp_plugin.checkpoint.file_io import open_for_reading, read_into
from hf_fsdp_plugin.checkpoint.formats import boxes, pickles, stored_tensors
from hf_fsdp_plugin.checkpoint.formats.boxes import Box
from hf_fsdp_plugin.checkpoint.formats.pickles import Distributed, PickledTensor
from hf_fsdp_plugin.checkpoint.formats.safetensors import read_weight_map
from hf_fsdp_plugin.checkpoint.formats.stored_tensors import StoredPiece, StoredState, StoredTensor
from hf_fsdp_plugin.problems import CheckpointError
from hf_fsdp_plugin.torch_private.modules import LOCAL_TENSOR_ATTRIBUTE

_END_SIZE = 22
_BUFFER_BYTES: Final = 512
"""More than a header, which is what is read at once. DCP writes one archive per tensor."""


class FileSlice(io.RawIOBase):
    """The bytes ``[start, start + length)`` of an open file, as a file."""

    def __init__(self, file: BinaryIO, start: int, length: int) -> None:
        super().__init__()
        self._file, self._start, self._length, self._at = file, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        if self._at < 0:
            raise OSError("a position before the archive")
        return self._at

    def readinto(self, out: Any) -> int:
        wanted = memoryview(out)[: max(self._length - self._at, 0)]
        count = read_into(self._file, self._start + self._at, wanted)
        self._at += count
        return count


def _read_at(file: BinaryIO, offset: int, num_bytes: int) -> bytes:
    out = bytearray(num_bytes)
    return bytes(out[: read_into(file, offset, memoryview(out))])


def compare_checksums(file: BinaryIO) -> int:
    """Return the number of bytes in an archive that have a checksum. Raises ``BadZipFile`` if they differ from it."""
    count = 0
    with zipfile.ZipFile(file) as archive:
        for info in archive.infolist():
            if info.CRC:  # archives of this package have none for tensors
                with archive.open(info) as record:
                    while record.read(1 << 20):
                        pass
                count += info.file_size
    return count


class TorchZip:
    """The records of a zip in the bytes ``[start, start + length)`` of an open file.

    Record names do not include the folder inside the zip: ``data.pkl``, ``data/0``.

    Raises:
        CheckpointError: from every method, if the zip is truncated, compressed or damaged.
    """

    def __init__(self, file: BinaryIO, start: int, length: int, place: Path | str) -> None:
        self._file, self._start, self._place = file, start, place
        self._records: dict[str, tuple[int, int]] = {}
        buffered = io.BufferedReader(FileSlice(file, start, length), _BUFFER_BYTES)
        try:
            with zipfile.ZipFile(buffered) as archive:
                for info in archive.infolist():
                    name = info.filename.partition("/")[2]
                    if info.compress_type:
                        raise ValueError(f"record {name!r} is compressed")
                    with archive.open(info):  # reads and compares the header, after which the bytes begin
                        begin = buffered.tell()
                    self._records[name] = begin, begin + info.file_size
        except (zipfile.BadZipFile, struct.error, ValueError, OSError, OverflowError, RuntimeError) as error:
            if _read_at(file, start, 1) == b"\x80":
                fix = "Load it with torch and save it again."
                refuse("FSDP-E460", place, "is in the format of torch versions before 1.6, without a zip.", fix)
            self._damaged(f"{error}")
        if "byteorder" in self._records and self.read("byteorder") != b"little":
            refuse("FSDP-E460", place, "is big-endian.", "Load and save it on a little-endian machine.")

    def read(self, name: str) -> bytes:
        """Return a record's bytes."""
        start, stop = self._record(name)
        return _read_at(self._file, self._start + start, stop - start)

    def offset(self, name: str) -> int:
        """Return the byte offset of a record's data in the file."""
        return self._start + self._record(name)[0]

    def value(self) -> Any:
        """Return the object that was saved, with a :class:`PickledTensor` for each tensor."""
        return pickles.read_pickle(self.read("data.pkl"), self._place)

    def tensor_offset(self, tensor: PickledTensor) -> int:
        """Return the byte offset of a tensor's first element in the file. Checks that the last one is in the record."""
        if 0 in tensor.shape:
            # torch does not write a record for an empty storage.
            return self._start
        name = f"data/{tensor.storage.key}"
        (start, stop), width = self._record(name), stored_tensors.SIZES[tensor.dtype]
        num_bytes = stop - start
        needed = (tensor.offset + boxes.element_span(tensor.strides, tensor.shape)) * width
        if needed > num_bytes:
            self._damaged(f"record {name!r} has {num_bytes} bytes, and its tensor needs {needed}")
        return self._start + start + tensor.offset * width

    def _record(self, name: str) -> tuple[int, int]:
        """Return the bytes of a record, relative to the zip."""
        if name not in self._records:
            self._damaged(f"it has no record {name!r}")
        return self._records[name]

    def _damaged(self, how: str) -> NoReturn:
        refuse("FSDP-E453", self._place, f"is damaged: {how}.")


class TensorZips:
    """A reader of zips with one tensor each. DCP writes thousands of them, so equal headers are parsed only once."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, bytes], tuple[bytes, PickledTensor, int]] = {}

    def read(self, file: BinaryIO, start: int, length: int, place: Path | str) -> tuple[Any, int]:
        """Return the tensor (or other saved object), and the byte offset of its first element in the file."""
        end = _read_at(file, start + max(0, length - _END_SIZE), _END_SIZE)
        known = self._known.get((length, end))
        if known is not None:
            headers, tensor, offset = known
            if _read_at(file, start, len(headers)) == headers:
                return tensor, start + offset
        zipped = TorchZip(file, start, length, place)
        value = zipped.value()
        if not isinstance(value, PickledTensor):
            return value, start
        offset = zipped.tensor_offset(value) - start
        # Everything that describes the tensor precedes its bytes; the directory repeats it.
        self._known[length, end] = _read_at(file, start, offset), value, offset
        return value, start + offset


_Parts = tuple[tuple[int, ...], list[tuple[Box, PickledTensor]]]
"""The global shape of a tensor, and the boxes of one rank with their tensors."""


def parts_of(value: Distributed) -> _Parts:
    """Return the global shape, and this rank's non-empty boxes with their tensors.

    Raises:
        ValueError: the placement is not supported, or sizes contradict each other.
        AttributeError, KeyError, TypeError: the pickle is not in the form that torch 2.13 writes.
    """
    if value.kind == "DTensor":
        shape, parts = _of_dtensor(value.state)
    else:  # a ShardedTensor
        shards, metadata = value.state[:2]
        shape = tuple(metadata.size)
        parts = [(Box(tuple(s.metadata.shard_offsets), tuple(s.metadata.shard_sizes)), s.tensor) for s in shards]
    for box, tensor in parts:
        if not isinstance(tensor, PickledTensor) or tensor.shape != box.sizes or not boxes.is_within(box, shape):
            raise ValueError(f"a part of shape {getattr(tensor, 'shape', None)} does not match {box} of {shape}")
    return shape, [(box, tensor) for box, tensor in parts if box.numel]


def _of_dtensor(state: Any) -> _Parts:
    attributes = state[1] if isinstance(state, tuple) else state
    local, spec = attributes[LOCAL_TENSOR_ATTRIBUTE], attributes["_spec"]
    shape = tuple(spec.tensor_meta.shape)
    begins, ends = [0] * len(shape), list(shape)
    sizes = [math.prod(_flat(axis.shape)) for axis in spec.mesh._layout.axes]
    for size, coordinate, placement in zip(sizes, spec.mesh._coordinate_on_dim, spec.placements, strict=True):
        if isinstance(placement, pickles.Replicate):
            continue
        if not isinstance(placement, pickles.Shard) or isinstance(placement, pickles.StridedShard):
            raise ValueError(f"placement {type(placement).__name__} is not supported")
        dim = placement.dim
        length = ends[dim] - begins[dim]
        # Like torch.chunk: the chunks are equal, except that the last ones may be smaller or empty.
        chunk = -(-length // size)
        start = min(chunk * coordinate, length)
        begins[dim], ends[dim] = begins[dim] + start, begins[dim] + min(start + chunk, length)
    box = Box(tuple(begins), tuple(end - begin for begin, end in zip(begins, ends, strict=True)))
    return shape, [(box, local)]


def _flat(shape: Any) -> Sequence[int]:
    return [n for part in shape for n in _flat(part)] if isinstance(shape, tuple) else [shape]


FLAT_PARAMETER = "flat_param"
"""Suffix of the names in a local state dict of FSDP1."""


_FLAT = "is a LOCAL_STATE_DICT of stock FSDP1, which lacks the names and shapes of the original parameters."
_FLAT_FIX = (
    "Load it with the script and the number of ranks that wrote it, and save it with fsdp_state_dict_type: "
    "SHARDED_STATE_DICT."
)


def open_archive(root: Path, name: str) -> tuple[TorchZip, Any]:
    """Return the archive in a file of ``torch.save`` below ``root``, and the object that was saved.

    Raises:
        CheckpointError: the file is missing, is outside of ``root``, or is damaged.
    """
    raise_if_any(file_problems_inside(root, [name], root))
    with open_for_reading(root / name) as file:
        archive = TorchZip(file, 0, (root / name).stat().st_size, root / name)
        return archive, archive.value()


def stored_values(file: str, archive: TorchZip, value: Any) -> Any:
    """Return an object of an archive with a :class:`StoredTensor` for each tensor in its dicts and lists."""
    return _merge("", [((file, archive), value)])


def read_state_dict(root: Path, names: list[str]) -> dict[tuple[Any, ...], Any]:
    """Merge the state dicts of all files into one, with a :class:`StoredTensor` for each tensor."""
    found: list[tuple[tuple[str, TorchZip], Any]] = []  # name and archive of a file, and its value
    for name in names:
        archive, value = open_archive(root, name)
        if not isinstance(value, dict):
            refuse("FSDP-E460", root / name, f"contains a {type(value).__name__} instead of a state dict.")
        if any(str(key).endswith(FLAT_PARAMETER) for key in value):
            refuse("FSDP-E460", root / name, _FLAT, _FLAT_FIX)
        found.append(((name, archive), value))
    try:
        return {(key,): value for key, value in _merge("", found).items()}
    except (AttributeError, KeyError, TypeError, ValueError, IndexError, ArithmeticError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        message = f"is not a state dict in the form that torch 2.13 writes ({type(error).__name__}: {error})."
        fix = "Save it again with fsdp_state_dict_type: SHARDED_STATE_DICT and use_dcp=True."
        refuse("FSDP-E460", root / names[0], message, fix)


def _merge(name: str, found: list[tuple[tuple[str, TorchZip], Any]]) -> Any:
    """Merge the values of one name from several files. A value that is not a tensor is taken from the first file."""
    file, first = found[0]
    if isinstance(first, dict):
        keys = {key: None for _, value in found for key in value}
        return {key: _merge(str(key), [(f, value[key]) for f, value in found if key in value]) for key in keys}
    if isinstance(first, list):
        return [_merge(name, [(file, item)]) for item in first]
    if not isinstance(first, (PickledTensor, Distributed)):
        return first
    shape, dtype = None, None
    pieces = []
    for (relative, zipped), value in found:
        is_whole = isinstance(value, PickledTensor)
        global_shape, parts = (value.shape, [(boxes.whole_box(value.shape), value)]) if is_whole else parts_of(value)
        if shape not in (None, global_shape):
            raise ValueError(f"{name!r} has the shape {global_shape} in {relative} and {shape} in another file")
        shape = global_shape
        for box, tensor in parts:
            dtype = dtype or tensor.dtype
            pieces.append(StoredPiece(box, relative, zipped.tensor_offset(tensor), tensor.strides))
    return StoredTensor(name, dtype or "float32", shape or (), stored_tensors.without_replicas(pieces))


def read_bin(root: Path, stem: str, number: int) -> StoredState | None:
    """Return the state in Accelerate's or the Trainer's file, or in the file or shards of a Hugging Face folder."""
    stems = (file_names.FSDP_MODEL, file_names.HF_MODEL_BIN) if stem == file_names.FSDP_MODEL else (stem,)
    names = [f"{file_names.numbered_from_one(each, number)}.bin" for each in stems]
    if stem == file_names.OPTIMIZER and number == 0:
        names.append(file_names.TRAINER_OPTIMIZER)
    for name in names:
        index = root / file_names.index_file(name)
        if (root / name).is_file():
            return StoredState(read_state_dict(root, [name]), (name,), root / name)
        if index.is_file():
            files = list(read_weight_map(root, index))
            return StoredState(read_state_dict(root, files), (index.name, *files), index)
    return None


def read_per_rank(root: Path, stem: str, number: int) -> StoredState | None:
    """Return the state in ``{stem}_rank{R}.bin`` of all ranks, or ``None`` if there are no such files."""
    for each in dict.fromkeys((file_names.numbered_name(stem, number), file_names.numbered_from_one(stem, number))):
        if names := _rank_files(root, each):
            fix = f"Only {', '.join(names)} are in the folder. {COPY_ALL_RANKS}"
            return StoredState(read_state_dict(root, names), tuple(names), root / f"{each}_rank*.bin", fix)
    return None


def _rank_files(root: Path, stem: str) -> list[str]:
    """Return the files in rank order. Raises ``CheckpointError`` if a file below the highest rank is missing."""
    pattern = re.compile(rf"{re.escape(stem)}_rank(\d{{1,7}})\.bin")
    ranks = {int(match[1]) for path in root.iterdir() if (match := pattern.fullmatch(path.name))}
    missing = [root / f"{stem}_rank{rank}.bin" for rank in range(max(ranks, default=0)) if rank not in ranks]
    message = "is missing, although files of higher ranks exist."
    problems = [problem("FSDP-E457", path, message, COPY_ALL_RANKS) for path in missing]
    raise_if_any(problems[: stored_tensors.MAX_PROBLEMS])
    return [f"{stem}_rank{rank}.bin" for rank in sorted(ranks)]
