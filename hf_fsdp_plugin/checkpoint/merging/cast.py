"""Converts floating-point data to another dtype, with the same rounding as torch but without importing it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hf_fsdp_plugin.checkpoint.formats.element_types import numpy_dtype

if TYPE_CHECKING:
    from numpy.typing import NDArray

FLOATS = ("float64", "float32", "bfloat16", "float16")
"""The dtypes that are converted. Integers, booleans and quantized weights keep their dtype."""


def cast(data: memoryview, source: str, target: str, out: memoryview) -> int:
    """Convert ``data`` to the dtype ``target`` in ``out``, rounding to nearest even. NaN stays NaN.

    Returns:
        The number of finite values that became infinite.
    """
    import numpy

    values = numpy.frombuffer(data, numpy_dtype(source))
    if source == "bfloat16":
        values = (values.astype("<u4") << 16).view("<f4")
    converted = numpy.frombuffer(out, numpy_dtype(target))
    with numpy.errstate(over="ignore", invalid="ignore"):
        if target == "bfloat16":
            converted[:] = _to_bfloat16(values.astype("<f4", copy=False))
            infinite = (converted & 0x7FFF) == 0x7F80
        else:
            converted[:] = values
            infinite = numpy.isinf(converted)
    return int(numpy.count_nonzero(numpy.isfinite(values[infinite])))


def _to_bfloat16(values: NDArray[Any]) -> NDArray[Any]:
    """Round each float32 to its upper half. A NaN that would round to infinity becomes a quiet NaN."""
    import numpy

    bits = values.view("<u4")
    rounded = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype("<u2")
    nan = numpy.isnan(values)
    rounded[nan] = (bits[nan] >> 16).astype("<u2") | 0x0040
    return rounded
