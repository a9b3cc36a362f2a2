"""The types of the elements of stored tensors: their sizes, and their names in numpy and in safetensors files."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import numpy


_FLOAT8 = "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"


_RAW = {"bfloat16": "uint16", **dict.fromkeys(_FLOAT8, "uint8")}
"""Types that numpy does not have -> the unsigned integers of the same size."""


SIZES: Final[Mapping[str, int]] = MappingProxyType({
    "bool": 1, "uint8": 1, "int8": 1, "uint16": 2, "int16": 2, "uint32": 4, "int32": 4, "uint64": 8, "int64": 8,
    "float16": 2, "float32": 4, "float64": 8, "complex64": 8, "complex128": 16,
    "bfloat16": 2, **dict.fromkeys(_FLOAT8, 1),
})  # fmt: skip
"""Type -> bytes per element."""


SAFETENSORS_NAMES: Final[Mapping[str, str]] = MappingProxyType({
    "complex64": "C64", "float64": "F64", "int64": "I64", "uint64": "U64", "float32": "F32", "int32": "I32",
    "uint32": "U32", "bfloat16": "BF16", "float16": "F16", "int16": "I16", "uint16": "U16", "bool": "BOOL",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "float8_e8m0fnu": "F8_E8M0", "int8": "I8", "uint8": "U8",
})  # fmt: skip
"""Type -> its name in the headers of safetensors files that this package writes."""


def dtype_size(dtype: str) -> int:
    """Return the bytes per element. Raises ``ValueError`` for an unknown type."""
    if dtype not in SIZES:
        raise ValueError(f"unknown element type {dtype!r}; known types: {', '.join(sorted(SIZES))}.")
    return SIZES[dtype]


def numpy_dtype(dtype: str) -> numpy.dtype:
    """Return the little-endian numpy type with the same bytes; bfloat16 and float8 are raw unsigned integers."""
    import numpy

    dtype_size(dtype)
    return numpy.dtype(_RAW.get(dtype, dtype)).newbyteorder("<")
