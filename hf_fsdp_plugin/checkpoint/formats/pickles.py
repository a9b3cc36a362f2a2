"""A reader of torch's pickles that does not import torch. ``ALLOWED`` lists the names that a pickle may contain.

Python's unpickler calls what a pickle refers to, and a pickle of a few bytes can exhaust its memory, time or stack:

- Python hashes a key of a dict by visiting each tuple in it as often as it occurs. 60 tuples, each of which contains
  the previous one twice, take 2^60 visits; a million tuples inside each other overflow the stack.
- A call that copies a list, again and again, takes more memory than the file has bytes.

:class:`_Reader` checks these instructions before Python's unpickler executes them, and counts the steps. Classes and
functions of torch are never called: each is replaced by a stand-in from this file, which only stores its arguments. A
pickle is rejected if it contains any other name, or arguments that a stand-in does not accept.
"""

from __future__ import annotations

import io
import pickle
import reprlib
from collections.abc import Callable, Iterable
from functools import partial
from itertools import chain, islice
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from hf_fsdp_plugin.checkpoint.errors import refuse
from hf_fsdp_plugin.checkpoint.formats.boxes import SIZES
from hf_fsdp_plugin.checkpoint.io import without_collection


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
    """The contents of ``.metadata``, with the attributes that torch gives it: tensors, their file ranges and paths."""


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


def _kept_arguments(*arguments: Any) -> Any:
    return arguments


def _from_type(_function: Any, kind: Any, arguments: Any, state: Any) -> Any:
    """Stand-in for the function that rebuilds a subclass of ``Tensor``, or a ``Tensor`` with attributes."""
    if isinstance(kind, str):
        return Distributed(kind, state)
    if type(arguments) is not tuple or not isinstance(_function, FunctionType):
        raise pickle.UnpicklingError(f"a call of {type(_function).__name__} with a {type(arguments).__name__}")
    return _function(*arguments)


def _attribute(owner: Any, name: str) -> Any:
    """Stand-in for ``getattr``, with which enum members and nested classes are pickled. Does not read any attribute."""
    return Kept if (owner, name) == ("ShardedTensor", "ProcessGroupState") else name


