"""DCP's folders, written by one process: what is in them, and what is refused."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata

from hf_fsdp_plugin.checkpoint.formats.element_types import numpy_dtype
from hf_fsdp_plugin.checkpoint.formats.stored import StoredTensor
from hf_fsdp_plugin.checkpoint.formats.table import read_stored_model, read_stored_optimizer
from hf_fsdp_plugin.problems import CheckpointError

WEIGHTS = {
    "layers.0._fsdp_wrapped_module._checkpoint_wrapped_module.weight": torch.arange(12.0).reshape(3, 4),
    "_orig_mod.norm.weight": torch.arange(5).bfloat16(),
    "scale": torch.tensor(7, dtype=torch.int64),
    "transposed": torch.arange(6.0).reshape(2, 3).t(),
    "empty": torch.zeros(0, 3),
}
CANONICAL = ["layers.0.weight", "norm.weight", "scale", "transposed", "empty"]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A checkpoint with a model, an entry of it that is no tensor, and an optimizer."""
    state = {"w": {"exp_avg": torch.ones(3, 2), "step": torch.tensor(4.0), "rounds": 3}}
    groups = [{"params": ["w"], "lr": torch.tensor(0.5), "betas": (0.9, 0.95)}, {"params": [], "lr": 0.1}]
    save({"model": {**WEIGHTS, "extra": {"seen": [1, 2]}}}, tmp_path / "pytorch_model_fsdp_0")
    save({"optimizer": {"state": state, "param_groups": groups}}, tmp_path / "optimizer_0")
    return tmp_path


def save(state: dict[str, Any], folder: Path) -> None:
    dcp.save(state, checkpoint_id=folder, no_dist=True)


def read(root: Path, tensor: StoredTensor) -> np.ndarray:
    dtype = numpy_dtype(tensor.dtype)
    result = np.zeros(tensor.shape, dtype)
    for piece in tensor.pieces:
        assert piece.box.sizes == tensor.shape
        data = np.fromfile(root / piece.file, np.uint8)
        result = np.ndarray(tensor.shape, dtype, data, piece.offset, [s * dtype.itemsize for s in piece.strides])
    return result


def change(folder: Path, edit: Callable[[Metadata], None]) -> None:
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    edit(metadata)
    path.write_bytes(pickle.dumps(metadata))


def move(metadata: Metadata, file: str) -> None:
    """Every entry is said to lie in ``file``."""
    for place in metadata.storage_data.values():
        place.relative_path = file


def test_every_entry_is_found_under_its_clean_name(saved: Path) -> None:
    index = read_stored_model(saved)
    assert (index.format, index.root) == ("dcp", saved)
    assert list(index.tensors) == CANONICAL
    assert index.objects == {"extra.seen": [1, 2]}
    for tensor, expected in zip(index.tensors.values(), WEIGHTS.values(), strict=True):
        assert tensor.dtype == str(expected.dtype).removeprefix("torch.")
        raw = expected.view(torch.uint16) if expected.dtype == torch.bfloat16 else expected
        assert (read(saved, tensor) == raw.numpy()).all()
    assert index.tensors["empty"].pieces == ()


def test_an_optimizer_is_found_by_parameter_with_plain_hyperparameters(saved: Path) -> None:
    index = read_stored_optimizer(saved)
    assert index is not None
    assert index.state.keys() == {"w"}
    assert index.state["w"]["rounds"] == 3
    assert index.state["w"]["exp_avg"].name == "w"
    assert (read(saved, index.state["w"]["exp_avg"]) == 1).all()
    assert read(saved, index.state["w"]["step"]) == 4
    assert index.groups == [{"params": ["w"], "lr": 0.5, "betas": (0.9, 0.95)}, {"params": [], "lr": 0.1}]


def test_the_folders_themselves_may_be_named(saved: Path) -> None:
    folder = saved / "pytorch_model_fsdp_0"
    assert list(read_stored_model(folder).tensors) == CANONICAL
    assert read_stored_model(folder).tensors["scale"].pieces[0].file == "__0_0.distcp"
    assert read_stored_optimizer(folder) is None
    assert read_stored_optimizer(saved / "optimizer_0") is not None
    with pytest.raises(CheckpointError, match="it holds an optimizer and no model"):
        read_stored_model(saved / "optimizer_0")


def test_a_model_saved_without_a_top_key_is_all_of_the_folder(tmp_path: Path) -> None:
    save({"model.embed.weight": torch.ones(2), "lm_head.weight": torch.ones(2)}, tmp_path)
    assert list(read_stored_model(tmp_path).tensors) == ["model.embed.weight", "lm_head.weight"]


