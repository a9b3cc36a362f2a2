"""A checkpoint that cannot be used is told from one that can, with the reason, and the newest good one is found."""

import json
import shutil
from pathlib import Path

import pytest
import saved
import torch

from hf_fsdp_plugin.checkpoint.checking.completeness import (
    SAVING,
    checkpoint_of,
    newest_complete,
    numbered,
    own_files,
    why_incomplete,
)
from hf_fsdp_plugin.checkpoint.names import MANIFEST_NAME
from hf_fsdp_plugin.checkpoint.writing import staging


@pytest.fixture
def local(tmp_path) -> Path:
    return saved.local_checkpoint(tmp_path / "checkpoint-20")


@pytest.fixture(scope="module")
def stock_once(tmp_path_factory) -> Path:
    return saved.stock_checkpoint(tmp_path_factory.mktemp("stock") / "checkpoint-7", saved.tiny_llama())


@pytest.fixture
def stock(tmp_path, stock_once) -> Path:
    return Path(shutil.copytree(stock_once, tmp_path / "checkpoint-7"))


def test_whole_checkpoints_are_complete(local, stock):
    assert why_incomplete(local) is None
    assert why_incomplete(stock) is None


def test_a_hugging_face_folder_is_complete(tmp_path):
    saved.tiny_llama().save_pretrained(tmp_path)
    assert why_incomplete(tmp_path) is None


@pytest.mark.parametrize("file", ["trainer_state.json", "pytorch_model_fsdp_local/0_rank1.safetensors"])
def test_a_missing_file_of_the_manifest_is_named(local, file):
    (local / file).unlink()
    assert (why_incomplete(local) or "").startswith(f"{file}: is missing")


def test_a_file_of_another_size_is_named_with_both_sizes(local):
    (local / "trainer_state.json").write_text("{}")
    assert why_incomplete(local) == "trainer_state.json: has 2 bytes; 19 were saved."


def test_several_problems_are_counted(local):
    shutil.rmtree(local / "optimizer_local")
    assert (why_incomplete(local) or "").endswith("(1 more problems)")


def test_a_damaged_manifest_is_no_manifest(local):
    saved.flip(local / MANIFEST_NAME, 100)
    assert (why_incomplete(local) or "").startswith(f"{MANIFEST_NAME}: is ")


def test_ours_without_a_manifest_was_not_finished(local):
    (local / MANIFEST_NAME).unlink()
    assert "no fsdp_manifest.json: the save was not finished" in (why_incomplete(local) or "")


def test_a_folder_in_which_a_checkpoint_comes_to_be_is_not_complete(tmp_path, stock_once):
    assert SAVING == staging.SAVING
    folder = staging.Staging(tmp_path / "checkpoint-9").folder
    shutil.copytree(stock_once, folder)
    for path in (folder, folder.parent):
        assert "is being written, or is what is left of a save that was cut off" in (why_incomplete(path) or "")


@pytest.mark.parametrize(
    ("file", "reason"),
    [
        ("trainer_state.json", "has no trainer_state.json: the save was not finished."),
        ("pytorch_model_fsdp_0/.metadata", "it has no .metadata"),
        ("pytorch_model_fsdp_0/__0_0.distcp", "__0_0.distcp"),
        ("optimizer_0/__0_0.distcp", "__0_0.distcp"),
    ],
)
def test_a_stock_checkpoint_without_a_file_it_needs_is_not_complete(stock, file, reason):
    (stock / file).unlink()
    assert reason in (why_incomplete(stock) or "")


@pytest.mark.parametrize(
    "file",
    [
        "trainer_state.json",
        "pytorch_model_fsdp_0/.metadata",
        "pytorch_model_fsdp_0/__0_0.distcp",
        "optimizer_0/.metadata",
        "optimizer_0/__0_0.distcp",
        "scheduler.pt",
        "rng_state_1.pth",
    ],
)
@pytest.mark.parametrize("keep", [0.0, 0.5, 0.9])
def test_a_stock_checkpoint_with_a_file_cut_short_is_not_complete(stock, file, keep):
    path = stock / file
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * keep)])
    assert file.rpartition("/")[2] in (why_incomplete(stock) or "")


