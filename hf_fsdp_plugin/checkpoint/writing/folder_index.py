"""Writes the index of a folder from the chunks of all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy

from hf_fsdp_plugin.checkpoint.formats.index_file import index_bytes, pack_segments
from hf_fsdp_plugin.checkpoint.writing.chunk_tables import FolderEntries, JoinedChunks, StatePath
from hf_fsdp_plugin.checkpoint.writing.file_parts import FilePart, Item, whole_file

MIN_INDEXED = 5_000
"""Minimum number of chunks of a folder with an index. Each rank reads the metadata of all ranks of smaller ones."""

Value = tuple[StatePath, int, int, int]
"""Path of a small entry, number of its file, first byte and number of bytes."""


def index_part(
    path: str,
    joined: JoinedChunks,
    files: Sequence[str],
    aliases: Mapping[StatePath, StatePath],
    *,
    values: Sequence[Value],
    metadata: tuple[int, str],
) -> FilePart:
    """Return the index. The arguments are those of :func:`index_bytes`."""
    tensors = []
    for (tensor, dtype, shape), chunks in joined:
        places = numpy.delete(chunks[:, : 4 + len(shape)], (1, 2), axis=1)
        tensors.append((tensor, dtype, shape, pack_segments(places, chunks[:, 4 + len(shape) :])))
    data = index_bytes(tensors, values, list(aliases.items()), files, metadata)
    return whole_file(path, [Item(0, (data,))])


def joined_aliases(ranks: Sequence[FolderEntries]) -> dict[StatePath, StatePath]:
    """Return the aliases of all ranks, most of which share one sequence."""
    distinct = {id(entries.aliases): entries.aliases for entries in ranks}
    return {alias: path for aliases in distinct.values() for alias, path in aliases}
