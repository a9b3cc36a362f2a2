"""The files that rank 0 adds to a folder when all ranks have written theirs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hf_fsdp_plugin.checkpoint.names import INDEX_FILE
from hf_fsdp_plugin.checkpoint.writing import dcp, folder_index
from hf_fsdp_plugin.checkpoint.writing.chunk_tables import FolderEntries
from hf_fsdp_plugin.checkpoint.writing.file_parts import FilePart


def final_files(ranks: Sequence[Sequence[FolderEntries]]) -> Iterator[list[FilePart]]:
    """Yield the files of each folder that the ranks have written to.

    Args:
        ranks: what each rank has written.
    """
    by_folder: dict[tuple[str, str], list[FolderEntries]] = {}
    for own in ranks:
        for entries in own:
            by_folder.setdefault((entries.folder, entries.index), []).append(entries)
    for (_, index), written in by_folder.items():
        yield dcp.final_files(written) if index == INDEX_FILE else folder_index.local_index(written)