def test_an_archive_whose_end_is_garbled_is_not_complete(stock):
    path = stock / "rng_state_1.pth"
    saved.flip(path, path.stat().st_size - 22)  # the signature of the end's record
    assert "rng_state_1.pth: the bytes before" in (why_incomplete(stock) or "")


def test_a_checkpoint_without_an_optimizer_may_be_complete(stock):
    shutil.rmtree(stock / "optimizer_0")
    assert why_incomplete(stock) is None


def test_accelerate_s_checkpoint_ends_with_the_state_of_its_rng(tmp_path, stock_once):
    folder = Path(shutil.copytree(stock_once, tmp_path / "checkpoint_3"))
    (folder / "trainer_state.json").unlink()
    assert why_incomplete(folder) == "has no random_states_0.pkl: the save was not finished."
    torch.save({"random": 1}, folder / "random_states_0.pkl")
    assert why_incomplete(folder) is None


@pytest.mark.parametrize("made", ["empty", "nowhere", "file", "other"])
def test_what_is_no_checkpoint_is_not_complete(tmp_path, made):
    folder = tmp_path / made
    if made == "file":
        folder.write_text("x")
    elif made != "nowhere":
        folder.mkdir()
    if made == "other":
        (folder / "README.md").write_text("x")
    assert why_incomplete(folder)


def test_the_newest_complete_checkpoint_is_found_and_the_others_are_named(tmp_path):
    run = tmp_path / "run"
    for number in (9, 10, 100, 101):
        saved.local_checkpoint(run / f"checkpoint-{number}")
    (run / "checkpoint-100" / MANIFEST_NAME).unlink()
    (run / "checkpoint-101" / "trainer_state.json").unlink()
    (run / "checkpoint-200").touch()
    (run / "checkpoint-best").mkdir()
    found, passed_over = newest_complete(run)
    assert found == run / "checkpoint-10"
    assert [path.name for path, _ in passed_over] == ["checkpoint-101", "checkpoint-100"]
    assert "trainer_state.json: is missing" in passed_over[0][1] and "was not finished" in passed_over[1][1]


def test_a_run_without_a_complete_checkpoint_has_none(tmp_path):
    (tmp_path / "checkpoint-1").mkdir()
    found, passed_over = newest_complete(tmp_path)
    assert found is None and [path.name for path, _ in passed_over] == ["checkpoint-1"]
    assert newest_complete(tmp_path / "nowhere") == (None, [])


def test_accelerate_s_checkpoints_have_their_own_prefix(tmp_path):
    saved.local_checkpoint(tmp_path / "checkpoint_2")
    saved.local_checkpoint(tmp_path / "checkpoint-1")
    assert newest_complete(tmp_path, "checkpoint_")[0] == tmp_path / "checkpoint_2"
    assert [path.name for path in numbered(tmp_path, "checkpoint-")] == ["checkpoint-1"]


def test_a_part_belongs_to_the_checkpoint_around_it(local, stock, tmp_path):
    assert checkpoint_of(local / "optimizer_local") == local
    assert checkpoint_of(stock / "pytorch_model_fsdp_0") == stock
    assert checkpoint_of(stock) == stock
    alone = Path(shutil.copytree(stock / "pytorch_model_fsdp_0", tmp_path / "alone" / "pytorch_model_fsdp_0"))
    assert checkpoint_of(alone) == alone


def test_checkpoints_within_a_folder_are_not_its_own_files(local, tmp_path):
    (tmp_path / ".checkpoint-30.saving").mkdir()
    (tmp_path / ".checkpoint-30.saving" / "a").touch()
    (tmp_path / "config.json").write_text(json.dumps({}))
    assert list(own_files(tmp_path)) == [tmp_path / "config.json"]
