"""The checkpoint manager with one rank."""

from __future__ import annotations

import atexit
import errno
import os
import signal
import stat
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hf_fsdp_plugin.checkpoint.checking.completeness import why_incomplete
from hf_fsdp_plugin.checkpoint.formats.manifest import Manifest
from hf_fsdp_plugin.checkpoint.reading.resharding import load_model
from hf_fsdp_plugin.checkpoint.saved_state import optimizer_shards
from hf_fsdp_plugin.checkpoint.writing import manager as saves
from hf_fsdp_plugin.checkpoint.writing.file_parts import PartWriter
from hf_fsdp_plugin.checkpoint.writing.manager import CheckpointManager
from hf_fsdp_plugin.problems import CheckpointError
from tests.support.saved import manifest


class BlockedWriter(PartWriter):
    """Waits for an event before it writes in the background."""

    def __init__(self) -> None:
        super().__init__()
        self.event = threading.Event()

    def write_staged(self, *args: Any) -> Any:
        self.event.wait(10)
        return super().write_staged(*args)


@pytest.fixture
def manager(one_rank: None) -> Iterator[CheckpointManager]:
    manager = CheckpointManager()
    yield manager
    manager.close()


def save(manager: CheckpointManager, final: Path, model: nn.Module, *, asynchronous: bool = False) -> None:
    with manager.saving(final, partial(manifest, kind="full"), asynchronous=asynchronous) as save:
        manager.save_model(model, save, "full")


@pytest.mark.parametrize("asynchronous", [False, True])
def test_save_is_committed_and_loads(manager: CheckpointManager, tmp_path: Path, asynchronous: bool) -> None:
    model, other = nn.Linear(4, 3), nn.Linear(4, 3)
    save(manager, tmp_path / "checkpoint", model, asynchronous=asynchronous)
    manager.wait()
    assert why_incomplete(tmp_path / "checkpoint") is None
    assert manager.saved_asynchronously.get(model) == asynchronous and other not in manager.saved_asynchronously
    load_model(other, tmp_path / "checkpoint")
    assert torch.equal(other.weight, model.weight)


def test_hooks_exist_while_a_save_is_in_flight(
    manager: CheckpointManager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registered: set[Any] = set()
    monkeypatch.setattr(atexit, "register", registered.add)
    monkeypatch.setattr(atexit, "unregister", registered.discard)
    before = signal.getsignal(signal.SIGTERM)
    manager.writer = writer = BlockedWriter()
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters())
    save(manager, tmp_path / "checkpoint", model, asynchronous=True)
    in_flight = manager.save_in_flight
    assert in_flight is not None and not (tmp_path / "checkpoint").exists()
    assert in_flight.join_at_exit in registered and signal.getsignal(signal.SIGTERM) != before
    optimizer.step()
    assert manager.save_in_flight is in_flight
    writer.event.set()
    in_flight.join(10)
    optimizer.step()  # polls
    assert manager.save_in_flight is None
    assert in_flight.join_at_exit not in registered and signal.getsignal(signal.SIGTERM) == before


def test_many_ranks_poll_after_every_eighth_step(
    manager: CheckpointManager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saves, "_MANY_RANKS", 0)
    optimizer = torch.optim.SGD(nn.Linear(4, 3).parameters())
    save(manager, tmp_path / "checkpoint", nn.Linear(4, 3), asynchronous=True)
    assert manager.save_in_flight is not None
    manager.save_in_flight.join(10)
    for _ in range(7):
        optimizer.step()
        assert manager.save_in_flight is not None
    optimizer.step()
    assert manager.save_in_flight is None


