"""The folders of checkpoints: their commit by a rename, recovery from interrupted commits, removal, and visibility.

``writing.staging.StagingFolder.commit`` has the order of a commit: files, manifest, syncs, rename, sync, removal.

Clients of network file systems cache the names in a folder, also of files that did not exist, for up to a minute (NFS:
``acdirmax``). A wait for such a name that takes longer than a few seconds is announced on stderr.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from contextlib import suppress
from pathlib import Path

from hf_fsdp_plugin.checkpoint import names as file_names
from hf_fsdp_plugin.checkpoint.file_io import sync
from hf_fsdp_plugin.checkpoint.formats.manifest import readable_manifest
from hf_fsdp_plugin.problems import CheckpointError, Problem
from hf_fsdp_plugin.rank_variables import launched_rank


def replaced_path(final: Path) -> Path:
    """The path to which a commit renames the folder that it replaces."""
    return file_names.hidden_path(final, file_names.REPLACED)


def put_in_place(folder: Path, final: Path) -> Path | None:
    """Rename ``folder`` to ``final``, durably: a power failure that follows cannot lose both folders.

    Returns:
        The new path of the folder that was at ``final``, which the caller deletes; ``None`` if there was none. If the
        second rename fails, the first one is undone.
    """
    replaced = replaced_path(final)
    if is_staging_link(final):
        final.unlink()
    elif final.exists():
        final.rename(replaced)
    try:
        folder.rename(final)
    except OSError:
        if replaced.is_dir():
            replaced.rename(final)
        raise
    sync(final.parent)
    return replaced if replaced.is_dir() else None


def link_staging(final: Path) -> None:
    """Let ``final`` be a link to the staging folder of its save. A folder that is there is renamed, as at a commit."""
    if final.exists():
        final.rename(replaced_path(final))
    final.symlink_to(_staging_target(final), target_is_directory=True)


def is_staging_link(path: Path) -> bool:
    """Return whether ``path`` is a link that :func:`link_staging` has made, for a save that is not committed."""
    return path.is_symlink() and Path(os.readlink(path)) == _staging_target(path)


def _staging_target(final: Path) -> Path:
    return Path(file_names.hidden_path(final, file_names.SAVING).name, final.name)


def restore_replaced(final: Path) -> None:
    """Undo a replacement that was interrupted between its two renames."""
    if is_staging_link(final):
        final.unlink()
    replaced = replaced_path(final)
    if replaced.is_dir() and not final.exists():
        replaced.rename(final)


def recover_interrupted_commit(final: Path) -> None:
    """Undo a commit that was interrupted before its second rename, or complete one that was interrupted after it."""
    restore_replaced(final)
    if replaced_path(final).is_dir():
        remove_replaced(replaced_path(final), final)


def recover_run(run: Path, prefix: str) -> None:
    """Recover the interrupted commits of a run's checkpoints, and remove the staging folders of interrupted saves."""
    for path in filter(is_staging_link, run.glob(f"{prefix}*")):
        restore_replaced(path)
    for path in run.glob(f".{prefix}*{file_names.REPLACED}"):
        recover_interrupted_commit(run / path.name.removeprefix(".").removesuffix(file_names.REPLACED))
    for path in run.glob(f".{prefix}*{file_names.SAVING}"):
        _remove_folder(path)


def remove_checkpoint(checkpoint: Path) -> None:
    """Rename a checkpoint to a staging folder, then delete it, so that no incomplete checkpoint has its name.

    Its merged copies are deleted too.
    """
    for copy in file_names.merged_copies(checkpoint):
        shutil.rmtree(copy, ignore_errors=True)
    visible = checkpoint.with_name(checkpoint.name.removeprefix("."))
    removed = file_names.hidden_path(visible, f".removed{file_names.SAVING}")
    _remove_folder(removed)
    checkpoint.rename(removed)
    _remove_folder(removed)


def _remove_folder(path: Path) -> None:
    """Remove a folder, or a link to one, whose target stays."""
    if path.is_symlink():
        path.unlink()
    shutil.rmtree(path, ignore_errors=True)


def remove_replaced(before: Path, final: Path) -> None:
    """Move the user's files, which no save has written, from a replaced folder to ``final``, and remove the rest."""
    manifest = readable_manifest(before)
    files = [path.relative_to(before) for path in before.rglob("*") if path.is_file()]
    if manifest is not None:
        listed = {record.path for record in manifest.files} | {file_names.MANIFEST_NAME, file_names.BLOCK_FILE}
        of_user = [path for path in files if path.as_posix() not in listed]
    else:
        of_user = [path for path in files if not path.parts[0].startswith(file_names.CHECKPOINT_STEMS)]
    for relative in of_user:
        target = final / relative
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            (before / relative).rename(target)
    remove_checkpoint(before)


def move_files(folder: Path, final: Path) -> None:
    """Move all files, with the manifest last, and remove the files that only the previous manifest lists."""
    final.mkdir(parents=True, exist_ok=True)
    before = readable_manifest(final)
    (final / file_names.MANIFEST_NAME).unlink(missing_ok=True)
    new = sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    for relative in sorted(new, key=lambda path: path.name == file_names.MANIFEST_NAME):
        (final / relative).parent.mkdir(parents=True, exist_ok=True)
        (folder / relative).replace(final / relative)
    for record in before.files if before is not None else ():
        if Path(record.path) not in new:
            (final / record.path).unlink(missing_ok=True)
    sync(final)
    sync(final.parent)


TIMEOUT = 75.0
"""Seconds that a rank waits for a path to appear: longer than a client of NFS caches the names in a folder."""
_ANNOUNCED = 3.0
"""Seconds after which a wait is announced."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.01, 1.0


def check_visible(path: Path, did: str) -> None:
    """Wait for a path that rank 0 sees, and that may be on another machine.

    Args:
        did: what rank 0 did, for the message: ``created``.

    Raises:
        CheckpointError: this rank does not see it after ``TIMEOUT`` seconds.
    """
    start, pause, announced = time.monotonic(), _FIRST_PAUSE, False
    while not path.exists():
        waited = time.monotonic() - start
        if waited > TIMEOUT:
            message = f"rank 0 {did} {path}, but this rank cannot see it: the ranks have no common file system."
            fix = "Save to a folder that all machines share, or set fsdp_checkpoint_storage, and resume from there."
            raise CheckpointError([Problem(code="FSDP-E405", message=message, fix=fix)])
        if waited > _ANNOUNCED and not announced:
            text = f"rank {launched_rank()} waits for {path}, which rank 0 sees, for up to {TIMEOUT:g} seconds."
            print(f"hf-fsdp: {text}", file=sys.stderr, flush=True)
            announced = True
        with suppress(OSError):
            os.listdir(path.parent)  # lets the client ask the server
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)
