"""DCP folders, written by one process: their contents are read, and damaged ones are refused."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata

from hf_fsdp_plugin.checkpoint.formats.known_formats import read_stored_model, read_stored_optimizer
from hf_fsdp_plugin.problems import CheckpointError
from tests.support.assembled import assembled as read

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
    """A checkpoint with a model, which has an entry that is not a tensor, and an optimizer."""
    state = {"w": {"exp_avg": torch.ones(3, 2), "step": torch.tensor(4.0), "rounds": 3}}
    groups = [{"params": ["w"], "lr": torch.tensor(0.5), "betas": (0.9, 0.95)}, {"params": [], "lr": 0.1}]
    save({"model": {**WEIGHTS, "extra": {"seen": [1, 2]}}}, tmp_path / "pytorch_model_fsdp_0")
    save({"optimizer": {"state": state, "param_groups": groups}}, tmp_path / "optimizer_0")
    return tmp_path


def save(state: dict[str, Any], folder: Path) -> None:
    dcp.save(state, checkpoint_id=folder, no_dist=True)


def change(folder: Path, edit: Callable[[Metadata], Any]) -> None:
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    edit(metadata)
    path.write_bytes(pickle.dumps(metadata))


def set_places(metadata: Metadata, **attributes: Any) -> None:
    """Change the place of every entry: its file, or its bytes in the file."""
    for place in metadata.storage_data.values():
        for name, value in attributes.items():
            setattr(place, name, value)


def test_entries_are_read_under_canonical_names(saved: Path) -> None:
    index = read_stored_model(saved)
    assert (index.format, index.root) == ("dcp", saved)
    assert list(index.tensors) == CANONICAL
    assert index.objects == {"extra.seen": [1, 2]}
    for tensor, expected in zip(index.tensors.values(), WEIGHTS.values(), strict=True):
        assert tensor.dtype == str(expected.dtype).removeprefix("torch.")
        raw = expected.view(torch.uint16) if expected.dtype == torch.bfloat16 else expected
        assert (read(saved, tensor) == raw.numpy()).all()
    assert index.tensors["empty"].pieces == ()


def test_optimizer_state_is_read_by_parameter(saved: Path) -> None:
    index = read_stored_optimizer(saved)
    assert index is not None
    assert index.state.keys() == {"w"}
    assert index.state["w"]["rounds"] == 3
    assert index.state["w"]["exp_avg"].name == "w"
    assert (read(saved, index.state["w"]["exp_avg"]) == 1).all()
    assert read(saved, index.state["w"]["step"]) == 4
    assert index.groups == [{"params": ["w"], "lr": 0.5, "betas": (0.9, 0.95)}, {"params": [], "lr": 0.1}]


def test_model_and_optimizer_folders_are_read(saved: Path) -> None:
    folder = saved / "pytorch_model_fsdp_0"
    assert list(read_stored_model(folder).tensors) == CANONICAL
    assert read_stored_model(folder).tensors["scale"].pieces[0].file == "__0_0.distcp"
    assert read_stored_optimizer(folder) is None
    assert read_stored_optimizer(saved / "optimizer_0") is not None
    with pytest.raises(CheckpointError, match=r"optimizer_0: .*FSDP-E451"):
        read_stored_model(saved / "optimizer_0")


def test_index_of_earlier_versions_is_ignored(saved: Path) -> None:
    (saved / "pytorch_model_fsdp_0" / ".fsdp_index").write_bytes(b"FSDPIDX1")
    assert list(read_stored_model(saved).tensors) == CANONICAL


def test_damaged_strides_are_refused(saved: Path) -> None:
    path = saved / "pytorch_model_fsdp_0" / "__0_0.distcp"
    strides = pickle.BININT1 + b"\4" + pickle.BININT1 + b"\1" + pickle.TUPLE2
    data = path.read_bytes()
    assert data.count(strides) == 1
    path.write_bytes(data.replace(strides, strides.replace(b"\4", b"\2")))
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp: contains float32 \(3, 4\) with the strides.*FSDP-E459"):
        read(saved, read_stored_model(saved).tensors["layers.0.weight"])


def test_model_without_top_key_is_read(tmp_path: Path) -> None:
    save({"model.embed.weight": torch.ones(2), "lm_head.weight": torch.ones(2)}, tmp_path)
    assert list(read_stored_model(tmp_path).tensors) == ["model.embed.weight", "lm_head.weight"]


def test_tied_names_have_the_same_pieces(saved: Path) -> None:
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
def test_file_outside_the_folder_is_refused(saved: Path, file: str) -> None:
    shutil.copy(saved / "pytorch_model_fsdp_0" / "__0_0.distcp", saved / "outside")
    change(saved / "pytorch_model_fsdp_0", lambda metadata: set_places(metadata, relative_path=file))
    with pytest.raises(CheckpointError, match=r"\.metadata: .*FSDP-E456"):
        read_stored_model(saved)


def test_links_to_files_are_followed(saved: Path) -> None:
    folder = saved / "pytorch_model_fsdp_0"
    (folder / "__0_0.distcp").rename(saved / "real")
    (folder / "__0_0.distcp").symlink_to("../real")
    assert list(read_stored_model(saved).tensors) == CANONICAL


def test_missing_file_is_refused(saved: Path) -> None:
    (saved / "optimizer_0" / "__0_0.distcp").unlink()
    with pytest.raises(CheckpointError, match=r"optimizer_0/\.metadata: .*'__0_0\.distcp'.*FSDP-E457"):
        read_stored_optimizer(saved)


def test_truncated_file_is_refused_with_its_size(saved: Path) -> None:
    path = saved / "pytorch_model_fsdp_0" / "__0_0.distcp"
    path.write_bytes(path.read_bytes()[:-1])
    size = path.stat().st_size
    with pytest.raises(CheckpointError, match=rf"__0_0\.distcp: has {size} bytes.*FSDP-E453"):
        read_stored_model(saved)


def test_unfinished_save_is_not_reported_as_missing_model(saved: Path) -> None:
    (saved / "pytorch_model_fsdp_0" / ".metadata").unlink()
    with pytest.raises(CheckpointError, match=r"pytorch_model_fsdp_0: .*\.metadata.*FSDP-E452"):
        read_stored_model(saved)


TRANSPOSED = "model.transposed"
EDITS: list[tuple[Callable[[Metadata], Any], str]] = [
    (lambda m: m.state_dict_metadata[TRANSPOSED].chunks.clear(), "6 elements of 1 tensor .*: transposed.*FSDP-E458"),
    (lambda m: setattr(m.state_dict_metadata[TRANSPOSED].chunks[0], "sizes", (9, 9)), f"{TRANSPOSED}.*FSDP-E453"),
    (lambda m: setattr(m.state_dict_metadata["model.scale"].properties, "dtype", torch.float64),
     r"int64 \(\) .* float64 \(\) of 'scale'.*FSDP-E459"),
    (lambda m: m.storage_data.clear(), "KeyError.*FSDP-E453"),
    (lambda m: m.planner_data.update({"model.scale": ("model", ["scale"])}), "the path.*FSDP-E453"),
    (lambda m: set_places(m, offset=-5), "-5.*FSDP-E453"),
    (lambda m: set_places(m, transform_descriptors=["zstd"]), "zstd.*FSDP-E453"),
]  # fmt: skip


@pytest.mark.parametrize(("edit", "detail"), EDITS)
def test_invalid_metadata_is_refused(saved: Path, edit: Callable[[Metadata], Any], detail: str) -> None:
    change(saved / "pytorch_model_fsdp_0", edit)
    with pytest.raises(CheckpointError, match=detail):
        for tensor in read_stored_model(saved).tensors.values():
            read(saved, tensor)


def test_metadata_with_another_object_is_refused(saved: Path) -> None:
    (saved / "pytorch_model_fsdp_0" / ".metadata").write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(CheckpointError, match=r"a dict instead of Metadata.*FSDP-E453"):
        read_stored_model(saved)