def test_names_tied_to_one_region_have_pieces_at_one_place(saved: Path) -> None:
    def tie(metadata: Metadata) -> None:
        name = "model.scale"
        (place,) = [key for key in metadata.storage_data if key.fqn == name]
        metadata.state_dict_metadata["model.tied"] = metadata.state_dict_metadata[name]
        metadata.planner_data["model.tied"] = ("model", "tied")
        metadata.storage_data[type(place)("model.tied", place.offset)] = metadata.storage_data[place]

    change(saved / "pytorch_model_fsdp_0", tie)
    tensors = read_stored_model(saved).tensors
    assert tensors["tied"].pieces == tensors["scale"].pieces


@pytest.mark.parametrize("file", ["../outside", "/etc/hostname", "a/../../outside", "bad\0name"])
def test_a_file_outside_the_folder_is_refused(saved: Path, file: str) -> None:
    shutil.copy(saved / "pytorch_model_fsdp_0" / "__0_0.distcp", saved / "outside")
    change(saved / "pytorch_model_fsdp_0", lambda metadata: move(metadata, file))
    with pytest.raises(CheckpointError, match=r"\.metadata: it names the file .*(outside its folder|no file can be)"):
        read_stored_model(saved)


def test_a_link_out_of_the_folder_is_refused_and_one_within_is_not(saved: Path) -> None:
    folder = saved / "pytorch_model_fsdp_0"
    (folder / "__0_0.distcp").rename(folder / "real.distcp")
    (folder / "__0_0.distcp").symlink_to("real.distcp")
    assert list(read_stored_model(saved).tensors) == CANONICAL
    (folder / "real.distcp").rename(saved / "real")
    (folder / "__0_0.distcp").unlink()
    (folder / "__0_0.distcp").symlink_to("../real")
    with pytest.raises(CheckpointError, match=r"'__0_0\.distcp', which is a link to .*real, outside"):
        read_stored_model(saved)


def test_a_missing_file_is_named(saved: Path) -> None:
    (saved / "optimizer_0" / "__0_0.distcp").unlink()
    with pytest.raises(CheckpointError, match=r"optimizer_0/\.metadata: .*'__0_0\.distcp', which is not there"):
        read_stored_optimizer(saved)


def test_a_file_shorter_than_the_metadata_says_is_named_with_its_size(saved: Path) -> None:
    path = saved / "pytorch_model_fsdp_0" / "__0_0.distcp"
    path.write_bytes(path.read_bytes()[:-1])
    size = path.stat().st_size
    with pytest.raises(CheckpointError, match=rf"__0_0\.distcp: {size} bytes long, where .metadata places bytes"):
        read_stored_model(saved)


def test_a_file_of_another_checkpoint_is_noticed(saved: Path) -> None:
    folder = saved / "pytorch_model_fsdp_0"

    def other_type(metadata: Metadata) -> None:
        metadata.state_dict_metadata["model.scale"].properties.dtype = torch.float64

    change(folder, other_type)
    with pytest.raises(
        CheckpointError, match=r"holds int64 \(\) where .metadata promises float64 \(\) of 'model.scale'"
    ):
        read_stored_model(saved)


def test_a_broken_off_save_is_told_from_a_folder_without_a_model(saved: Path) -> None:
    (saved / "pytorch_model_fsdp_0" / ".metadata").unlink()
    with pytest.raises(
        CheckpointError, match=r"pytorch_model_fsdp_0: it has no \.metadata: its writing was broken off"
    ):
        read_stored_model(saved)


def drop_chunk(metadata: Metadata) -> None:
    metadata.state_dict_metadata["model.transposed"].chunks.clear()


def chunk_outside(metadata: Metadata) -> None:
    metadata.state_dict_metadata["model.transposed"].chunks[0].sizes = torch.Size((9, 9))


def no_place(metadata: Metadata) -> None:
    metadata.storage_data.clear()


def odd_path(metadata: Metadata) -> None:
    metadata.planner_data["model.scale"] = ("model", ["scale"])


def odd_region(metadata: Metadata) -> None:
    next(iter(metadata.storage_data.values())).offset = -5


def transformed(metadata: Metadata) -> None:
    next(iter(metadata.storage_data.values())).transform_descriptors = ["zstd"]


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (drop_chunk, r"6 elements of 1 tensors are in none of its files; the first is 'model.transposed'"),
        (chunk_outside, "not what torch.distributed.checkpoint writes"),
        (no_place, "not what torch.distributed.checkpoint writes"),
        (odd_path, "not what torch.distributed.checkpoint writes .*the path"),
        (odd_region, "not what torch.distributed.checkpoint writes .*-5"),
        (transformed, r"transformed by \['zstd'\]"),
    ],
)
def test_metadata_that_contradicts_itself_is_refused(saved: Path, edit: Any, message: str) -> None:
    change(saved / "pytorch_model_fsdp_0", edit)
    with pytest.raises(CheckpointError, match=message):
        read_stored_model(saved)


def test_another_pickle_in_its_place_is_refused(saved: Path) -> None:
    (saved / "pytorch_model_fsdp_0" / ".metadata").write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(CheckpointError, match="a dict instead of Metadata"):
        read_stored_model(saved)
