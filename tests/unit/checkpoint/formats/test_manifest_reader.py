"""The reader of manifests: one test per requirement of docs/manifest.md that a reader checks."""

import json
from pathlib import Path

import pytest
import xxhash

from hf_fsdp_plugin.checkpoint.formats import manifest
from hf_fsdp_plugin.checkpoint.formats.manifest import VERSION, FileRange, FileRecord, read_manifest, to_text
from hf_fsdp_plugin.checkpoint.names import MANIFEST_NAME
from hf_fsdp_plugin.problems import CheckpointError
from tests.support import damages, saved

HASH = "0" * 32


@pytest.fixture
def tree() -> dict:
    """Return the JSON of a valid manifest."""
    record = FileRecord(path="part/a.bin", size=4, ranges=(FileRange(start=0, stop=4, hash=HASH, name="w"),))
    return json.loads(to_text(saved.manifest(parameters={"w": ("float32", (1,))}, files=(record,))))


def write(folder: Path, tree: dict) -> None:
    """Write a manifest with a valid hash, as a hostile writer would."""
    text = json.dumps({**tree, "manifest_hash": ""})
    digest = xxhash.xxh3_128_hexdigest(text.encode())
    (folder / MANIFEST_NAME).write_text(text.replace('"manifest_hash": ""', f'"manifest_hash": "{digest}"'))


def test_folder_without_manifest_returns_none(tmp_path):
    assert read_manifest(tmp_path) is None
    assert read_manifest(tmp_path / "nowhere") is None


OTHER_JSON = ["", "{", "no", '{"format": ' + "[" * 100_000, "\x00", '"text"', "[]", "{}"]


@pytest.mark.parametrize("data", [*(text.encode() for text in OTHER_JSON), b'{"format": "\xff\xfe"}'])
def test_file_that_is_not_a_manifest_is_refused(tmp_path, data):
    (tmp_path / MANIFEST_NAME).write_bytes(data)
    with pytest.raises(CheckpointError, match=r"fsdp_manifest\.json: .*FSDP-E463"):
        read_manifest(tmp_path)


@pytest.mark.parametrize(
    ("changed", "detail"),
    [
        *(({"version": version}, f"version {version}.*version {VERSION} ") for version in (0, 3, None)),
        ({"hash": "md5"}, "'md5'"),
    ],
)
def test_unsupported_version_or_hash_is_refused(tmp_path, tree, changed, detail):
    write(tmp_path, tree | changed)
    with pytest.raises(CheckpointError, match=f"{detail}.*FSDP-E465"):
        read_manifest(tmp_path)


def test_every_flipped_byte_is_found(tmp_path, tree):
    write(tmp_path, tree)
    path = tmp_path / MANIFEST_NAME
    whole = path.read_bytes()
    assert read_manifest(tmp_path) is not None
    for position in range(len(whole)):
        path.write_bytes(whole)
        damages.flip(path, position)
        with pytest.raises(CheckpointError):
            read_manifest(tmp_path)
    path.write_bytes(whole + b"\n")
    with pytest.raises(CheckpointError, match="FSDP-E464"):
        read_manifest(tmp_path)


@pytest.mark.parametrize("length", [0, 1, 40, -2])
def test_truncated_manifest_is_refused(tmp_path, tree, length):
    write(tmp_path, tree)
    path = tmp_path / MANIFEST_NAME
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(CheckpointError, match="FSDP-E463"):
        read_manifest(tmp_path)


@pytest.mark.parametrize("path", ["../a", "/etc/passwd", "a/../../b", "..", "a\\b", "a\0b"])
def test_file_outside_of_the_checkpoint_is_refused(tmp_path, tree, path):
    tree["files"][0]["path"] = path
    write(tmp_path, tree)
    with pytest.raises(CheckpointError, match=r"FSDP-E456"):
        read_manifest(tmp_path)


@pytest.mark.parametrize("changed", [{"parameters": {"w": ["float32"]}}, {"files": [3]}, {"ties": [1]}, {"mesh": None}])
def test_manifest_of_another_form_is_refused(tmp_path, tree, changed):
    write(
        tmp_path, {**tree, **changed} if changed != {"mesh": None} else {k: v for k, v in tree.items() if k != "mesh"}
    )
    with pytest.raises(CheckpointError, match=r"FSDP-E463"):
        read_manifest(tmp_path)


def test_version_2_is_read_without_its_hashes(tmp_path, tree):
    """Its hashes are in a file of their own, which earlier versions have written for large checkpoints."""
    tree["files"][0] = {"path": "part/a.bin", "size": 4, "blocks": [0, 1], "hash": HASH}
    write(tmp_path, tree | {"version": 2, "num_blocks": 1, "names": ["w"]})
    found = read_manifest(tmp_path)
    assert found is not None and found.files == (FileRecord(path="part/a.bin", size=4, ranges=()),)


def test_empty_ranges_may_be_anywhere_and_are_dropped(tmp_path, tree):
    tree["files"][0]["ranges"] = [[0, 2, HASH, "a"], [2, 4, HASH, "b"], [2, 2, HASH, "none"], [0, 0, HASH, "none"]]
    write(tmp_path, tree)
    found = read_manifest(tmp_path)
    assert found is not None and [piece.name for piece in found.files[0].ranges] == ["a", "b"]


def test_unreadable_manifest_is_refused(tmp_path, monkeypatch):
    def denied(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(manifest, "read_file", denied)
    with pytest.raises(CheckpointError, match=r"fsdp_manifest\.json: .*FSDP-E472"):
        read_manifest(tmp_path)


def test_unknown_fields_are_ignored(tmp_path, tree):
    write(tmp_path, {**tree, "comment": ["later versions may add fields"]})
    assert read_manifest(tmp_path) is not None
