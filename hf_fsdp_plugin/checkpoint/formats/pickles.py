"""Pickles of torch, read without torch: a table says what a pickle may name, and nothing it names is ever run.

The classes and functions that checkpoints name are replaced by the small stand-ins here, which only keep what they
are given. Any other name is refused, as is a pickle that does not fit the stand-ins.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any, NamedTuple

from hf_fsdp_plugin.checkpoint.formats.element_types import SIZES
from hf_fsdp_plugin.checkpoint.formats.pickle_scan import largest_memo
from hf_fsdp_plugin.checkpoint.formats.stored import COPY_AGAIN, refuse


class PickledStorage(NamedTuple):
    """A storage: the record of the zip that holds its bytes, and its number of elements."""

    key: str
    dtype: str
    numel: int


class PickledTensor(NamedTuple):
    """A tensor as a view of a storage; offset and strides in elements."""

    storage: PickledStorage
    dtype: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class Kept:
    """A stand-in: an object of a known class, with the attributes that were pickled."""


class Properties(Kept):
    """DCP's ``TensorProperties``, pickled as a tuple that begins with the dtype."""

    dtype: str

    def __setstate__(self, state: Any) -> None:
        self.dtype = state[0] if isinstance(state, tuple) else state["dtype"]


class Metadata(Kept):
    """All that ``.metadata`` holds: entries by name, the places of their bytes, and their paths by name."""

    state_dict_metadata: dict[str, Any]
    storage_data: dict[Any, Any]
    planner_data: Any


class TensorMetadata(Kept):
    """A tensor of a state dict."""

    properties: Properties
    size: tuple[int, ...]
    chunks: list[Any]


class BytesMetadata(Kept):
    """An entry of a state dict that is no tensor."""


class ChunkMetadata(Kept):
    """One box of a tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class Place(Kept):
    """DCP's ``MetadataIndex``: the name and the offset of a chunk."""

    fqn: str
    offset: tuple[int, ...] | None


class Region(Kept):
    """DCP's ``_StorageInfo``: the file, and the bytes of it that hold an entry."""

    relative_path: str
    offset: int
    length: int
    transform_descriptors: Any


class Distributed(NamedTuple):
    """A tensor of which the file holds this rank's part: the class by name, and its state as pickled."""

    kind: str
    state: Any


class Shard(Kept):
    """The placement of a DTensor along a mesh dim: split in one of its dims."""

    dim: int


class StridedShard(Shard):
    """Split twice in one dim, in another order than the mesh's."""


class Replicate(Kept):
    """The placement of a DTensor along a mesh dim: the same on every rank."""


class Partial(Kept):
    """A sum that has not been taken."""


class TensorMeta(NamedTuple):
    """A DTensor's global shape, strides and dtype."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str


def _tensor_v2(storage: PickledStorage, offset: int, size: Any, strides: Any, *_: Any) -> PickledTensor:
    return _tensor(storage, storage.dtype, offset, size, strides)


def _tensor_v3(storage: PickledStorage, offset: int, size: Any, strides: Any, *rest: Any) -> PickledTensor:
    """For dtypes without a storage class of their own: the storage is bytes, the dtype comes third after the sizes."""
    return _tensor(storage, rest[2], offset, size, strides)


def _tensor(storage: PickledStorage, dtype: str, offset: int, size: Any, strides: Any) -> PickledTensor:
    numbers = (offset, *size, *strides)
    if dtype not in SIZES or len(size) != len(strides) or not all(type(n) is int and n >= 0 for n in numbers):
        raise pickle.UnpicklingError(f"a tensor of dtype {dtype}, shape {size}, strides {strides}, offset {offset}")
    return PickledTensor(storage, dtype, offset, tuple(size), tuple(strides))


def _first(value: Any, *_: Any) -> Any:
    """Stands for functions of which only the first argument matters here: ``Parameter``, ``torch.device``, enums."""
    return value


def _kept_arguments(*arguments: Any) -> Any:
    return arguments


def _from_type(_function: Any, kind: Any, arguments: Any, state: Any) -> Any:
    """A subclass of ``Tensor``, or a ``Tensor`` with attributes of its own."""
    return Distributed(kind, state) if isinstance(kind, str) else _function(*arguments)


def _attribute(owner: Any, name: str) -> Any:
    """Stands for ``getattr``, by which enum members and nested classes are pickled; it looks nothing up."""
    return Kept if (owner, name) == ("ShardedTensor", "ProcessGroupState") else name


def _latin(text: str, encoding: str = "latin1") -> bytes:
    """Stands for ``_codecs.encode``, by which protocol 2 writes bytes."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"bytes in the encoding {encoding!r}")
    return text.encode("latin1")


def _no_bytes() -> bytes:
    """Stands for ``bytes``, which protocol 2 calls for the empty ones, and which an argument would have take memory."""
    return b""


def _path(*parts: Any) -> str:
    return "/".join(map(str, parts))


_STORAGES = {
    "DoubleStorage": "float64", "FloatStorage": "float32", "HalfStorage": "float16", "BFloat16Storage": "bfloat16",
    "LongStorage": "int64", "IntStorage": "int32", "ShortStorage": "int16", "CharStorage": "int8",
    "ByteStorage": "uint8", "BoolStorage": "bool", "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
}  # fmt: skip

_DCP = "torch.distributed.checkpoint"
_SHARDED = "torch.distributed._shard"
_TENSOR = "torch.distributed.tensor"

