"""Counts the calls of a function: a measure of its work that does not depend on the machine."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def calls_of(function: Callable[[], Any]) -> tuple[Any, int]:
    """Return the result of a function, and the number of calls of functions in it, of Python and of C."""
    count = 0

    def profile(_frame: Any, event: str, _argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        return function(), count
    finally:
        sys.setprofile(None)
