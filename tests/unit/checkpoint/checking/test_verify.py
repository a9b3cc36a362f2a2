"""Verification with a manifest: every kind of damage is found with its file and parameter."""

import random
import shutil
from dataclasses import replace
from pathlib import Path

import numpy
import pytest

from hf_fsdp_plugin.checkpoint.formats.manifest import Manifest, read_manifest, to_text
from hf_fsdp_plugin.checkpoint.names import MANIFEST_NAME
from hf_fsdp_plugin.tools.verify.verification import verify
from tests.support import damages, saved
from tests.support.saved import errors, notes, only_error

FILES = ["fsdp_manifest.json"]
FILES += [f"optimizer_0/{name}" for name in (".metadata", "__0_0.distcp", "__1_0.distcp", "__2_0.distcp")]
FILES += [f"pytorch_model_fsdp_0/{name}" for name in (".metadata", "__0_0.distcp", "__1_0.distcp")]
FILES += ["trainer_state.json"]
OF_TENSORS = ("__0_0.distcp", "__1_0.distcp")


def manifest_of(folder: Path) -> Manifest:
    manifest = read_manifest(folder)
    assert manifest is not None
    return manifest


def test_all_bytes_of_a_checkpoint_are_verified(local):
    verdict = verify(local)
    assert verdict.ok and not errors(verdict)
    sizes = [path.stat().st_size for path in local.rglob("*") if path.is_file() and path.name != MANIFEST_NAME]
    assert (verdict.num_files, verdict.num_bytes) == (len(sizes), sum(sizes))


def test_all_damaged_files_are_listed(local):
    assert sorted(path.relative_to(local).as_posix() for path in local.rglob("*") if path.is_file()) == FILES


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("file", FILES)
def test_flipped_byte_in_any_file_is_found(local, file, seed):
    path = local / file
    damages.flip(path, random.Random(seed).randrange(path.stat().st_size))
    verdict = verify(local)
    assert not verdict.ok and any(file in text for text in errors(verdict))


def test_flipped_byte_names_the_parameter(local):
    tried = 0
    for record in manifest_of(local).files:
        whole = (local / record.path).read_bytes()
        for piece in record.ranges:
            damages.flip(local / record.path, random.Random(piece.start).randrange(piece.start, piece.stop))
            text = next(text for text in errors(verify(local)) if record.path in text)
            assert f"bytes {piece.start:,} to {piece.stop:,} differ" in text and text.endswith("[FSDP-E471]")
            assert (f"contain {piece.name}." if piece.name else "contain no tensor.") in text
            (local / record.path).write_bytes(whole)
            tried += bool(piece.name)
    assert tried == 12


def test_damage_in_one_file_is_one_problem(local):
    record = next(record for record in manifest_of(local).files if record.path == FILES[6])
    for piece in record.ranges[-2:]:
        damages.flip(local / record.path, piece.start)
    text = only_error(local, "FSDP-E471")
    assert "2 of 2 byte ranges" in text and "contain embed.weight, norm.weight." in text


@pytest.mark.parametrize("file", FILES[1:])
def test_truncated_file_is_found(local, file):
    path = local / file
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-1])
    text = only_error(local, "FSDP-E470")
    assert f"{file}: has {size - 1:,} bytes; {size:,} were saved" in text
    assert ("norm.weight" in text) == file.endswith(OF_TENSORS)


def test_swapped_files_are_found(local):
    first, second = (local / "optimizer_0" / f"__{rank}_0.distcp" for rank in range(2))
    first.rename(local / "other")
    second.rename(first)
    (local / "other").rename(second)
    assert len(errors(verify(local))) == 2


@pytest.mark.parametrize("file", FILES[1:])
def test_missing_file_is_found_with_its_tensors(local, file):
    (local / file).unlink()
    text = only_error(local, "FSDP-E457")
    assert f"{file}: " in text
    assert ("it contained" in text) == file.endswith(".distcp")


def test_folder_with_name_of_file_is_a_missing_file(local):
    (local / FILES[8]).unlink()
    (local / FILES[8]).mkdir()
    assert "trainer_state.json: " in only_error(local, "FSDP-E457")


def test_extra_files_are_noted(local):
    (local / "notes").mkdir()
    (local / "notes" / "a.txt").write_text("mine")
    (local / "extra.bin").write_bytes(b"x")
    verdict = verify(local)
    assert verdict.ok
    assert any("extra.bin, notes." in text and text.endswith("[FSDP-N473]") for text in notes(verdict))


def test_later_manifest_version_is_reported(local):
    path = local / MANIFEST_NAME
    path.write_text(path.read_text().replace('"version": 1', '"version": 3', 1))
    assert "manifest version 3 " in only_error(local, "FSDP-E465")


def test_unfinished_save_is_reported(local):
    (local / MANIFEST_NAME).unlink()
    (local / "pytorch_model_fsdp_0" / ".metadata").unlink()
    assert "the save was not finished" in only_error(local, "FSDP-E452")


def test_manifest_of_other_parameters_is_reported(local):
    manifest = manifest_of(local)
    parameters = {**manifest.parameters, "more": ("float32", (1,))}
    (local / MANIFEST_NAME).write_text(to_text(replace(manifest, parameters=parameters, ties=())))
    assert "does not contain 1 of the 4 parameters of its manifest: more." in only_error(local, "FSDP-E477")


def test_tensor_with_missing_elements_is_reported(local):
    manifest = manifest_of(local)
    shutil.rmtree(local / "pytorch_model_fsdp_0")
    tensors = {name: numpy.zeros(saved.SHAPES[name], "f4") for name in ("embed.weight", "norm.weight")}
    saved.write_shards(local, tensors, aliases={"head.weight": "embed.weight"}, ranks=(0,))
    saved.write_manifest(local, parameters=manifest.parameters, ties=manifest.ties)
    assert "9 elements of 3 tensors are in none of the files: embed.weight" in only_error(local, "FSDP-E458")


def test_whole_checkpoint_is_verified_when_given_a_part(local):
    damages.flip(local / FILES[8], 3)
    verdict = verify(local / "pytorch_model_fsdp_0")
    assert verdict.checkpoint == local and "trainer_state.json" in errors(verdict)[0]


def test_unlisted_file_that_a_resume_reads_is_an_error(local):
    """A resume refuses it too. Other files that are not listed are the user's."""
    manifest = manifest_of(local)
    listed = tuple(record for record in manifest.files if record.path != "optimizer_0/__1_0.distcp")
    (local / MANIFEST_NAME).write_text(to_text(replace(manifest, files=listed)))
    assert "optimizer_0/__1_0.distcp: is not listed" in only_error(local, "FSDP-E459")