def _latin(text: str, encoding: str = "latin1") -> bytes:
    """Stand-in for ``_codecs.encode``, with which protocol 2 encodes bytes."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"bytes in the encoding {encoding!r}")
    return text.encode("latin1")


def _size(numbers: Any = ()) -> tuple[int, ...]:
    """Stand-in for ``torch.Size``."""
    if not isinstance(numbers, (list, tuple)) or not all(type(number) is int for number in numbers):
        raise pickle.UnpicklingError("a size of other values than integers")
    return tuple(numbers)


_COPIED = (str, bytes, bytearray, list, dict, set)
"""Types that a call may copy, apart from tuples."""
_CONTAINERS = (tuple, list, dict, set, frozenset, Kept)
_HASHED = (tuple, frozenset)
"""Types that can be hashed and whose objects can contain each other."""
MAX_TUPLE = 10_000
"""Maximum number of values in a tuple, in all tuples inside it. Those of checkpoints have less than 100."""
_FREE_STEPS = 1_000_000
_STEPS_PER_BYTE = 4
"""Maximum number of values that are visited or copied: a number for every file, and more for each of its bytes."""
_MAX_DEPTH = 100
"""Maximum number of containers inside of each other. Those of checkpoints have some 10."""
_MAX_PICKLES = 5
"""Number of pickles in a file of torch before 1.6, which has no archive."""
_STORAGES = {
    "DoubleStorage": "float64", "FloatStorage": "float32", "HalfStorage": "float16", "BFloat16Storage": "bfloat16",
    "LongStorage": "int64", "IntStorage": "int32", "ShortStorage": "int16", "CharStorage": "int8",
    "ByteStorage": "uint8", "BoolStorage": "bool", "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
}  # fmt: skip

# Protocol 2 calls ``bytes()`` for empty bytes, and ``OrderedDict()`` before it adds items. With arguments, ``bytes(n)``
# would allocate ``n`` bytes, and ``OrderedDict(list)`` would hash keys that are not counted.
_BUILTINS = {"set": set, "frozenset": frozenset, "complex": complex, "getattr": _attribute, "bytes": lambda: b""}
_PATHS = dict.fromkeys(("PosixPath", "WindowsPath", "PurePosixPath"), lambda *parts: "/".join(parts))
_DCP = "torch.distributed.checkpoint"
_SHARDED = "torch.distributed._shard"
_TENSOR = "torch.distributed.tensor"

ALLOWED: dict[str, dict[str, Any]] = {
    "collections": {"OrderedDict": lambda: {}},
    **dict.fromkeys(("builtins", "__builtin__"), _BUILTINS),
    "_codecs": {"encode": _latin},
    **dict.fromkeys(("pathlib", "pathlib._local"), _PATHS),
    "torch": {**{dtype: dtype for dtype in SIZES}, **_STORAGES, "Size": _size, "device": _first, "Tensor": Kept},
    "torch.storage": {"UntypedStorage": "uint8"},
    "torch.nn.parameter": {"Parameter": Kept, "Buffer": Kept},
    "torch.serialization": {"_get_layout": _first},
    "torch._utils": {
        "_rebuild_tensor_v2": lambda storage, *values: _tensor(storage, storage.dtype, *values[:3]),
        # for dtypes without a storage class: the storage is untyped, and the dtype is an argument
        "_rebuild_tensor_v3": lambda storage, *values: _tensor(storage, values[5], *values[:3]),
        **dict.fromkeys(("_rebuild_parameter", "_rebuild_parameter_with_state"), _first),
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
    f"{_TENSOR}._dtensor_spec": {"DTensorSpec": Kept, "TensorMeta": TensorMeta, "ShardOrderEntry": _kept_arguments},
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


class _Excess(Exception):
    """The pickle exhausts memory, time or the stack; the text is the reason."""


class _Reader(pickle._Unpickler):
    """Python's unpickler, with the names of ``ALLOWED``, and with checks before it hashes, copies, calls or fills.

    It is the unpickler in Python, whose instructions can be replaced one by one. The one in C has no place for checks.

    Args:
        num_bytes: size of the pickle, which limits the number of values that are visited or copied.
        scan: only count. No name is refused, and calls return an unknown object.
    """

    if TYPE_CHECKING:
        stack: list[Any]
        metastack: list[list[Any]]
        append: Callable[[Any], None]
        pop_mark: Callable[[], list[Any]]

    def __init__(self, file: io.BytesIO, num_bytes: int, *, scan: bool = False) -> None:
        super().__init__(file)
        self._file = file
        self._steps_left, self._scan = _FREE_STEPS + _STEPS_PER_BYTE * num_bytes, scan

    def load(self) -> Any:
        """Return the pickled object. Reads from the file without the buffer for frames, which takes a third longer."""
        read = self.read = self._file.read
        self.readline, self.readinto = self._file.readline, self._file.readinto
        self.metastack, self.stack, self.proto = [], [], 0
        self.append = self.stack.append
        dispatch = self.dispatch
        try:
            while code := read(1):
                dispatch[code[0]](self)
        except pickle._Stop as end:  # type: ignore[attr-defined]
            return end.value
        raise EOFError("the pickle has no end")

    def find_class(self, module: str, name: str) -> Any:
        if self._scan:
            return Kept
        if name not in ALLOWED.get(module, ()):
            raise _RefusedName(f"{module}.{name}")
        return ALLOWED[module][name]

    def persistent_load(self, reference: Any) -> PickledStorage:
        kind, dtype, key, *_ = ("storage", "", "") if self._scan else reference
        if kind != "storage" or not isinstance(dtype, str) or not isinstance(key, str):
            raise pickle.UnpicklingError("a reference to something else than a storage")
        return PickledStorage(key, dtype)

    def _count(self, num_steps: int) -> None:
        self._steps_left -= num_steps
        if self._steps_left < 0:
            raise _Excess("keys or copies of the same parts again and again")

    def _count_visits(self, values: Iterable[Any]) -> None:
        """Count what Python visits when it hashes each of these values."""
        for value in values:
            if isinstance(value, _HASHED):
                count = _num_visits(value, MAX_TUPLE, _HASHED)
                if count is None:
                    reason = f"a tuple of more than {MAX_TUPLE:,} values, or {_MAX_DEPTH} tuples inside each other"
                    raise _Excess(reason)
                self._count(count)

    def _fill(self, kind: type[Any], count: int | None = None) -> None:
        """Add the last ``count`` objects, or all after the last mark, to the container before them.

        A scan does not know the container if a call has returned it.
        """
        items = self.pop_mark() if count is None else [self.stack.pop() for _ in range(count)][::-1]
        self._count_visits(items if kind is set else items[::2] if kind is dict else ())
        target = self.stack[-1]
        if not isinstance(target, kind):
            if not self._scan:
                raise pickle.UnpicklingError(f"items of a {type(target).__name__}")
        elif isinstance(target, list):
            target.extend(items)
        else:
            target.update(items if kind is set else zip(items[::2], items[1::2], strict=True))

    def _make_dict(self) -> None:
        items = self.pop_mark()
        self._count_visits(items[::2])
        self.append(dict(zip(items[::2], items[1::2], strict=True)))

    def _make_frozenset(self) -> None:
        items = self.pop_mark()
        self._count_visits(items)
        self.append(frozenset(items))

    def _call(self) -> None:
        """Call a function or a class; the pickle has both as an instruction."""
        arguments, function = self.stack.pop(), self.stack.pop()
        if type(arguments) is not tuple:
            raise pickle.UnpicklingError(f"arguments in a {type(arguments).__name__}")
        if arguments:
            self._count_arguments(arguments)
        self.append(Kept() if self._scan else function(*arguments))

    def _count_arguments(self, arguments: tuple[Any, ...]) -> None:
        """Count what a call may hash or copy."""
        self._count_visits((arguments,))
        level: list[Any] = [arguments]
        while level:  # the tuple is not deep, which was just checked
            parts = [part for inner in level for part in inner]
            self._count(sum(len(part) for part in parts if isinstance(part, _COPIED)))
            level = [part for part in parts if isinstance(part, _HASHED)]
        for argument in arguments:
            if isinstance(argument, (list, set)):
                self._count_visits(argument)

    def _set_attributes(self) -> None:
        state, target = self.stack.pop(), self.stack[-1]
        if isinstance(state, dict):
            self._count(len(state))
        elif isinstance(state, tuple):
            self._count(sum(len(part) for part in state if isinstance(part, dict)))
        if self._scan:
            return
        if isinstance(target, Kept):
            target.__setstate__(state)
        elif not isinstance(target, dict):  # a state dict's own attributes are skipped
            raise pickle.UnpicklingError(f"attributes of a {type(target).__name__}")

    def _skip_frame(self) -> None:
        """Skip the size of a frame: the instructions in it follow."""
        self.read(8)

    def _refuse(self) -> None:
        raise pickle.UnpicklingError("an instruction that torch does not write")

    dispatch: ClassVar[dict[int, Callable[..., None]]] = {
        **pickle._Unpickler.dispatch,
        pickle.APPEND[0]: partial(_fill, kind=list, count=1),
        pickle.APPENDS[0]: partial(_fill, kind=list),
        pickle.SETITEM[0]: partial(_fill, kind=dict, count=2),
        pickle.SETITEMS[0]: partial(_fill, kind=dict),
        pickle.ADDITEMS[0]: partial(_fill, kind=set),
        pickle.DICT[0]: _make_dict,
        pickle.FROZENSET[0]: _make_frozenset,
        pickle.REDUCE[0]: _call,
        pickle.NEWOBJ[0]: _call,
        pickle.BUILD[0]: _set_attributes,
        pickle.FRAME[0]: _skip_frame,
        **dict.fromkeys(
            (pickle.INST[0], pickle.OBJ[0], pickle.NEWOBJ_EX[0], pickle.EXT1[0], pickle.EXT2[0], pickle.EXT4[0]),
            _refuse,
        ),
    }


def _num_visits(value: Any, limit: int, kinds: tuple[type[Any], ...]) -> int | None:
    """Return how many values a visit of ``value`` and of the containers of these kinds in it sees.

    Parts that are shared count as often as they occur. Returns ``None`` if the values are too many.
    """
    count, level = 1, [value]
    for _ in range(_MAX_DEPTH):
        parts = list(islice(chain.from_iterable(map(_parts, level)), limit + 1))
        count += len(parts)
        level = [part for part in parts if isinstance(part, kinds)]
        if not level or count > limit:
            return count if count <= limit else None
    return None


def _parts(value: Any) -> Iterable[Any]:
    if isinstance(value, Kept):
        return value.__dict__.values()
    if isinstance(value, dict):
        return chain(value.keys(), value.values())
    return value if isinstance(value, _CONTAINERS) else ()


@without_collection()
def read_pickle(data: bytes, place: Path | str) -> Any:
    """Return the pickled object, with stand-ins for torch's classes. Problems name ``place`` as the file.

    Raises:
        CheckpointError: the pickle contains a name that is not allowed, or is damaged.
    """
    try:
        value = _Reader(io.BytesIO(data), len(data)).load()
        # A reference to a part takes two bytes.
        if _num_visits(value, 10 * len(data) + 100_000, _CONTAINERS) is None:
            raise _Excess("lists or dicts that contain each other too often or too deeply")
    except _RefusedName as error:
        message = f"contains a pickle that refers to {error}, which no checkpoint needs. It was not executed."
        fix = "Do not load this file with other tools. Use a copy of the checkpoint from a source that you trust."
        refuse("FSDP-E454", place, message, fix)
    except _Excess as error:
        refuse("FSDP-E455", place, f"contains a pickle with {error}.")
    except Exception as error:
        # A damaged pickle can raise any exception, because any byte can be an instruction.
        refuse("FSDP-E453", place, f"contains a damaged pickle ({type(error).__name__}: {error}).")
    return value


def refuse_excessive(data: bytes, place: Path | str) -> None:
    """Raise a ``CheckpointError`` if pickles that another reader will read exhaust memory, time or the stack."""
    file = io.BytesIO(data)
    try:
        for _ in range(_MAX_PICKLES):
            _Reader(file, len(data), scan=True).load()
    except _Excess as error:
        refuse("FSDP-E455", place, f"contains a pickle with {error}.")
    except Exception:
        pass  # the other reader stops here, too
