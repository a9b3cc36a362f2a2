"""Classes and functions of plain data, which the pickles of a resume may contain beside those that torch allows."""

from __future__ import annotations

import codecs
import datetime
import pathlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import torch

_PLAIN = (
    codecs.encode, frozenset, range, slice,
    datetime.date, datetime.datetime, datetime.time, datetime.timedelta, datetime.timezone,
    pathlib.Path, pathlib.PosixPath, pathlib.PurePosixPath,
)  # fmt: skip
"""Plain data that torch does not allow by default, because its own files do not contain it."""


@contextmanager
def plain_data() -> Iterator[None]:
    """Allow plain data, and what arrays and scalars of NumPy consist of, such as NumPy's random state."""
    functions: list[Any] = [numpy.zeros(0).__reduce__()[0], numpy.float64(0).__reduce__()[0]]
    # NumPy 1 has other module names.
    earlier = [(function, f"numpy.core.multiarray.{function.__name__}") for function in functions]
    dtypes = {type(numpy.dtype(kind)) for kind in numpy.sctypeDict.values()}
    allowed: list[Any] = [*_PLAIN, *functions, *earlier, *dtypes, numpy.ndarray, numpy.dtype]
    with torch.serialization.safe_globals(allowed):
        yield
