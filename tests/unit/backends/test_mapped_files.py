"""Parameters are recognized as views of a file only while they are."""

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import safe_open, save_file
from torch import nn

from hf_fsdp_plugin.backends.loading.equal_weights import find_mapped_parameters
from hf_fsdp_plugin.backends.loading.mapped_files import file_identity, parameter_memory

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(not os.access("/proc/self/pagemap", os.R_OK), reason="the kernel lists no pages")


class Subclass(torch.Tensor):
    """A tensor as those of quantized weights."""


@pytest.fixture
def model(one_rank: None, tmp_path: Path) -> nn.Sequential:
    """Two linear layers that are views of a file, with whole pages between them."""
    layers = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    path = tmp_path / "weights.safetensors"
    save_file({**layers.state_dict(), "0.weights_between": torch.zeros(4096)}, path)
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


def test_changed_views_are_not(model: nn.Sequential):
    with torch.no_grad():
        model[1].weight[40:] = 0.0
    assert found(model) == [True, False]
    memory = parameter_memory(model.parameters())
    assert (memory.num_mapped, memory.num_private, memory.private_bytes) == (1, 1, 64 * 64 * 4)


def test_changes_by_data_and_by_numpy_are_found(model: nn.Sequential):
    model[0].weight.data[0, 0] = 1.0
    model[1].weight.detach().numpy()[63, 63] = 1.0
    assert found(model) == [False, False]


def test_read_views_are_found(model: nn.Sequential):
    assert all(torch.isfinite(parameter.sum()) for parameter in model.parameters())
    assert found(model) == [True, True]


def test_subclasses_are_private(model: nn.Sequential):
    memory = parameter_memory([torch.ones(2).as_subclass(Subclass), torch.ones(2, device="meta")])
    assert (memory.num_private, memory.num_on_meta) == (1, 1)


def test_file_with_a_hash_as_name_is_known_by_it(tmp_path: Path):
    content, plain = tmp_path / ("0a" * 32), tmp_path / "model.safetensors"
    for path in (content, plain):
        path.write_bytes(b"1")
    before = file_identity(str(content)), file_identity(str(plain))
    for path in (content, plain):
        os.utime(path, (1.0, 1.0))
    assert before[0] == file_identity(str(content)) and before[1] != file_identity(str(plain))


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
