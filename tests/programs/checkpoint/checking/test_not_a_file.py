"""A file that has become a folder, a pipe, a device, a socket or a bad link is reported, and no tool waits for it."""

from __future__ import annotations

import os
import shutil
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hf_fsdp_plugin.checkpoint.checking.completeness import why_incomplete
from hf_fsdp_plugin.checkpoint.names import MANIFEST_NAME
from hf_fsdp_plugin.problems import CheckpointError
from hf_fsdp_plugin.tools.inspect.summary import summarize
from hf_fsdp_plugin.tools.merge.merging import MergeOptions, merge
from hf_fsdp_plugin.tools.verify.verification import verify
from tests.support import saved


def make_socket(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # the path of a socket has at most 107 characters
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path.name)
    finally:
        os.chdir(here)


KINDS: dict[str, Callable[[Path], Any]] = {
    "folder": Path.mkdir,
    "pipe": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "socket": make_socket,
    "dangling link": lambda path: path.symlink_to("nowhere"),
    "link in a circle": lambda path: path.symlink_to(path.name),
    "link to a folder": lambda path: path.symlink_to(path.parent),
}


@pytest.fixture(scope="module", params=["local", "sharded", "stock"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = saved.any_checkpoint(tmp_path_factory.mktemp("run") / "checkpoint-20", request.param)
    if request.param == "sharded":
        saved.write_manifest(folder)
    return folder


@pytest.fixture(autouse=True)
def limit() -> Iterator[None]:
    """A tool that waits for the writer of a pipe, or reads a device without end, is ended."""

    def too_long(*_: object) -> None:
        raise TimeoutError("the tool waits")

    before = signal.signal(signal.SIGALRM, too_long)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("kind", KINDS)
def test_path_that_is_not_a_file_is_reported(checkpoint: Path, tmp_path: Path, kind: str) -> None:
    copy = shutil.copytree(checkpoint, tmp_path / "checkpoint-20")
    for file in sorted(path.relative_to(checkpoint) for path in checkpoint.rglob("*") if path.is_file()):
        (copy / file).rename(tmp_path / "the file")
        KINDS[kind](copy / file)
        signal.alarm(20)
        verdict = verify(copy, config_check=False)
        incomplete = why_incomplete(copy)
        if (checkpoint / MANIFEST_NAME).exists() and file.name != MANIFEST_NAME:
            assert not verdict.ok and incomplete is not None, file
        for tool in (summarize, lambda path: merge(path, tmp_path / "out", MergeOptions(force=True))):
            try:
                tool(copy)
            except CheckpointError as error:
                assert all(problem.fix and problem.origin for problem in error.problems), (file, error)
        signal.alarm(0)
        (copy / file).rmdir() if kind == "folder" else (copy / file).unlink()
        (tmp_path / "the file").rename(copy / file)
