"""Checkpoints to check: one of this package, a stock one, and a Hugging Face folder."""

import shutil
from pathlib import Path

import pytest
import saved
import torch


@pytest.fixture
def local(tmp_path) -> Path:
    return saved.local_checkpoint(tmp_path / "checkpoint-20")


@pytest.fixture(scope="session")
def model():
    torch.manual_seed(0)
    return saved.tiny_llama()


@pytest.fixture(scope="session")
def stock_once(tmp_path_factory, model) -> Path:
    return saved.stock_checkpoint(tmp_path_factory.mktemp("stock") / "checkpoint-7", model)


@pytest.fixture
def stock(tmp_path, stock_once) -> Path:
    return Path(shutil.copytree(stock_once, tmp_path / "checkpoint-7"))


@pytest.fixture
def hf(tmp_path, model) -> Path:
    """A Hugging Face folder with a manifest."""
    folder = tmp_path / "final"
    model.save_pretrained(folder)
    parameters = {name: ("float32", tuple(tensor.shape)) for name, tensor in model.state_dict().items()}
    saved.write_manifest(folder, kind="full", world_size=1, parameters=parameters)
    return folder
