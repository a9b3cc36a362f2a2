"""Checks the files that Accelerate and the Trainer read when they resume: scheduler, random state, registered objects.

They are pickles. Only names that torch, the libraries or the user allow are unpickled; nothing else is executed.
"""

from __future__ import annotations

import codecs
import datetime
import pickle
import re
import zipfile
from contextlib import suppress
from functools import partial
from pathlib import Path, PosixPath, PurePosixPath
from typing import Any

import numpy
import torch

from hf_fsdp_plugin.backends.ranks.agreement import broadcast_object, on_all_ranks
from hf_fsdp_plugin.checkpoint import names as file_names
from hf_fsdp_plugin.checkpoint.checking.hashes import REPLACE_FILE, VerifiedFiles
from hf_fsdp_plugin.checkpoint.errors import problems_of, raise_if_any, refuse
from hf_fsdp_plugin.checkpoint.file_io import open_for_reading
from hf_fsdp_plugin.checkpoint.formats.manifest import read_manifest
from hf_fsdp_plugin.checkpoint.formats.torch_files import compare_checksums
from hf_fsdp_plugin.text import format_names

_ALLOW = (
    "If you trust the file, allow its classes before you resume: torch.serialization.add_safe_globals([...]). With "
    'Accelerate, load_state(..., load_kwargs={"weights_only": False}) allows everything.'
)
_STATES = re.compile(r"(?:scheduler|sampler|dl_state_dict|scaler|custom_checkpoint)(?:_\d+)?\.(?:bin|pt|pkl)")
"""The pickles that Accelerate and the Trainer load. Other files in the folder are the user's."""
_RNG = re.compile(rf"(?:{file_names.TRAINER_RNG}|{file_names.ACCELERATE_RNG})(?:_\d+)?\.\w+")


def check_states(
    checkpoint: Path, rank: int, world_size: int, *, verify: bool = True, allow_pickles: bool = False
) -> None:
    """Check all files that a resume reads, except model and optimizer. Collective.

    Each rank checks its own random state and a share of the other files.

    Args:
        verify: compare the bytes with the hashes of the manifest or, without a manifest, with the checksums of the
            archives.
        allow_pickles: pickles may contain anything, except those with random states.

    Raises:
        CheckpointError: bytes differ from those that were saved, or a pickle contains a name that is not allowed.
    """
    shared: list[str] = []
    with on_all_ranks(f"checking {checkpoint}"):
        if rank == 0:  # only rank 0 lists the folder, which has several files for each rank
            names = sorted(path.name for path in checkpoint.iterdir())
            shared = [name for name in names if name == file_names.TRAINER_STATE or _STATES.fullmatch(name)]
    shared = broadcast_object(shared)
    with on_all_ranks(f"checking {checkpoint}"):
        own = [file_names.trainer_rng_file(rank), file_names.accelerate_rng_file(rank)]
        if rank == 0:
            own.append(file_names.trainer_rng_file(None))
        files = [*(name for name in own if (checkpoint / name).is_file()), *shared[rank::world_size]]
        if verify:
            _check_bytes(checkpoint, files)
        pickles = [
            checkpoint / name
            for name in files
            if name != file_names.TRAINER_STATE and (not allow_pickles or _RNG.fullmatch(name))
        ]
        raise_if_any(problems_of(partial(load_state_file, path, only_check=True) for path in pickles))


def _check_bytes(checkpoint: Path, files: list[str]) -> None:
    manifest = read_manifest(checkpoint)
    if manifest is None:
        raise_if_any(problems_of(partial(_check_checksums, checkpoint / name) for name in files))
        return
    listed = {record.path for record in manifest.files}  # others were added by the user
    with VerifiedFiles(checkpoint, manifest, checkpoint) as verified:
        raise_if_any(problems_of(partial(verified.check_file, name) for name in files if name in listed))


def _check_checksums(path: Path) -> None:
    """Compare the bytes of an archive with its checksums."""
    if zipfile.is_zipfile(path):
        try:
            with open_for_reading(path) as file:
                compare_checksums(file)
        except zipfile.BadZipFile as error:
            refuse("FSDP-E471", path, f"its bytes differ from what was saved ({error}).", REPLACE_FILE)


_PLAIN = (
    codecs.encode, frozenset, range, slice,
    datetime.date, datetime.datetime, datetime.time, datetime.timedelta, datetime.timezone,
    Path, PosixPath, PurePosixPath,
)  # fmt: skip
"""Plain data that torch does not allow by default, because its own files do not contain it."""


def _plain_data() -> torch.serialization.safe_globals:
    """Return a block that allows plain data, and what NumPy's arrays and scalars consist of (its random state)."""
    functions: list[Any] = [numpy.zeros(0).__reduce__()[0], numpy.float64(0).__reduce__()[0]]
    # NumPy 1 has other module names.
    earlier = [(function, f"numpy.core.multiarray.{function.__name__}") for function in functions]
    dtypes = {type(numpy.dtype(kind)) for kind in numpy.sctypeDict.values()}
    allowed: list[Any] = [*_PLAIN, *functions, *earlier, *dtypes, numpy.ndarray, numpy.dtype]
    return torch.serialization.safe_globals(allowed)


def load_state_file(path: Path, *, only_check: bool = False) -> Any:
    """Return the object in a file of ``torch.save``, with tensors on the CPU.

    Args:
        only_check: read the pickle, but not the bytes of its tensors.

    Raises:
        CheckpointError: the pickle contains a name that is not allowed, or is damaged.
    """
    try:
        with _plain_data():
            return torch.load(path, map_location="cpu", weights_only=True, mmap=only_check and zipfile.is_zipfile(path))
    except pickle.UnpicklingError as error:
        names = _names_not_allowed(path)
        found = format_names(names, 3) if names else _reason(error)
        message = f"contains a pickle with more than plain data: {found}. It was not executed."
        refuse("FSDP-E454", path, message, _ALLOW)
    except Exception as error:  # a damaged archive can raise any exception
        refuse("FSDP-E453", path, f"cannot be unpickled ({type(error).__name__}: {_reason(error)}).")


def _names_not_allowed(path: Path) -> list[str]:
    """Return the names in a pickle that are not allowed; empty if they cannot be read."""
    with suppress(Exception), _plain_data():  # a damaged pickle can raise any exception
        return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(path))
    return []


def _reason(error: Exception) -> str:
    """Return the line of an error of ``torch.load`` that contains the reason."""
    text = str(error).rpartition("WeightsUnpickler error:")[2].strip()
    return text.splitlines()[0] if text else type(error).__name__
