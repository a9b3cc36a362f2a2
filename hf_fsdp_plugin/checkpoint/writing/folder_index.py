"""Writes the index of a folder from the chunks of all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

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
    values: Sequence[Value] = (),
    metadata: tuple[int, str] = (0, ""),
    plain: Mapping[str, Any] | None = None,
) -> FilePart:
    """Return the index. The arguments are those of :func:`index_bytes`."""
    tensors = []
    for (tensor, dtype, shape), chunks in joined:
        places = numpy.delete(chunks[:, : 4 + len(shape)], (1, 2), axis=1)
        tensors.append((tensor, dtype, shape, pack_segments(places, chunks[:, 4 + len(shape) :])))
    data = index_bytes(tensors, values, list(aliases.items()), files, metadata, plain or {})
    return whole_file(path, [Item(0, (data,))])


def joined_aliases(ranks: Sequence[FolderEntries]) -> dict[StatePath, StatePath]:
    """Return the aliases of all ranks, most of which share one sequence."""
    distinct = {id(entries.aliases): entries.aliases for entries in ranks}
    return {alias: path for aliases in distinct.values() for alias, path in aliases}


def local_index(ranks: Sequence[FolderEntries]) -> list[FilePart]:
    """Return the index of a model or an optimizer in the format ``local``; nothing for a small one."""
    joined = JoinedChunks(ranks)
    if len(joined) < MIN_INDEXED:
        return []
    values: dict[str, dict[str, Any]] = {}
    # The value of the highest rank counts. Most ranks share one mapping.
    for plain in {id(entries.plain): entries.plain for entries in reversed(ranks)}.values():
        for name, found in plain.get("values", {}).items():
            values[name] = {**found, **values.get(name, {})}
    plain = {"values": values, "groups": ranks[0].plain.get("groups", [])}
    files = [entries.file for entries in ranks]
    return [index_part(f"{ranks[0].folder}/{ranks[0].index}", joined, files, joined_aliases(ranks), plain=plain)]
