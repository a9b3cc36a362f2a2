"""The boxes of a rank's part of a DTensor, compared with torch."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.tensor import placement_types
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

from hf_fsdp_plugin.checkpoint.formats.boxes import row_major
from hf_fsdp_plugin.checkpoint.formats.pickles import (
    Distributed,
    Partial,
    PickledStorage,
    PickledTensor,
    Replicate,
    Shard,
    StridedShard,
)
from hf_fsdp_plugin.checkpoint.formats.torch_files import parts_of

SHAPES = [(7, 5), (1, 3), (2, 2), (8, 6), (3, 1)]
MESHES = [(2,), (3,), (4,), (2, 2), (3, 2)]


def split(dim: int) -> Shard:
    placement = Shard()
    placement.dim = dim
    return placement


def pickled(shape: tuple[int, ...], local: tuple[int, ...], mesh: Any, coordinate: Any, placements: Any) -> Distributed:
    storage = PickledStorage("0", "float32")
    axes = tuple(SimpleNamespace(shape=(size,)) for size in mesh)
    spec = SimpleNamespace(
        mesh=SimpleNamespace(_layout=SimpleNamespace(axes=axes), _coordinate_on_dim=coordinate),
        placements=placements,
        tensor_meta=SimpleNamespace(shape=shape),
    )
    tensor = PickledTensor(storage, "float32", 0, local, row_major(local))
    return Distributed("DTensor", {"_local_tensor": tensor, "_spec": spec})


@pytest.mark.parametrize(("shape", "mesh"), itertools.product(SHAPES, MESHES), ids=str)
def test_box_matches_torch_for_uneven_shards(shape: tuple[int, ...], mesh: tuple[int, ...]) -> None:
    for dims in itertools.product((None, 0, 1), repeat=len(mesh)):
        theirs = [placement_types.Replicate() if dim is None else placement_types.Shard(dim) for dim in dims]
        ours = tuple(Replicate() if dim is None else split(dim) for dim in dims)
        for coordinate in itertools.product(*map(range, mesh)):
            local, offset = _compute_local_shape_and_global_offset(shape, mesh, list(coordinate), theirs)
            found_shape, parts = parts_of(pickled(shape, tuple(local), mesh, coordinate, ours))
            assert found_shape == shape
            if 0 in local:
                assert parts == []
            else:
                ((box, _),) = parts
                assert (box.sizes, box.offsets) == (tuple(local), tuple(offset))


@pytest.mark.parametrize("placement", [Partial(), StridedShard()], ids=lambda p: type(p).__name__)
def test_unsupported_placements_are_refused(placement: Any) -> None:
    with pytest.raises(ValueError, match=type(placement).__name__):
        parts_of(pickled((4, 4), (2, 4), (2,), (0,), (placement,)))


def test_part_of_wrong_size_is_refused() -> None:
    with pytest.raises(ValueError, match=r"shape \(3, 4\)"):
        parts_of(pickled((4, 4), (3, 4), (2,), (0,), (split(0),)))
