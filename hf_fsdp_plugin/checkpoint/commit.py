"""The commit of a finished folder: one rename, or two if the folder replaces another one. Does not import torch."""

from __future__ import annotations

from pathlib import Path

from hf_fsdp_plugin.checkpoint.names import REPLACED, hidden


def replaced_path(final: Path) -> Path:
    """The path to which a commit renames the folder that it replaces."""
    return hidden(final, REPLACED)


def put_in_place(folder: Path, final: Path) -> Path | None:
    """Rename ``folder`` to ``final``.

    Returns:
        The new path of the folder that was at ``final``, which the caller deletes; ``None`` if there was none. If the
        second rename fails, the first one is undone.
    """
    if not final.exists():
        folder.rename(final)
        return None
    replaced = replaced_path(final)
    final.rename(replaced)
    try:
        folder.rename(final)
    except OSError:
        replaced.rename(final)
        raise
    return replaced


def restore_replaced(final: Path) -> None:
    """Undo a replacement that was interrupted between its two renames."""
    replaced = replaced_path(final)
    if replaced.is_dir() and not final.exists():
        replaced.rename(final)
