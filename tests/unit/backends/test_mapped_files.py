"""Parameters are recognized as views of a file only while they are."""

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import safe_open, save_file
from torch import nn

from hf_fsdp_plugin.backends.loading.equal_weights import MemoryMaps, find_mapped_parameters

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="the kernel lists no mappings")


class Subclass(torch.Tensor):
    """A tensor as those of quantized weights."""


@pytest.fixture
def model(one_rank: None, tmp_path: Path) -> nn.Sequential:
    """Two linear layers of whole pages, which are views of a file."""
    layers = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    path = tmp_path / "weights.safetensors"
    save_file(layers.state_dict(), path)
    with safe_open(path, "pt") as file:
        for name, parameter in layers.named_parameters():
            parameter.data = file.get_tensor(name)
    return layers


def found(model: nn.Module) -> list[bool]:
    ids = find_mapped_parameters(model, CPU)
    return [id(parameter) in ids for parameter in model.parameters()]


def test_views_of_a_file_are_found(model: nn.Sequential):
    assert found(model) == [True, True]


def test_new_tensors_are_not(model: nn.Sequential):
    model[0].weight.data = model[0].weight.data.clone()
    assert found(model) == [False, True]


def test_other_strides_are_not(model: nn.Sequential):
    model[1].weight.data = model[1].weight.data.t()
    assert found(model) == [True, False]


def test_views_of_a_changed_mapping_are_not(model: nn.Sequential):
    with torch.no_grad():
        model[1].weight[40:] = 0.0
    assert found(model) == [False, False]
    region = MemoryMaps.read([model[1].weight]).find(model[1].weight)
    assert region is not None and region.private_bytes > 0


def test_pages_are_counted_only_for_views_of_a_file(model: nn.Sequential, monkeypatch: pytest.MonkeyPatch):
    read = []
    original = Path.read_text
    monkeypatch.setattr(Path, "read_text", lambda path, **options: read.append(path.name) or original(path, **options))
    MemoryMaps.read([torch.ones(2), torch.ones(2, device="meta")])
    assert read == ["maps"]
    MemoryMaps.read(model.parameters())
    assert read[1:] == ["maps", "smaps"]
    MemoryMaps.read([torch.ones(2).as_subclass(Subclass)])
    assert read[3:] == ["maps", "smaps"]


def test_views_of_a_removed_file_are_not(model: nn.Sequential, tmp_path: Path):
    os.remove(tmp_path / "weights.safetensors")
    assert found(model) == [False, False]


def test_views_of_a_replaced_file_are_not(model: nn.Sequential, tmp_path: Path):
    path = tmp_path / "weights.safetensors"
    save_file({"other": torch.zeros(64, 64)}, tmp_path / "other")
    os.replace(tmp_path / "other", path)
    assert found(model) == [False, False]


def test_sharded_and_meta_parameters_are_not(one_rank: None):
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    assert found(model) == [False, False]
