"""The layouts of an optimizer's state tensors, for saving, loading and verification.

A state tensor is sharded like its parameter, or it is one number that is equal on all ranks. To support state with a
different shape (Adafactor's rows and columns), add a layout here, and its case in ``shards.py`` and
``reading/optimizer.py``.
"""

from __future__ import annotations

import math
from typing import Literal

StateLayout = Literal["like_parameter", "scalar", "unsupported"]


def state_layout(key: str, shape: tuple[int, ...], parameter_shape: tuple[int, ...]) -> StateLayout:
    """Return the layout of the state tensor ``key``. Both shapes are of whole tensors, or both are of local tensors."""
    if math.prod(shape) == 1 and (key == "step" or shape != parameter_shape):
        return "scalar"
    return "like_parameter" if shape == parameter_shape else "unsupported"
