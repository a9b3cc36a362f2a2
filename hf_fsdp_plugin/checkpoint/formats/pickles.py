"""A reader of torch's pickles that does not import torch. ``ALLOWED`` lists the names that a pickle may contain.

Classes and functions of torch are never called: each is replaced by a stand-in from this file, which only stores its
arguments. A pickle is rejected if it contains any other name, or arguments that a stand-in does not accept.
"""

from __future__ import annotations

import gc
import io
import pickle
import reprlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple

from hf_fsdp_plugin.checkpoint.errors import refuse
from hf_fsdp_plugin.checkpoint.formats.boxes import SIZES
from hf_fsdp_plugin.checkpoint.formats.pickle_scan import excessive


class _Constant(type):
    """The type of stand-in classes. A pickle can set attributes of its objects, and all pickles use these classes."""

    def __setattr__(cls, name: str, value: Any) -> None:
        raise AttributeError(f"{cls.__name__}.{name} cannot be set")

    __delattr__ = __setattr__  # type: ignore[assignment]


class _Counted:
    """A function that a pickle calls, without attributes that the pickle could set.

    It counts the lengths of its arguments, of which it may make copies.
    """

    __slots__ = ("_function", "_reader")
    _function: Callable[..., Any]
    _reader: _Reader

    def __init__(self, function: Callable[..., Any], reader: _Reader) -> None:
        object.__setattr__(self, "_function", function)
        object.__setattr__(self, "_reader", reader)

    def __call__(self, *arguments: Any) -> Any:
        self._reader.count(sum(len(argument) for argument in arguments if isinstance(argument, _COPIED)))
        return self._function(*arguments)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"{name} of a stand-in function cannot be set")


class PickledStorage(NamedTuple):
    """A storage: the zip record that contains its bytes, its dtype, and its number of elements."""

    key: str
    dtype: str
    numel: int


class PickledTensor(NamedTuple):
    """A tensor as a view of a storage. The offset and the strides are in elements."""

    storage: PickledStorage
    dtype: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class Kept(metaclass=_Constant):
    """Stand-in for a class of torch: an object with the attributes that were pickled."""

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...


class Properties(Kept):
    """DCP's ``TensorProperties``, pickled as a tuple that begins with the dtype."""

    dtype: str

    def __setstate__(self, state: Any) -> None:
        self.dtype = state[0] if isinstance(state, tuple) else state["dtype"]


class Metadata(Kept):
    """The contents of ``.metadata``, by name: the entries, the file ranges of their bytes, and their paths."""


class TensorMetadata(Kept):
    """A tensor of a state dict: its ``properties``, its ``size``, and its boxes (``chunks``)."""


class BytesMetadata(Kept):
    """An entry of a state dict that is not a tensor."""


class Region(Kept):
    """DCP's ``_StorageInfo``: the file, and the range of its bytes that contains an entry."""


class Distributed(NamedTuple):
    """One rank's part of a DTensor or ShardedTensor: its class and its pickled state."""

    kind: str
    state: Any


class Shard(Kept):
    """The placement of a DTensor on a mesh axis: sharded along the dim ``dim``."""


class StridedShard(Shard):
    """The placement of a DTensor that is sharded twice along one dim, not in the order of the mesh axes."""


class Replicate(Kept):
    """The placement of a DTensor on a mesh axis: the same on every rank."""


class Partial(Kept):
    """The placement of a DTensor on a mesh axis: a pending reduction."""


class _TensorMeta(NamedTuple):
    shape: Any
    strides: Any
    dtype: str


class _ShardOrderEntry(NamedTuple):
    dim: int
    mesh_dims: Any


class TensorMeta(_TensorMeta, metaclass=_Constant):
    """A DTensor's global shape, strides and dtype."""

    __slots__ = ()


class ShardOrderEntry(_ShardOrderEntry, metaclass=_Constant):
    """The mesh axes by which a dim of a DTensor is sharded."""

    __slots__ = ()


def _tensor_v2(storage: PickledStorage, offset: int, size: Any, strides: Any, *_: Any) -> PickledTensor:
    return _tensor(storage, storage.dtype, offset, size, strides)


def _tensor_v3(storage: PickledStorage, offset: int, size: Any, strides: Any, *rest: Any) -> PickledTensor:
    """Stand-in for dtypes without a storage class: the storage is untyped, and the dtype is an argument."""
    return _tensor(storage, rest[2], offset, size, strides)


def _tensor(storage: PickledStorage, dtype: str, offset: int, size: Any, strides: Any) -> PickledTensor:
    numbers = (offset, *size, *strides)
    if dtype not in SIZES or len(size) != len(strides) or not all(type(n) is int and n >= 0 for n in numbers):
        found = [reprlib.repr(each) for each in (dtype, size, strides, offset)]  # short, whatever the pickle contains
        raise pickle.UnpicklingError("a tensor of dtype {}, shape {}, strides {}, offset {}".format(*found))
    return PickledTensor(storage, dtype, offset, tuple(size), tuple(strides))


