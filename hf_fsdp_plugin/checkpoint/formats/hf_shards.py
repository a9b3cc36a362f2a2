"""Reads safetensors files with shards: those of ``save_pretrained(distributed_checkpoint=True)``, and those of torch's
``HuggingFaceStorageWriter(save_distributed=True)``, which are in ``sharded/`` if they are to be consolidated.

Each file ``shard-00001-model-00001-of-00001.safetensors`` has a box of each tensor. The metadata in its header, as
``torch.distributed.checkpoint.HuggingFaceStorageWriter`` writes it, has the offsets of the boxes. The shapes of the
whole tensors are not stored: they end where the last box ends.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from hf_fsdp_plugin.checkpoint.errors import COPY_ALL_RANKS, refuse
from hf_fsdp_plugin.checkpoint.formats import boxes
from hf_fsdp_plugin.checkpoint.formats.safetensors import SHARDING_INFO, TensorEntry, read_entries
from hf_fsdp_plugin.checkpoint.formats.stored_tensors import StoredPiece, StoredState, StoredTensor, without_replicas
from hf_fsdp_plugin.checkpoint.names import FSDP_MODEL

_FILES: Final = "shard-*-model-*-of-*.safetensors"
PATTERNS: Final = (_FILES, f"sharded/{_FILES}")


def read_model(root: Path, stem: str, number: int) -> StoredState | None:
    """Return the model in a folder with such files; ``None`` if there are none. Optimizers are stored elsewhere."""
    patterns = PATTERNS if stem == FSDP_MODEL and number == 0 else ()
    names = (sorted(path.relative_to(root).as_posix() for path in root.glob(pattern)) for pattern in patterns)
    files = next(filter(None, names), [])
    pieces: dict[str, list[StoredPiece]] = {}
    dtypes: dict[str, str] = {}
    for file in files:
        for name, entry, offsets in _boxes(root / file):
            box = boxes.Box(offsets, entry.shape)
            pieces.setdefault(name, []).append(StoredPiece(box, file, entry.offset, boxes.row_major(entry.shape)))
            same = pieces[name][0].box
            if dtypes.setdefault(name, entry.dtype) != entry.dtype or len(same.sizes) != len(box.sizes):
                found = f"{entry.dtype} with {len(box.sizes)} dimensions, and {dtypes[name]} with {len(same.sizes)}"
                refuse("FSDP-E459", root / file, f"the files have {name!r} as {found}.")
    tensors: dict[tuple[Any, ...], Any] = {}
    for name, own in pieces.items():
        ends = ([at + size for at, size in zip(each.box.offsets, each.box.sizes, strict=True)] for each in own)
        shape = tuple(map(max, zip(*ends, strict=True)))
        tensors[name,] = StoredTensor(name, dtypes[name], shape, without_replicas(own))
    return StoredState(tensors, tuple(files), root, COPY_ALL_RANKS) if files else None


def _boxes(path: Path) -> list[tuple[str, TensorEntry, tuple[int, ...]]]:
    """Return name, entry and offsets of each tensor in one file."""
    metadata: dict[str, Any] = {}
    entries, found = read_entries(path, metadata=metadata), []
    try:
        places = json.loads(metadata[SHARDING_INFO])
        for name, entry in entries.items():
            offsets = tuple(places[name]["saved_offsets"])
            if len(offsets) != len(entry.shape) or not all(type(at) is int and at >= 0 for at in offsets):
                raise ValueError(f"{name!r} has the shape {entry.shape} and the offsets {offsets}")
            found.append((name, entry, offsets))
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        refuse("FSDP-E453", path, f"has no valid {SHARDING_INFO} in its header ({type(error).__name__}: {error}).")
    return found
