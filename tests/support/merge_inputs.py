"""Checkpoints to merge, and comparisons of the result."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy
import pytest
from safetensors.numpy import load_file

from hf_fsdp_plugin.tools.merge.merging import Merged
from tests.support import saved

MODEL = "pytorch_model_fsdp_0"
TENSORS = {
    "lm_head.weight": numpy.linspace(-1e5, 1e5, 60, dtype="<f4").reshape(12, 5),
    "model.norm.weight": numpy.linspace(-3, 3, 7, dtype="<f4"),
    "model.steps": numpy.array(7, dtype="<i8"),
    "model.embed_tokens.weight": numpy.arange(60, dtype="<f4").reshape(12, 5),
}
CONFIG = {"model_type": "llama", "dtype": "float32", "text_config": {"torch_dtype": "float32"}}


def save(folder: Path, tensors: dict[str, numpy.ndarray] = TENSORS, ties: Sequence[tuple[str, ...]] = ()) -> Path:
    """Write a checkpoint of two ranks, with every tensor sharded in its first dim, and a manifest."""
    aliases = {name: kept for kept, *rest in ties for name in rest}
    places = saved.write_shards(folder, tensors, aliases=aliases)
    (folder / "optimizer.pt").write_bytes(b"moments")
    parameters = {name: (str(whole.dtype), whole.shape) for name, whole in tensors.items()}
    parameters |= {name: parameters[kept] for kept, *rest in ties for name in rest}
    saved.write_manifest(folder, places=places, parameters=parameters, ties=tuple(ties))
    return folder


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """The folder of a complete checkpoint of two ranks."""
    folder = save(tmp_path / "run" / "checkpoint-1")
    (folder / "trainer_state.json").write_text("{}")
    return folder


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """The folder to merge the checkpoint into."""
    return tmp_path / "merged"


def read(folder: Path) -> dict[str, numpy.ndarray]:
    found: dict[str, numpy.ndarray] = {}
    for path in folder.glob("*.safetensors"):
        found |= load_file(path)
    return found


def assert_same(found: dict[str, numpy.ndarray], expected: dict[str, numpy.ndarray] = TENSORS) -> None:
    assert found.keys() == expected.keys()
    for name, whole in expected.items():
        assert (found[name].dtype, found[name].shape) == (whole.dtype, whole.shape)
        assert found[name].tobytes() == whole.tobytes()


def tree(folder: Path) -> dict[str, bytes]:
    """Return the bytes of every file below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def codes(merged: Merged) -> list[str]:
    return [problem.code for problem in merged.problems]


def messages(merged: Merged) -> str:
    return "\n".join(map(str, merged.problems))
