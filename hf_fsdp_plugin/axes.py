"""The axes of a mesh: the names in settings and reports, and those that Accelerate and Transformers give them."""

from __future__ import annotations

from typing import Final

REPLICATE_AXIS: Final = "dp_replicate"
SHARD_AXIS: Final = "dp_shard"
CONTEXT_AXIS: Final = "cp"
TENSOR_AXIS: Final = "tp"
EXPERT_AXIS: Final = "ep"
DATA_AXIS: Final = "dp"
"""The replicate and shard axes as one. The next two are such joint axes, too."""
SHARD_CONTEXT_AXIS: Final = "dp_shard_cp"
DATA_CONTEXT_AXIS: Final = "dp_cp"
AXIS_NAMES: Final = frozenset({
    REPLICATE_AXIS, SHARD_AXIS, CONTEXT_AXIS, TENSOR_AXIS, EXPERT_AXIS, DATA_AXIS, SHARD_CONTEXT_AXIS,
    DATA_CONTEXT_AXIS,
})  # fmt: skip
"""All names of axes in meshes. The process groups of an axis are described as ``mesh_`` and its name."""

MODEL_AXES: Final = {"context": CONTEXT_AXIS, "tensor": TENSOR_AXIS, "expert": EXPERT_AXIS}
"""Axes whose ranks train the same samples, or share experts -> their name in a mesh of torch."""
