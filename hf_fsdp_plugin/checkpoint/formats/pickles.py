"""An unpickler for torch's pickles that does not import torch. ``ALLOWED`` lists the names that a pickle may contain.

Classes and functions of torch are never called: each is replaced by a stand-in from this file, which only stores its
arguments. A pickle with any other name is refused.
"""

from __future__ import annotations

import io
import pickle
import reprlib
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hf_fsdp_plugin.checkpoint.errors import refuse
from hf_fsdp_plugin.checkpoint.file_io import without_collection
from hf_fsdp_plugin.checkpoint.formats.stored_tensors import SIZES


class PickledStorage(NamedTuple):
    """A storage: the zip record that contains its bytes, and its dtype."""

    key: str
    dtype: str


class PickledTensor(NamedTuple):
    """A tensor as a view of a storage. The offset and the strides are in elements."""

    storage: PickledStorage
    dtype: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class Kept:
    """Stand-in for a class of torch: an object with the attributes that were pickled."""

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)
        else:  # classes with slots have two dicts, of which the first is often None
            for attributes in state if isinstance(state, tuple) else (state,):
                self.__dict__.update(attributes or {})


class Properties(Kept):
    """DCP's ``TensorProperties``, pickled as a tuple that begins with the dtype."""

    dtype: str

    def __setstate__(self, state: Any) -> None:
        self.dtype = state[0] if isinstance(state, tuple) else state["dtype"]


class Metadata(Kept):
    """The contents of ``.metadata``, with the attributes that torch gives it and what it contains.

    Tensors have ``properties``, a ``size`` and boxes (``chunks``), and an entry has a file and the range of its bytes.
    """


class BytesMetadata(Kept):
    """An entry of a state dict that is not a tensor."""


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


class KeptArguments(tuple[Any, ...]):
    """Stand-in for named tuples, and for calls of which all arguments are needed. A named tuple has to be a class."""

    __slots__ = ()

    def __new__(cls, *arguments: Any) -> KeptArguments:
        return super().__new__(cls, arguments)


class TensorMeta(NamedTuple):
    """A DTensor's global shape, strides and dtype."""

    shape: Any
    strides: Any
    dtype: str


def _tensor(storage: PickledStorage, dtype: str, offset: int, size: Any, strides: Any) -> PickledTensor:
    numbers = (offset, *size, *strides)
    if dtype not in SIZES or len(size) != len(strides) or not all(type(n) is int and n >= 0 for n in numbers):
        found = [reprlib.repr(each) for each in (dtype, size, strides, offset)]  # short, whatever the pickle contains
        raise pickle.UnpicklingError("a tensor of dtype {}, shape {}, strides {}, offset {}".format(*found))
    return PickledTensor(storage, dtype, offset, tuple(size), tuple(strides))


def _first(value: Any, *_: Any) -> Any:
    """Stand-in for calls of which only the first argument is needed: ``Parameter``, ``torch.device``, enums."""
    return value


def _from_type(_function: Any, kind: Any, arguments: Any, state: Any) -> Any:
    """Stand-in for the function that rebuilds a subclass of ``Tensor``, or a ``Tensor`` with attributes."""
    if isinstance(kind, str):
        return Distributed(kind, state)
    return _function(*arguments)


def _attribute(owner: Any, name: str) -> Any:
    """Stand-in for ``getattr``, with which enum members and nested classes are pickled. Does not read any attribute."""
    return Kept if (owner, name) == ("ShardedTensor", "ProcessGroupState") else name


