"""The types of the elements of stored tensors: their sizes, and their names in safetensors files."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

_FLOAT8 = "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"

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
