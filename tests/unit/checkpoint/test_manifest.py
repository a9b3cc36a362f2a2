"""The manifest comes back as it was written, and nothing that is not one gets through."""

import json
import math
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import pytest
import saved
import xxhash

from hf_fsdp_plugin.checkpoint.formats.hashing import hash_bytes, hash_file
from hf_fsdp_plugin.checkpoint.formats.manifest import VERSION, FileRange, FileRecord, record_file, to_text
from hf_fsdp_plugin.checkpoint.formats.manifest_reader import read_manifest
from hf_fsdp_plugin.checkpoint.names import MANIFEST_NAME
from hf_fsdp_plugin.problems import CheckpointError

HASH = "0" * 32


@pytest.fixture
def tree() -> dict:
    """A manifest's JSON, to be spoiled."""
    record = FileRecord(path="part/a.bin", size=4, ranges=(FileRange(start=0, stop=4, hash=HASH, name="w"),))
    return json.loads(to_text(saved.manifest(parameters={"w": ("float32", (1,))}, files=(record,))))


def write(folder: Path, tree: dict, *, hashed: bool = True) -> None:
    """``hashed``: with the hash that belongs to it, as a hostile writer would."""
    text = json.dumps({**tree, "manifest_hash": ""} if hashed else tree)
    if hashed:
        digest = xxhash.xxh3_128_hexdigest(text.encode())
        text = text.replace('"manifest_hash": ""', f'"manifest_hash": "{digest}"')
    (folder / MANIFEST_NAME).write_text(text)