def _latin(text: str, encoding: str = "latin1") -> bytes:
    """Stand-in for ``_codecs.encode``, with which protocol 2 encodes bytes."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"bytes in the encoding {encoding!r}")
    return text.encode("latin1")


_STORAGES = {
    "DoubleStorage": "float64", "FloatStorage": "float32", "HalfStorage": "float16", "BFloat16Storage": "bfloat16",
    "LongStorage": "int64", "IntStorage": "int32", "ShortStorage": "int16", "CharStorage": "int8",
    "ByteStorage": "uint8", "BoolStorage": "bool", "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
}  # fmt: skip

# Protocol 2 calls ``bytes()`` for empty bytes.
_BUILTINS = {"set": set, "frozenset": frozenset, "complex": complex, "getattr": _attribute, "bytes": lambda: b""}
_PATHS = dict.fromkeys(("PosixPath", "WindowsPath", "PurePosixPath"), lambda *parts: "/".join(parts))
_DCP = "torch.distributed.checkpoint"
_SHARDED = "torch.distributed._shard"
_TENSOR = "torch.distributed.tensor"

ALLOWED: dict[str, dict[str, Any]] = {
    "collections": {"OrderedDict": OrderedDict},
    **dict.fromkeys(("builtins", "__builtin__"), _BUILTINS),
    "_codecs": {"encode": _latin},
    **dict.fromkeys(("pathlib", "pathlib._local"), _PATHS),
    "torch": {**{dtype: dtype for dtype in SIZES}, **_STORAGES, "Size": tuple, "device": _first, "Tensor": Kept},
    "torch.storage": {"UntypedStorage": "uint8"},
    "torch.nn.parameter": {"Parameter": Kept, "Buffer": Kept},
    "torch.serialization": {"_get_layout": _first},
    "torch._utils": {
        "_rebuild_tensor_v2": lambda storage, *values: _tensor(storage, storage.dtype, *values[:3]),
        # for dtypes without a storage class: the storage is untyped, and the dtype is an argument
        "_rebuild_tensor_v3": lambda storage, *values: _tensor(storage, values[5], *values[:3]),
        **dict.fromkeys(("_rebuild_parameter", "_rebuild_parameter_with_state"), _first),
        "_rebuild_wrapper_subclass": KeptArguments,
    },
    "torch._tensor": {"_rebuild_from_type_v2": _from_type},
    f"{_DCP}.metadata": {
        "Metadata": Metadata,
        "BytesStorageMetadata": BytesMetadata,
        "TensorProperties": Properties,
        "_MEM_FORMAT_ENCODING": _first,
        **dict.fromkeys(("TensorStorageMetadata", "ChunkStorageMetadata", "MetadataIndex", "StorageMeta"), Kept),
    },
    f"{_DCP}.filesystem": {"_StorageInfo": Kept},
    _TENSOR: {"DTensor": "DTensor"},
    f"{_TENSOR}._api": {"DTensor": "DTensor"},
    f"{_TENSOR}._dtensor_spec": {"DTensorSpec": Kept, "TensorMeta": TensorMeta, "ShardOrderEntry": KeptArguments},
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
    "deepspeed.runtime.fp16.loss_scaler": dict.fromkeys(("LossScaler", "DynamicLossScaler"), Kept),
    "deepspeed.runtime.zero.config": {"ZeroStageEnum": _first},
    "deepspeed.utils.tensor_fragment": {"fragment_address": Kept},
    "deepspeed.checkpoint.universal_checkpoint": {"SubparamShape": Kept},
    "argparse": {"Namespace": Kept},  # the arguments of a script
    "types": {"SimpleNamespace": Kept},
}
"""Module -> name in a pickle -> its stand-in."""


class _RefusedName(Exception):
    """A pickle contains a name that is not in ``ALLOWED``."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name not in ALLOWED.get(module, ()):
            raise _RefusedName(f"{module}.{name}")
        return ALLOWED[module][name]

    def persistent_load(self, reference: Any) -> PickledStorage:
        kind, dtype, key, *_ = reference
        if kind != "storage" or not isinstance(dtype, str) or not isinstance(key, str):
            raise pickle.UnpicklingError("a reference to something else than a storage")
        return PickledStorage(key, dtype)


@without_collection()
def read_pickle(data: bytes, place: Path | str) -> Any:
    """Return the pickled object, with stand-ins for torch's classes. Problems name ``place`` as the file.

    Raises:
        CheckpointError: the pickle contains a name that is not allowed, or is damaged.
    """
    try:
        return _Unpickler(io.BytesIO(data)).load()
    except _RefusedName as error:
        message = f"contains a pickle that refers to {error}, which no checkpoint needs. It was not executed."
        fix = "Do not load this file with other tools. Use a copy of the checkpoint from a source that you trust."
        refuse("FSDP-E454", place, message, fix)
    except Exception as error:
        # A damaged pickle can raise any exception, because any byte can be an instruction.
        refuse("FSDP-E453", place, f"contains a damaged pickle ({type(error).__name__}: {error}).")
