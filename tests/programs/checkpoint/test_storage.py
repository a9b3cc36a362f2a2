"""The checkpoints in a storage: what exists, what stands for them, and what is refused."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from hf_fsdp_plugin.checkpoint.checking.completeness import why_incomplete
from hf_fsdp_plugin.checkpoint.file_io import InputFiles
from hf_fsdp_plugin.checkpoint.formats.known_formats import read_stored_model
from hf_fsdp_plugin.checkpoint.storage import Storage, fetched, folder_of
from hf_fsdp_plugin.cli.main import main
from hf_fsdp_plugin.integrations.saving import manager, remove_oldest
from hf_fsdp_plugin.problems import CheckpointError
from hf_fsdp_plugin.state import process
from tests.support.object_store import BUCKET, Faults, object_store
from tests.support.saved import local_checkpoint

FIRST, SECOND, THIRD = "0" * 16, "1" * 16, "a" * 16
"""Names of folders with files."""


def put(url: str, name: str, folder: Path, files: str = FIRST, created: str = "1") -> Storage:
    """Store a folder as a checkpoint."""
    storage = Storage(url)
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    storage.upload(folder, names, f"{name}/{files}", lambda: False)
    storage.commit(name, {"files": files, "created": created})
    return storage


def codes(error: pytest.ExceptionInfo[CheckpointError]) -> list[str]:
    return [problem.code for problem in error.value.problems]


@pytest.fixture(autouse=True)
def no_folders_left() -> Iterator[None]:
    yield
    process.close()


@pytest.fixture(params=["path", "s3"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    if request.param == "path":
        yield str(tmp_path / "storage" / "run")
        return
    with object_store() as variables, patch.dict(os.environ, variables):
        yield f"s3://{BUCKET}/run"


def test_tools_read_a_stored_checkpoint(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = local_checkpoint(tmp_path / "checkpoint-20")
    storage = put(url, "checkpoint-20", checkpoint)
    storage.claim("token")
    assert main(["inspect", f"{url}/checkpoint-20"]) == 0
    assert main(["inspect", url]) == 0
    assert "checkpoint-20" in capsys.readouterr().out
    assert main(["verify", f"{url}/checkpoint-20"]) == 0
    assert main(["merge", f"{url}/checkpoint-20", str(tmp_path / "merged"), "--delete-input"]) == 2
    assert f"Delete {url}/checkpoint-20 with the tools of its storage" in capsys.readouterr().err
    assert main(["merge", f"{url}/checkpoint-20", str(tmp_path / "merged")]) == 0
    assert main(["export", url, str(tmp_path / "exported")]) == 0
    assert main(["merge", str(checkpoint), str(tmp_path / "expected")]) == 0
    expected = (tmp_path / "expected" / "model.safetensors").read_bytes()
    for folder in ("merged", "exported"):
        assert (tmp_path / folder / "model.safetensors").read_bytes() == expected


def test_files_of_shards_are_read_by_ranges(url: str, tmp_path: Path) -> None:
    checkpoint = local_checkpoint(tmp_path / "checkpoint-20")
    put(url, "checkpoint-20", checkpoint)
    folder = fetched(f"{url}/checkpoint-20")
    assert why_incomplete(folder) is None and folder_of(f"{url}/checkpoint-20") == folder
    name = "pytorch_model_fsdp_0/__0_0.distcp"
    data = (checkpoint / name).read_bytes()
    assert not any((folder / name).read_bytes())  # a hole of the size of the file
    with InputFiles(folder) as files:
        found = bytearray(40)
        files.read(name, 64, memoryview(found))
    assert bytes(found) == data[64:104]
    assert read_stored_model(folder).tensors.keys() == read_stored_model(checkpoint).tensors.keys()


def test_checkpoint_exists_when_its_marker_does(url: str, tmp_path: Path) -> None:
    first, second = local_checkpoint(tmp_path / "a"), local_checkpoint(tmp_path / "bcd")
    storage = put(url, "checkpoint-8", first, created="2")
    storage.upload(second, ["trainer_state.json"], f"checkpoint-8/{SECOND}", lambda: False)  # an interrupted save
    storage.upload(second, ["trainer_state.json"], f"checkpoint-10/{SECOND}", lambda: False)
    assert [*storage.checkpoints()] == ["checkpoint-8"]
    storage.remove_uncommitted()
    assert not storage.sizes("checkpoint-10") and not storage.sizes(f"checkpoint-8/{SECOND}")
    storage.write("data/train/a", b"of the user")
    storage.remove_uncommitted()
    assert storage.read("data/train/a") == b"of the user"
    put(url, "checkpoint-10", second, created="2")
    put(url, "checkpoint-8", second, files=THIRD, created="3")
    assert [*storage.checkpoints()] == ["checkpoint-10", "checkpoint-8"]
    storage.remove("checkpoint-10")
    assert [*storage.checkpoints()] == ["checkpoint-8"]
    with pytest.raises(CheckpointError) as error:
        fetched(f"{url}/checkpoint-10")
    assert codes(error) == ["FSDP-E450"]


def test_oldest_checkpoints_of_the_run_are_removed(url: str, tmp_path: Path) -> None:
    checkpoint, best = local_checkpoint(tmp_path / "a"), str(tmp_path / "checkpoint-8")
    for created, name in enumerate(("checkpoint-best", "checkpoint-8", "checkpoint-10", "checkpoint-2")):
        storage = put(url, name, checkpoint, created=str(created))
    with patch.object(manager(), "_storage", (storage, "token")):
        remove_oldest(tmp_path / "checkpoint-2", "checkpoint-", None, url)
        remove_oldest(tmp_path / "checkpoint-2", "checkpoint-", 2, url, best)
        assert [*storage.checkpoints()] == ["checkpoint-best", "checkpoint-8", "checkpoint-2"]
        remove_oldest(tmp_path / "checkpoint-2", "checkpoint-", 1, url)
        assert [*storage.checkpoints()] == ["checkpoint-best", "checkpoint-2"]
        with patch.object(storage, "checkpoints", side_effect=CheckpointError([])):
            remove_oldest(tmp_path / "checkpoint-2", "checkpoint-", 1, url)  # the next save removes what is left


def test_lost_file_is_refused(url: str, tmp_path: Path) -> None:
    checkpoint = local_checkpoint(tmp_path / "checkpoint-20")
    storage = put(url, "checkpoint-20", checkpoint)
    storage._remove(f"checkpoint-20/{FIRST}/pytorch_model_fsdp_0/__0_0.distcp")
    with pytest.raises(CheckpointError) as error:
        fetched(f"{url}/checkpoint-20")
    assert codes(error) == ["FSDP-E470"]


def test_later_run_owns_the_storage(url: str) -> None:
    storage = Storage(url)
    storage.claim("first")
    storage.check_owner("first")
    Storage(url).claim("second")
    with pytest.raises(CheckpointError) as error:
        storage.check_owner("first")
    assert codes(error) == ["FSDP-E420"]


@pytest.mark.parametrize(
    ("url", "code"),
    [("s3://no-bucket/run", "FSDP-E419"), ("gs://bucket/run", "FSDP-E418"), ("unknown://bucket/run", "FSDP-E418")],
)
def test_unusable_storage_is_refused(url: str, code: str) -> None:
    with object_store() as variables, patch.dict(os.environ, variables), pytest.raises(CheckpointError) as error:
        Storage(url).claim("token")
    assert codes(error) == [code]


def test_missing_credentials_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    none = str(tmp_path / "none")
    variables = {"AWS_CONFIG_FILE": none, "AWS_SHARED_CREDENTIALS_FILE": none, "AWS_EC2_METADATA_DISABLED": "true"}
    with patch.dict(os.environ, variables), pytest.raises(CheckpointError) as error:
        assert main(["inspect", f"s3://{BUCKET}/run/checkpoint-20"]) == 1
        Storage(f"s3://{BUCKET}/run").claim("token")
    assert codes(error) == ["FSDP-E419"] and "redentials" in str(error.value)
    assert "FSDP-E419" in capsys.readouterr().err


def test_wrong_answers_are_errors(tmp_path: Path) -> None:
    faults = Faults()
    with object_store(faults) as variables, patch.dict(os.environ, variables):
        storage = Storage(f"s3://{BUCKET}/run")
        faults.choose = lambda method, path: "lost" if method == "PUT" else ""
        with pytest.raises(CheckpointError) as error:
            storage.commit("checkpoint-1", {"files": "f"})
        assert codes(error) == ["FSDP-E419"] and not storage.checkpoints()
        faults.choose = lambda method, path: "refused" if method == "PUT" else ""
        (tmp_path / "a").write_bytes(b"a")
        with pytest.raises(CheckpointError) as error:
            storage.upload(tmp_path, ["a"], "checkpoint-1/f", lambda: False)
        assert codes(error) == ["FSDP-E419"]


def test_abandoned_upload_ends(tmp_path: Path) -> None:
    faults = Faults()
    faults.choose = lambda method, path: "failed" if method == "PUT" and "file" in path else ""
    (tmp_path / "file").write_bytes(b"a")
    with object_store(faults) as variables, patch.dict(os.environ, variables), pytest.raises(CheckpointError) as error:
        Storage(f"s3://{BUCKET}/run").upload(tmp_path, ["file"], "checkpoint-1/f", lambda: True)
    assert codes(error) == ["FSDP-E419"]