def test_a_manifest_comes_back_as_it_was_written(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a").write_bytes(b"abc")
    (tmp_path / "empty").touch()
    written = saved.manifest(
        files=(record_file(tmp_path, "sub/a"), record_file(tmp_path, "empty")),
        parameters={"größe.weight": ("bfloat16", (3, 0)), "scale": ("float32", ())},
        ties=(("a", "b"), ("c", "d", "e")),
        step=None,
    )
    (tmp_path / MANIFEST_NAME).write_text(to_text(written))
    assert read_manifest(tmp_path) == written


def test_a_folder_without_a_manifest_has_none(tmp_path):
    assert read_manifest(tmp_path) is None
    assert read_manifest(tmp_path / "nowhere") is None


def test_settings_are_written_as_json_has_them(tmp_path):
    settings = {
        "a": (1, 2),
        "b": math.inf,
        "c": Path("x"),
        "d": MappingProxyType({1: {"z", "y"}}),
        "e": None,
        "f": True,
    }
    (tmp_path / MANIFEST_NAME).write_text(to_text(saved.manifest(settings=settings)))
    json.loads((tmp_path / MANIFEST_NAME).read_text(), parse_constant=pytest.fail)
    found = read_manifest(tmp_path)
    assert found is not None
    assert found.settings == {"a": [1, 2], "b": "inf", "c": "x", "d": {"1": ["y", "z"]}, "e": None, "f": True}


def test_a_manifest_has_a_line_for_each_file_and_parameter():
    records = tuple(FileRecord(path=f"f{n}", size=0, ranges=()) for n in range(50))
    parameters = {f"p{n}": ("float32", (1, 2)) for n in range(50)}
    lines = to_text(saved.manifest(files=records, parameters=parameters)).splitlines()
    assert 100 < len(lines) < 130 and any('"p7": ["float32", [1, 2]]' in line for line in lines)


@pytest.mark.parametrize("text", ["", "{", "no", '{"format": ' + "[" * 100_000, "\x00", '"text"', "[]", "{}"])
def test_what_is_no_manifest_is_refused(tmp_path, text):
    (tmp_path / MANIFEST_NAME).write_text(text)
    with pytest.raises(CheckpointError, match=r"fsdp_manifest\.json: is no (JSON|manifest)"):
        read_manifest(tmp_path)


def test_bytes_that_are_no_text_are_refused(tmp_path):
    (tmp_path / MANIFEST_NAME).write_bytes(b'{"format": "\xff\xfe"}')
    with pytest.raises(CheckpointError, match="is no JSON"):
        read_manifest(tmp_path)


def test_a_manifest_from_the_future_names_both_versions(tmp_path, tree):
    write(tmp_path, {**tree, "version": VERSION + 1})
    with pytest.raises(CheckpointError, match=f"has version {VERSION + 1}.*reads up to {VERSION}.*a later one"):
        read_manifest(tmp_path)


@pytest.mark.parametrize("version", [0, None, "1", [1], 1.5])
def test_a_version_that_never_was_is_refused(tmp_path, tree, version):
    write(tmp_path, {**tree, "version": version})
    with pytest.raises(CheckpointError, match=r"has version .* expected"):
        read_manifest(tmp_path)


def test_another_hash_is_refused(tmp_path, tree):
    write(tmp_path, {**tree, "hash": "md5"})
    with pytest.raises(CheckpointError, match='hash "md5"'):
        read_manifest(tmp_path)


def test_every_flipped_byte_of_a_manifest_is_found(tmp_path, tree):
    write(tmp_path, tree)
    path = tmp_path / MANIFEST_NAME
    whole = path.read_bytes()
    assert read_manifest(tmp_path) is not None
    for position in range(len(whole)):
        path.write_bytes(whole)
        saved.flip(path, position)
        with pytest.raises(CheckpointError):
            read_manifest(tmp_path)


@pytest.mark.parametrize("length", [0, 1, 40, -2])
def test_a_manifest_that_is_cut_short_is_found(tmp_path, tree, length):
    write(tmp_path, tree)
    path = tmp_path / MANIFEST_NAME
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(CheckpointError, match="is no JSON"):
        read_manifest(tmp_path)


@pytest.mark.parametrize(
    "path",
    [
        "../a",
        "/etc/passwd",
        "a/../../b",
        "..",
        ".",
        "",
        "a//b",
        "./a",
        "a\\b",
        "a\0b",
        "a/",
        MANIFEST_NAME,
        "\ud800",
        3,
    ],
)
def test_a_path_that_could_lead_elsewhere_is_refused(tmp_path, tree, path):
    tree["files"][0]["path"] = path
    write(tmp_path, tree)
    with pytest.raises(CheckpointError, match=r"files\[0\]\.path: .* a file's path below the checkpoint expected"):
        read_manifest(tmp_path)


@pytest.mark.parametrize("linked", ["part", "part/a.bin"])
def test_a_link_on_the_way_to_a_file_is_refused(tmp_path, tree, linked):
    outside = tmp_path / "outside"
    (outside / "part").mkdir(parents=True)
    (outside / "part" / "a.bin").write_bytes(b"1234")
    folder = tmp_path / "checkpoint"
    (folder / linked).parent.mkdir(parents=True)
    (folder / linked).symlink_to(outside / linked)
    write(folder, tree)
    with pytest.raises(CheckpointError, match=rf"{linked}: is a symbolic link.*cp -rL"):
        read_manifest(folder)


def test_a_manifest_that_is_a_link_is_refused(tmp_path, tree):
    write(tmp_path, tree)
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / MANIFEST_NAME).symlink_to(tmp_path / MANIFEST_NAME)
    with pytest.raises(CheckpointError, match="is a symbolic link"):
        read_manifest(folder)


def test_the_links_of_the_hugging_face_cache_are_followed(tmp_path, tree):
    """A snapshot's files are links to blobs."""
    blobs, folder = tmp_path / "models--a--b" / "blobs", tmp_path / "models--a--b" / "snapshots" / "0123"
    blobs.mkdir(parents=True)
    (folder / "part").mkdir(parents=True)
    write(blobs, tree)
    (folder / MANIFEST_NAME).symlink_to(blobs / MANIFEST_NAME)
    (folder / "part" / "a.bin").symlink_to(blobs / "a.bin")
    assert read_manifest(folder) is not None
    (folder / "part" / "a.bin").unlink()
    (folder / "part" / "a.bin").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=r"a\.bin: is a symbolic link"):
        read_manifest(folder)


