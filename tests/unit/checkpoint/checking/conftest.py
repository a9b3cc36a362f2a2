"""A Hugging Face folder to check."""

from pathlib import Path

import pytest

from tests.support import saved


@pytest.fixture
def hf(tmp_path: Path) -> Path:
    """A Hugging Face folder with a manifest."""
    model, folder = saved.tiny_llama(), tmp_path / "final"
    model.save_pretrained(folder)
    parameters = {name: ("float32", tuple(tensor.shape)) for name, tensor in model.state_dict().items()}
    saved.write_manifest(folder, kind="full", world_size=1, parameters=parameters)
    return folder
