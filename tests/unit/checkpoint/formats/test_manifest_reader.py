"""The reader of manifests: one test per requirement of docs/manifest.md that a reader checks."""

import json
from pathlib import Path

import pytest
import xxhash

from hf_fsdp_plugin.checkpoint import io
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
        ({"version": VERSION + 1}, f"version {VERSION + 1},.* up to {VERSION}"),
        *(({"version": version}, "version ") for version in (0, None, "1", [1], 1.5)),
        ({"hash": "md5"}, '"md5"'),
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


OUTSIDE = ("../a", "/etc/passwd", "a/../../b", "..", ".", "", "a//b", "./a", "a\\b", "a\0b", "a/", "\ud800")
NOT_TILING = (
    [], [[0, 3, HASH, ""]], [[1, 4, HASH, ""]], [[0, 5, HASH, ""]], [[0, 2, HASH, ""], [3, 4, HASH, ""]],
    [[0, 3, HASH, ""], [2, 4, HASH, ""]], [[0, 6, HASH, ""], [6, 4, HASH, ""]], [[-1, 4, HASH, ""]],
)  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "detail"),
    [
        *(({"path": path}, r"files\[0\]\.path is .*FSDP-E456") for path in (*OUTSIDE, MANIFEST_NAME)),
        ({"path": 3}, r"files\[0\]\.path is 3.*FSDP-E463"),
        *(({"ranges": ranges}, r"files\[0\]\.ranges is .* from 0 to 4.*FSDP-E463") for ranges in NOT_TILING),
        *(({"ranges": [piece]}, r"files\[0\]\.ranges is .*hash and name.*FSDP-E463") for piece in ([0, 4], "0-4")),
    ],
)
def test_invalid_record_of_a_file_is_refused(tmp_path, tree, changed, detail):
    tree["files"][0] |= changed
    write(tmp_path, tree)
    with pytest.raises(CheckpointError, match=detail):
        read_manifest(tmp_path)


@pytest.mark.parametrize("linked", ["part", "part/a.bin"])
def test_link_in_the_path_of_a_file_is_refused(tmp_path, tree, linked):
    outside = tmp_path / "outside"
    (outside / "part").mkdir(parents=True)
    (outside / "part" / "a.bin").write_bytes(b"1234")
    folder = tmp_path / "checkpoint"
    (folder / linked).parent.mkdir(parents=True)
    (folder / linked).symlink_to(outside / linked)
    write(folder, tree)
    with pytest.raises(CheckpointError, match=rf"{linked}: .*cp -rL.*FSDP-E456"):
        read_manifest(folder)


def test_manifest_that_is_a_link_is_refused(tmp_path, tree):
    write(tmp_path, tree)
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / MANIFEST_NAME).symlink_to(tmp_path / MANIFEST_NAME)
    with pytest.raises(CheckpointError, match=r"json: .*FSDP-E456"):
        read_manifest(folder)


def test_links_of_the_hugging_face_cache_are_followed(tmp_path, tree):
    blobs, folder = tmp_path / "models--a--b" / "blobs", tmp_path / "models--a--b" / "snapshots" / "0123"
    blobs.mkdir(parents=True)
    (folder / "part").mkdir(parents=True)
    write(blobs, tree)
    (folder / MANIFEST_NAME).symlink_to(blobs / MANIFEST_NAME)
    (folder / "part" / "a.bin").symlink_to(blobs / "a.bin")
    assert read_manifest(folder) is not None
    (folder / "part" / "a.bin").unlink()
    (folder / "part" / "a.bin").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=r"a\.bin: .*FSDP-E456"):
        read_manifest(folder)


def test_empty_ranges_may_be_anywhere_and_are_dropped(tmp_path, tree):
    tree["files"][0]["ranges"] = [[0, 2, HASH, "a"], [2, 4, HASH, "b"], [2, 2, HASH, "none"], [0, 0, HASH, "none"]]
    write(tmp_path, tree)
    found = read_manifest(tmp_path)
    assert found is not None and [piece.name for piece in found.files[0].ranges] == ["a", "b"]


def test_duplicate_file_is_refused(tmp_path, tree):
    tree["files"] *= 2
    write(tmp_path, tree)
    with pytest.raises(CheckpointError, match=r'files\[1\]\.path is "part/a.bin".*FSDP-E463'):
        read_manifest(tmp_path)


def test_all_wrong_types_are_reported(tmp_path, tree):
    wrong = {
        "kind": "other", "backend": 1, "world_size": 0, "mesh": {"shard": "2"}, "strategy": None, "step": -1,
        "asynchronous": "yes", "created": 5, "versions": [], "settings": 1, "parameters": {"w": ["float32"]},
        "ties": [1], "files": [3], "batch": None,
    }  # fmt: skip
    write(tmp_path, {**tree, **wrong})
    with pytest.raises(CheckpointError) as caught:
        read_manifest(tmp_path)
    assert {problem.code for problem in caught.value.problems} == {"FSDP-E463"}
    found = {problem.message.partition(" is ")[0] for problem in caught.value.problems}
    assert found == {"mesh.shard", "parameters.w", "files[0]", "ties[0]", *wrong} - {
        "mesh",
        "parameters",
        "ties",
        "files",
    }


@pytest.mark.parametrize("key", [key for key in saved.manifest().__dataclass_fields__ if key not in ("step", "run")])
def test_every_field_but_step_and_run_is_required(tmp_path, tree, key):
    del tree[key]
    write(tmp_path, tree)
    with pytest.raises(CheckpointError, match=f"{key} is null.*FSDP-E463"):
        read_manifest(tmp_path)


def test_unreadable_manifest_is_refused(tmp_path, monkeypatch):
    def denied(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(io, "read_file", denied)
    with pytest.raises(CheckpointError, match=r"fsdp_manifest\.json: .*FSDP-E472"):
        read_manifest(tmp_path)


def test_unknown_fields_are_ignored(tmp_path, tree):
    write(tmp_path, {**tree, "comment": ["later versions may add fields"]})
    assert read_manifest(tmp_path) is not None


@pytest.mark.parametrize("key", ["strategy", "files", "manifest_hash", "step"])
def test_manifest_with_a_key_twice_is_refused(tmp_path, tree, key):
    text = json.dumps({**tree, "manifest_hash": ""})
    text = f'{{"{key}": null, {text[1:]}'
    digest = xxhash.xxh3_128_hexdigest(text.encode())
    (tmp_path / MANIFEST_NAME).write_text(text.replace('"manifest_hash": ""', f'"manifest_hash": "{digest}"'))
    with pytest.raises(CheckpointError, match=rf"duplicate key '{key}'.*FSDP-E463"):
        read_manifest(tmp_path)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity"])
def test_number_that_is_not_json_is_refused(tmp_path, tree, number):
    write(tmp_path, {**tree, "batch": {"a": float(number)}})
    with pytest.raises(CheckpointError, match=rf"{number}.*FSDP-E463"):
        read_manifest(tmp_path)


def test_manifest_without_files_is_refused(tmp_path, tree):
    write(tmp_path, {**tree, "files": []})
    with pytest.raises(CheckpointError, match=r"files is \[\].*FSDP-E463"):
        read_manifest(tmp_path)