@pytest.mark.parametrize(
    "ranges",
    [
        [],
        [[0, 3, HASH, ""]],
        [[1, 4, HASH, ""]],
        [[0, 5, HASH, ""]],
        [[0, 2, HASH, ""], [3, 4, HASH, ""]],
        [[0, 3, HASH, ""], [2, 4, HASH, ""]],
        [[0, 6, HASH, ""], [6, 4, HASH, ""]],
        [[-1, 4, HASH, ""]],
    ],
)
def test_ranges_that_do_not_tile_their_file_are_refused(tmp_path, tree, ranges):
    tree["files"][0]["ranges"] = ranges
    write(tmp_path, tree)
    with pytest.raises(CheckpointError, match=r"files\[0\]\.ranges: .* ranges that follow each other from 0 to 4"):
        read_manifest(tmp_path)


def test_a_tensor_without_elements_may_have_its_range_anywhere(tmp_path, tree):
    tree["files"][0]["ranges"] = [[0, 2, HASH, "a"], [2, 4, HASH, "b"], [2, 2, HASH, "none"], [0, 0, HASH, "none"]]
    write(tmp_path, tree)
    found = read_manifest(tmp_path)
    assert found is not None and len(found.files[0].ranges) == 4


def test_one_file_twice_is_refused(tmp_path, tree):
    tree["files"] *= 2
    write(tmp_path, tree)
    with pytest.raises(CheckpointError, match=r'files\[1\]\.path: "part/a.bin" .* every file once'):
        read_manifest(tmp_path)


def test_all_wrong_types_are_told_at_once(tmp_path, tree):
    wrong = {
        "kind": "other", "backend": 1, "world_size": 0, "mesh": {"shard": "2"}, "strategy": None, "step": -1,
        "asynchronous": "yes", "created": 5, "versions": [], "settings": 1, "parameters": {"w": ["float32"]},
        "ties": [1], "files": [3], "batch": None,
    }  # fmt: skip
    write(tmp_path, {**tree, **wrong})
    with pytest.raises(CheckpointError) as caught:
        read_manifest(tmp_path)
    said = {str(problem.message).partition(":")[0] for problem in caught.value.problems}
    assert said == {"mesh.shard", "parameters.w", "files[0]", *wrong} - {"mesh", "parameters", "files"}


@pytest.mark.parametrize("key", [field for field in saved.manifest().__dataclass_fields__ if field != "step"])
def test_every_field_but_the_step_has_to_be_there(tmp_path, tree, key):
    del tree[key]
    write(tmp_path, tree)
    with pytest.raises(CheckpointError, match=f"{key}: null was found"):
        read_manifest(tmp_path)


def test_a_hash_is_the_one_of_the_bytes_in_its_range(tmp_path):
    data = bytes(n % 251 for n in range(10_000_000))
    (tmp_path / "a").write_bytes(data)
    assert hash_file(tmp_path / "a") == hash_bytes(data) == xxhash.xxh3_128_hexdigest(data)
    assert hash_file(tmp_path / "a", 5, 9_000_001) == hash_bytes(memoryview(data)[5:9_000_001])
    assert hash_file(tmp_path / "a", 7, 7) == hash_bytes(b"")


def test_a_range_behind_the_end_of_its_file_is_told(tmp_path):
    (tmp_path / "a").write_bytes(b"abc")
    with pytest.raises(CheckpointError, match="a: ends at byte 3; 4 bytes were expected"):
        hash_file(tmp_path / "a", 0, 4)


def test_a_record_is_one_range_and_none_for_an_empty_file(tmp_path):
    (tmp_path / "a").write_bytes(b"abc")
    (tmp_path / "b").touch()
    assert record_file(tmp_path, "a").ranges == (FileRange(start=0, stop=3, hash=hash_bytes(b"abc")),)
    assert record_file(tmp_path, "b") == FileRecord(path="b", size=0, ranges=())


def test_a_changed_field_changes_the_manifest_s_hash():
    first = saved.manifest()
    assert json.loads(to_text(first))["manifest_hash"] != json.loads(to_text(replace(first, step=21)))["manifest_hash"]


def test_a_blank_that_became_another_is_damage(tmp_path):
    text = to_text(saved.manifest())
    (tmp_path / MANIFEST_NAME).write_text(text.replace("\n  ", "\n\t ", 1))
    with pytest.raises(CheckpointError, match="is damaged"):
        read_manifest(tmp_path)
