"""The writer of manifests: what is written is read back, and every byte has a hash."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import pytest
import xxhash

from hf_fsdp_plugin.checkpoint.formats.manifest import (
    FileRange,
    FileRecord,
    hash_bytes,
    hash_file,
    read_manifest,
    record_file,
    to_text,
)
from hf_fsdp_plugin.checkpoint.names import MANIFEST_NAME
from hf_fsdp_plugin.problems import CheckpointError
from tests.support import saved


def test_manifest_round_trips(tmp_path):
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


def test_settings_are_converted_to_json_values(tmp_path):
    values = (1, 2), math.inf, Path("x"), MappingProxyType({1: {"z", "y"}}), None, True
    settings = dict(zip("abcdef", values, strict=True))
    files = (FileRecord(path="f", size=0, ranges=()),)
    (tmp_path / MANIFEST_NAME).write_text(to_text(saved.manifest(settings=settings, files=files)))
    json.loads((tmp_path / MANIFEST_NAME).read_text(), parse_constant=pytest.fail)
    found = read_manifest(tmp_path)
    assert found is not None
    assert found.settings == {"a": [1, 2], "b": "inf", "c": "x", "d": {"1": ["y", "z"]}, "e": None, "f": True}


def test_manifest_has_a_line_per_file_and_parameter():
    records = tuple(FileRecord(path=f"f{n}", size=0, ranges=()) for n in range(50))
    parameters = {f"p{n}": ("float32", (1, 2)) for n in range(50)}
    lines = to_text(saved.manifest(files=records, parameters=parameters)).splitlines()
    assert 100 < len(lines) < 130 and any('"p7": ["float32", [1, 2]]' in line for line in lines)


def test_hash_covers_the_bytes_of_the_range(tmp_path):
    data = bytes(n % 251 for n in range(10_000_000))
    (tmp_path / "a").write_bytes(data)
    assert hash_file(tmp_path / "a", 0, len(data)) == hash_bytes(data) == xxhash.xxh3_128_hexdigest(data)
    assert hash_file(tmp_path / "a", 5, 9_000_001) == hash_bytes(memoryview(data)[5:9_000_001])
    assert hash_file(tmp_path / "a", 7, 7) == hash_bytes(b"")


def test_range_after_the_end_of_a_file_is_refused(tmp_path):
    (tmp_path / "a").write_bytes(b"abc")
    with pytest.raises(CheckpointError, match=r"a: ends at byte 3.*FSDP-E453"):
        hash_file(tmp_path / "a", 0, 4)


def test_record_has_one_range_or_none_if_empty(tmp_path):
    (tmp_path / "a").write_bytes(b"abc")
    (tmp_path / "b").touch()
    assert record_file(tmp_path, "a").ranges == (FileRange(start=0, stop=3, hash=hash_bytes(b"abc")),)
    assert record_file(tmp_path, "b") == FileRecord(path="b", size=0, ranges=())


def test_changed_field_changes_the_hash():
    first = saved.manifest()
    assert json.loads(to_text(first))["manifest_hash"] != json.loads(to_text(replace(first, step=21)))["manifest_hash"]


def test_specification_lists_every_field():
    text = (Path(__file__).parents[4] / "docs" / "manifest.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"(?m)^\| `(\w+)` \|", text))
    fields = {"path", "size", "ranges", "run"}
    assert set(json.loads(to_text(saved.manifest()))) | fields == listed
