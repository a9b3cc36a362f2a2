"""``.metadata`` from arrays is what torch would pickle from its objects."""

from __future__ import annotations

import pickle

import numpy
import pytest
import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

from hf_fsdp_plugin.checkpoint.writing.dcp_files import Chunks, MetadataPickle

FILES = [f"__{rank}_0.distcp" for rank in range(300)]


@pytest.mark.parametrize("ndim", [0, 1, 2, 4])
@pytest.mark.parametrize("largest", [100, 1 << 40])
def test_numbers_of_all_chunks_are_unpickled(ndim: int, largest: int) -> None:
    draw = numpy.random.default_rng(ndim)
    count = 1 if ndim == 0 else 7
    places = numpy.stack([draw.integers(0, len(FILES), count), *draw.integers(0, largest, (3, count))], axis=1)
    offsets = draw.integers(0, largest, (count, ndim))
    offsets[:, :1] = largest - numpy.arange(count)[:, None]  # each one is the key of a chunk
    chunks = Chunks(places, offsets, draw.integers(0, 100, (count, ndim)))
    pickled = MetadataPickle(FILES, save_id="the save")
    pickled.add_tensor(("model", "first"), "bfloat16", (2, 3), chunks)
    pickled.add_tensor(("model", "tied"), "bfloat16", (2, 3), chunks)
    pickled.add_value(("param_groups", 0, "lr"), 299, 5, 1 << 33)
    data = b"".join(pickled.finished())
    found = pickle.loads(data)
    assert found.planner_data["param_groups.0.lr"] == ("param_groups", 0, "lr")
    assert found.storage_data[MetadataIndex("param_groups.0.lr")].relative_path == FILES[299]
    assert b"the save" in data[-128:] and found.storage_meta.save_id == "the save"
    for name in ("model.first", "model.tied"):
        tensor = found.state_dict_metadata[name]
        assert (tensor.properties.dtype, tensor.size) == (torch.bfloat16, torch.Size((2, 3)))
        boxes = [[torch.Size(row) for row in part.tolist()] for part in (chunks.offsets, chunks.sizes)]
        assert tensor.chunks == [ChunkStorageMetadata(*box) for box in zip(*boxes, strict=True)]
        for index, (offset, (file, start, length, _)) in enumerate(zip(boxes[0], places.tolist(), strict=True)):
            info = found.storage_data[MetadataIndex(name, offset, index)]
            assert (info.relative_path, info.offset, info.length) == (FILES[file], start, length)