def _first(value: Any, *_: Any) -> Any:
    """Stand-in for calls of which only the first argument is needed: ``Parameter``, ``torch.device``, enums."""
    return value


def _kept_arguments(*arguments: Any) -> Any:
    return arguments


def _from_type(_function: Any, kind: Any, arguments: Any, state: Any) -> Any:
    """Stand-in for the function that rebuilds a subclass of ``Tensor``, or a ``Tensor`` with attributes."""
    if isinstance(kind, str):
        return Distributed(kind, state)
    if type(arguments) is not tuple:  # the scan of the instructions has limited tuples
        raise pickle.UnpicklingError(f"arguments in a {type(arguments).__name__}")
    return _function(*arguments)


def _attribute(owner: Any, name: str) -> Any:
    """Stand-in for ``getattr``, with which enum members and nested classes are pickled. Does not read any attribute."""
    return Kept if (owner, name) == ("ShardedTensor", "ProcessGroupState") else name


def _latin(text: str, encoding: str = "latin1") -> bytes:
    """Stand-in for ``_codecs.encode``, with which protocol 2 encodes bytes."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"bytes in the encoding {encoding!r}")
    return text.encode("latin1")


def _no_bytes() -> bytes:
    """Stand-in for ``bytes()``, which protocol 2 calls for empty bytes. ``bytes(n)`` would allocate ``n`` bytes."""
    return b""


def _path(*parts: str) -> str:
    return "/".join(parts)


def _size(numbers: Any = ()) -> tuple[int, ...]:
    """Stand-in for ``torch.Size``."""
    if not isinstance(numbers, (list, tuple)) or not all(type(number) is int for number in numbers):
        raise pickle.UnpicklingError("a size of other values than integers")
    return tuple(numbers)


_COPIED = (str, bytes, bytearray, list, tuple, dict, set, frozenset)
_COPYING = (set, frozenset, OrderedDict)
"""Classes that a pickle can call with a list."""
_FREE_COPIES = 1_000_000
_COPIES_PER_BYTE = 64
"""Maximum number of copied elements and characters: these for any file, and the others for each of its bytes."""
_MAX_DEPTH = 100
"""Maximum number of containers inside of each other. Those of checkpoints have some 10."""
_STORAGES = {
    "DoubleStorage": "float64", "FloatStorage": "float32", "HalfStorage": "float16", "BFloat16Storage": "bfloat16",
    "LongStorage": "int64", "IntStorage": "int32", "ShortStorage": "int16", "CharStorage": "int8",
    "ByteStorage": "uint8", "BoolStorage": "bool", "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
}  # fmt: skip

_BUILTINS = {"set": set, "frozenset": frozenset, "complex": complex, "getattr": _attribute, "bytes": _no_bytes}
_PATHS = dict.fromkeys(("PosixPath", "WindowsPath", "PurePosixPath"), _path)
_DCP = "torch.distributed.checkpoint"
_SHARDED = "torch.distributed._shard"
_TENSOR = "torch.distributed.tensor"

ALLOWED: dict[str, dict[str, Any]] = {
    "collections": {"OrderedDict": OrderedDict},
    "builtins": _BUILTINS,
    "__builtin__": _BUILTINS,
    "_codecs": {"encode": _latin},
    "pathlib": _PATHS,
    "pathlib._local": _PATHS,
    "torch": {**{dtype: dtype for dtype in SIZES}, **_STORAGES, "Size": _size, "device": _first, "Tensor": Kept},
    "torch.storage": {"UntypedStorage": "uint8"},
    "torch.nn.parameter": {"Parameter": Kept, "Buffer": Kept},
    "torch.serialization": {"_get_layout": _first},
    "torch._utils": {
        "_rebuild_tensor_v2": _tensor_v2,
        "_rebuild_tensor_v3": _tensor_v3,
        "_rebuild_parameter": _first,
        "_rebuild_parameter_with_state": _first,
        "_rebuild_wrapper_subclass": _kept_arguments,
    },
    "torch._tensor": {"_rebuild_from_type_v2": _from_type},
    f"{_DCP}.metadata": {
        "Metadata": Metadata,
        "TensorStorageMetadata": TensorMetadata,
        "BytesStorageMetadata": BytesMetadata,
        "TensorProperties": Properties,
        "_MEM_FORMAT_ENCODING": _first,
        **dict.fromkeys(("ChunkStorageMetadata", "MetadataIndex", "StorageMeta"), Kept),
    },
    f"{_DCP}.filesystem": {"_StorageInfo": Region},
    _TENSOR: {"DTensor": "DTensor"},
    f"{_TENSOR}._api": {"DTensor": "DTensor"},
    f"{_TENSOR}._dtensor_spec": {
        "DTensorSpec": Kept,
        "TensorMeta": TensorMeta,
        "ShardOrderEntry": ShardOrderEntry,
    },
    f"{_TENSOR}.placement_types": {
        "Shard": Shard,
        "_StridedShard": StridedShard,
        "Replicate": Replicate,
        "Partial": Partial,
    },
    "torch.distributed.device_mesh": {"DeviceMesh": Kept},
    "torch.distributed._mesh_layout": {"_MeshLayout": Kept, "_FlatLayout": Kept},
    f"{_SHARDED}.sharded_tensor.api": {"ShardedTensor": "ShardedTensor"},
    f"{_SHARDED}.sharded_tensor.shard": {"Shard": Kept},
    f"{_SHARDED}.sharded_tensor.metadata": {
        "ShardedTensorMetadata": Kept,
        "TensorProperties": Properties,
        "MEM_FORMAT_ENCODING": _first,
    },
    f"{_SHARDED}.metadata": {"ShardMetadata": Kept},
    f"{_SHARDED}.sharding_spec.chunk_sharding_spec": {"ChunkShardingSpec": Kept},
    f"{_SHARDED}.sharding_spec.api": {"EnumerableShardingSpec": Kept},
    "torch.distributed.remote_device": {"_remote_device": Kept},
}
"""Module -> name in a pickle -> its stand-in."""


class _RefusedName(Exception):
    """A pickle contains a name that is not in ``ALLOWED``."""


class _Excess(Exception):
    """A pickle makes too many copies of its own parts."""


class _Reader(pickle.Unpickler):
    """Reads one pickle.

    Attributes:
        num_left: how many elements and characters its calls may still copy.
    """

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self.num_left = _FREE_COPIES + _COPIES_PER_BYTE * len(data)

    def find_class(self, module: str, name: str) -> Any:
        try:
            found = ALLOWED[module][name]
        except KeyError:
            raise _RefusedName(f"{module}.{name}") from None
        return _Counted(found, self) if isinstance(found, FunctionType) or found in _COPYING else found

    def count(self, num_copied: int) -> None:
        """Count the elements and characters that a call copies. Raises ``_Excess`` if they are too many."""
        self.num_left -= num_copied
        if self.num_left < 0:
            raise _Excess("calls that copy the same parts again and again")

    def persistent_load(self, pid: Any) -> PickledStorage:
        kind, dtype, key, _location, numel = pid
        if kind != "storage" or not isinstance(dtype, str) or not isinstance(numel, int):
            raise pickle.UnpicklingError("a reference to something else than a storage")
        return PickledStorage(str(key), dtype, numel)


def _is_expanded_too_far(value: Any, num_bytes: int) -> bool:
    """Whether a walk through an object would take much longer than reading it: shared parts contain shared parts."""
    limit = 10 * num_bytes + 100_000  # a reference to a part takes two bytes
    path, count = [iter((value,))], 0
    while path:
        for item in path[-1]:
            count += 1
            if isinstance(item, dict):
                path.append(chain(item.keys(), item.values()))
            elif isinstance(item, (tuple, list, set, frozenset)):
                path.append(iter(item))
            elif isinstance(item, Kept):
                path.append(iter(item.__dict__.values()))
            else:
                continue
            break
        else:
            path.pop()
        if count > limit or len(path) > _MAX_DEPTH:
            return True
    return False


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Do not search for cycles among the many new objects: it takes more than half of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def read_pickle(data: bytes, place: Path | str) -> Any:
    """Return the pickled object, with stand-ins for torch's classes. Problems name ``place`` as the file.

    Raises:
        CheckpointError: the pickle contains a name that is not allowed, or is damaged.
    """
    excess = excessive(data)
    if excess is not None:
        refuse("FSDP-E455", place, f"contains a pickle with {excess}.")
    try:
        with _without_garbage_collection():
            value = _Reader(data).load()
            if _is_expanded_too_far(value, len(data)):
                excess = "lists or dicts that contain each other too often or too deeply"
    except _RefusedName as error:
        message = f"contains a pickle that refers to {error}, which no checkpoint needs. It was not executed."
        fix = "Do not load this file with other tools. Use a copy of the checkpoint from a source that you trust."
        refuse("FSDP-E454", place, message, fix)
    except _Excess as error:
        excess = str(error)
    except Exception as error:
        # A damaged pickle can raise any exception, because any byte can be an instruction.
        refuse("FSDP-E453", place, f"contains a damaged pickle ({type(error).__name__}: {error}).")
    if excess is not None:
        refuse("FSDP-E455", place, f"contains a pickle with {excess}.")
    return value