ALLOWED: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): OrderedDict,
    **{(module, "set"): set for module in ("builtins", "__builtin__")},
    **{(module, "frozenset"): frozenset for module in ("builtins", "__builtin__")},
    **{(module, "complex"): complex for module in ("builtins", "__builtin__")},
    **{(module, "getattr"): _attribute for module in ("builtins", "__builtin__")},
    **{(module, "bytes"): _no_bytes for module in ("builtins", "__builtin__")},
    ("_codecs", "encode"): _latin,
    **{(m, n): _path for m in ("pathlib", "pathlib._local") for n in ("PosixPath", "WindowsPath", "PurePosixPath")},
    **{("torch", dtype): dtype for dtype in SIZES},
    **{("torch", name): dtype for name, dtype in _STORAGES.items()},
    ("torch.storage", "UntypedStorage"): "uint8",
    ("torch", "Size"): tuple,
    ("torch", "device"): _first,
    ("torch", "Tensor"): Kept,
    ("torch.nn.parameter", "Parameter"): Kept,
    ("torch.nn.parameter", "Buffer"): Kept,
    ("torch.serialization", "_get_layout"): _first,
    ("torch._utils", "_rebuild_tensor_v2"): _tensor_v2,
    ("torch._utils", "_rebuild_tensor_v3"): _tensor_v3,
    ("torch._utils", "_rebuild_parameter"): _first,
    ("torch._utils", "_rebuild_parameter_with_state"): _first,
    ("torch._utils", "_rebuild_wrapper_subclass"): _kept_arguments,
    ("torch._tensor", "_rebuild_from_type_v2"): _from_type,
    # .metadata
    (f"{_DCP}.metadata", "Metadata"): Metadata,
    (f"{_DCP}.metadata", "TensorStorageMetadata"): TensorMetadata,
    (f"{_DCP}.metadata", "BytesStorageMetadata"): BytesMetadata,
    (f"{_DCP}.metadata", "ChunkStorageMetadata"): ChunkMetadata,
    (f"{_DCP}.metadata", "TensorProperties"): Properties,
    (f"{_DCP}.metadata", "_MEM_FORMAT_ENCODING"): _first,
    (f"{_DCP}.metadata", "MetadataIndex"): Place,
    (f"{_DCP}.metadata", "StorageMeta"): Kept,
    (f"{_DCP}.filesystem", "_StorageInfo"): Region,
    # DTensor
    (_TENSOR, "DTensor"): "DTensor",
    (f"{_TENSOR}._api", "DTensor"): "DTensor",
    (f"{_TENSOR}._dtensor_spec", "DTensorSpec"): Kept,
    (f"{_TENSOR}._dtensor_spec", "TensorMeta"): TensorMeta,
    (f"{_TENSOR}._dtensor_spec", "ShardOrderEntry"): NamedTuple("ShardOrderEntry", [("dim", int), ("mesh_dims", Any)]),
    (f"{_TENSOR}.placement_types", "Shard"): Shard,
    (f"{_TENSOR}.placement_types", "_StridedShard"): StridedShard,
    (f"{_TENSOR}.placement_types", "Replicate"): Replicate,
    (f"{_TENSOR}.placement_types", "Partial"): Partial,
    ("torch.distributed.device_mesh", "DeviceMesh"): Kept,
    ("torch.distributed._mesh_layout", "_MeshLayout"): Kept,
    ("torch.distributed._mesh_layout", "_FlatLayout"): Kept,
    # ShardedTensor
    (f"{_SHARDED}.sharded_tensor.api", "ShardedTensor"): "ShardedTensor",
    (f"{_SHARDED}.sharded_tensor.shard", "Shard"): Kept,
    (f"{_SHARDED}.sharded_tensor.metadata", "ShardedTensorMetadata"): Kept,
    (f"{_SHARDED}.sharded_tensor.metadata", "TensorProperties"): Properties,
    (f"{_SHARDED}.sharded_tensor.metadata", "MEM_FORMAT_ENCODING"): _first,
    (f"{_SHARDED}.metadata", "ShardMetadata"): Kept,
    (f"{_SHARDED}.sharding_spec.chunk_sharding_spec", "ChunkShardingSpec"): Kept,
    (f"{_SHARDED}.sharding_spec.api", "EnumerableShardingSpec"): Kept,
    ("torch.distributed.remote_device", "_remote_device"): Kept,
}
"""(module, name) as a pickle writes it -> what stands for it."""


class _RefusedName(Exception):
    """A pickle names something that no checkpoint needs."""


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return ALLOWED[module, name]
        except KeyError:
            raise _RefusedName(f"{module}.{name}") from None

    def persistent_load(self, pid: Any) -> PickledStorage:
        kind, dtype, key, _location, numel = pid
        if kind != "storage" or not isinstance(dtype, str) or not isinstance(numel, int):
            raise pickle.UnpicklingError(f"a reference of kind {kind!r}")
        return PickledStorage(str(key), dtype, numel)


def read_pickle(data: bytes, place: Path | str) -> Any:
    """The pickled object, with stand-ins for torch's classes. ``place`` is for the message.

    Raises:
        CheckpointError: the pickle names anything else, or is damaged.
    """
    if largest_memo(data) > len(data):
        refuse(
            place,
            "the pickle in it would remember more objects than it has bytes.",
            COPY_AGAIN,
        )
    try:
        return _Reader(io.BytesIO(data)).load()
    except _RefusedName as error:
        refuse(
            place,
            f"the pickle in it names {error}, which no checkpoint of weights or optimizer state needs; it was not run.",
            "Do not load this file elsewhere either unless you know who wrote it; use a copy from a source you trust.",
        )
    except Exception as error:
        # A damaged pickle fails in every way that Python can: any byte may be an instruction.
        refuse(
            place,
            f"damaged: its pickle cannot be read ({type(error).__name__}: {error}).",
            COPY_AGAIN,
        )