@pytest.mark.parametrize("error", [errno.EINVAL, errno.ENOTSUP, errno.ENOSYS])
def test_folder_that_cannot_be_synced_is_accepted(
    manager: CheckpointManager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    """CIFS and some FUSE file systems refuse it."""
    refuse_syncs(monkeypatch, error, stat.S_ISDIR)
    save(manager, tmp_path / "checkpoint", nn.Linear(4, 3))
    assert why_incomplete(tmp_path / "checkpoint") is None


@pytest.mark.parametrize("asynchronous", [False, True])
def test_file_that_cannot_be_synced_fails_the_save(
    manager: CheckpointManager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asynchronous: bool
) -> None:
    refuse_syncs(monkeypatch, errno.EINVAL, stat.S_ISREG)
    with pytest.raises(CheckpointError, match=r"Invalid argument \(.*model\.safetensors\).*Check the disk.*FSDP-E404"):
        save(manager, tmp_path / "checkpoint", nn.Linear(4, 3), asynchronous=asynchronous)
        manager.wait()
    assert list(tmp_path.iterdir()) == []


def refuse_syncs(monkeypatch: pytest.MonkeyPatch, error: int, kind: Callable[[int], bool]) -> None:
    fsync = os.fsync

    def refusing(descriptor: int) -> None:
        if kind(os.fstat(descriptor).st_mode):
            raise OSError(error, os.strerror(error))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", refusing)


def test_file_system_without_direct_io_is_used(
    manager: CheckpointManager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, refused = os.open, []

    def refusing(path: Any, flags: int, *arguments: Any, **options: Any) -> int:
        if flags & os.O_DIRECT:
            refused.append(path)
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return plain(path, flags, *arguments, **options)

    monkeypatch.setattr(os, "open", refusing)
    model, other = nn.Linear(1024, 1024), nn.Linear(1024, 1024)
    save(manager, tmp_path / "checkpoint", model)
    load_model(other, tmp_path / "checkpoint")
    assert refused and torch.equal(other.weight, model.weight)


def test_close_waits_for_the_save_in_flight(manager: CheckpointManager, tmp_path: Path) -> None:
    save(manager, tmp_path / "checkpoint", nn.Linear(4, 3), asynchronous=True)
    manager.close()
    assert why_incomplete(tmp_path / "checkpoint") is None


def test_checkpoint_stays_if_its_replacement_fails(
    manager: CheckpointManager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commit renames the earlier checkpoint, and then fails to rename the new one."""
    final, rename = tmp_path / "checkpoint", Path.rename

    def failing(path: Path, target: Any) -> Path:
        if path.parent.name.endswith(".saving"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return rename(path, target)

    save(manager, final, nn.Linear(4, 3))
    inode = final.stat().st_ino
    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(CheckpointError, match="FSDP-E404"):
        save(manager, final, nn.Linear(4, 3))
    assert final.stat().st_ino == inode and why_incomplete(final) is None
    assert list(tmp_path.iterdir()) == [final]


def test_error_in_a_save_removes_its_files(manager: CheckpointManager, tmp_path: Path) -> None:
    with pytest.raises(KeyError), manager.saving(tmp_path / "checkpoint", manifest) as save:
        raise KeyError("user code")
    assert manager.open_save(save.folder) is None
    assert list(tmp_path.iterdir()) == []


def test_error_in_the_manifest_removes_the_files(manager: CheckpointManager, tmp_path: Path) -> None:
    def failing() -> Manifest:
        raise KeyError("batch")

    with pytest.raises(KeyError), manager.saving(tmp_path / "checkpoint", failing):
        pass
    assert list(tmp_path.iterdir()) == []


def test_open_save_is_found_by_any_path_of_its_folder(
    manager: CheckpointManager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "link").symlink_to(tmp_path, target_is_directory=True)
    monkeypatch.chdir(tmp_path)
    with manager.saving(tmp_path / "checkpoint", manifest) as save:
        inside = save.folder.relative_to(tmp_path)
        assert manager.open_save(inside) is manager.open_save(tmp_path / "link" / inside) is save
        assert manager.open_save(tmp_path) is manager.open_save(tmp_path / "nowhere") is None
        with manager.saving(tmp_path / "export", manifest, into=True) as other:
            assert manager.open_save(other.folder) is other and manager.open_save(save.folder) is None
        assert manager.open_save(save.folder) is save
    assert manager.open_save(tmp_path / "checkpoint") is None


@pytest.mark.parametrize(("shape", "key"), [((3, 4), "rows"), ((1,), "rows"), ((3,), "rows@0+12")])
@pytest.mark.usefixtures("manager")
def test_optimizer_state_of_other_shape_names_its_shard(shape: tuple[int, ...], key: str) -> None:
    model = nn.Linear(4, 3, bias=False)
    optimizer = torch.optim.SGD(model.parameters())
    optimizer.state[model.weight] = {"rows": torch.ones(shape)}
    assert optimizer_shards(model, optimizer).state["weight"][key].shape == shape


@pytest.mark.usefixtures("manager")
def test_objects_in_optimizer_state_are_refused() -> None:
    model = nn.Linear(4, 3, bias=False)
    optimizer = torch.optim.SGD(model.parameters())
    optimizer.state[model.weight] = {"step": 3, "range": (0.1, 2), "projector": nn.Linear(2, 2)}
    with pytest.raises(CheckpointError) as caught:
        optimizer_shards(model, optimizer)
    [problem] = caught.value.problems
    assert problem.code == "FSDP-E411" and "'projector' of weight is a Linear object" in problem.message


@pytest.mark.usefixtures("manager")
def test_state_in_parameter_groups_is_refused() -> None:
    model = nn.Linear(4, 3, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(0.1))
    assert optimizer_shards(model, optimizer).groups[0]["params"] == ["weight"]
    optimizer.param_groups[0]["state"] = {model.weight: {"average": torch.ones(3, 4)}}
    with pytest.raises(CheckpointError) as caught:
        optimizer_shards(model, optimizer)
    [problem] = caught.value.problems
    assert problem.code == "FSDP-E411" and "'state' of a parameter group contains a Tensor" in problem.message


def test_launcher_sees_whether_a_save_is_in_flight(one_rank: None, tmp_path: Path) -> None:
    marker = tmp_path / "rank0.saving"
    manager = CheckpointManager(in_flight_file=lambda: marker)
    manager.writer = writer = BlockedWriter()
    save(manager, tmp_path / "checkpoint", nn.Linear(4, 3), asynchronous=True)
    assert marker.exists()
    writer.event.set()
    manager.wait()
    assert not marker.exists()
    manager.close()
