"""Checkpoints to merge, and comparisons of the result."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy
import pytest
import saved
from safetensors.numpy import load_file, save_file

from hf_fsdp_plugin.checkpoint.merging.merge import Merged

LOCAL = "pytorch_model_fsdp_local"
TENSORS = {
    "lm_head.weight": numpy.linspace(-1e5, 1e5, 60, dtype="<f4").reshape(12, 5),
    "model.norm.weight": numpy.linspace(-3, 3, 7, dtype="<f4"),
    "model.steps": numpy.array(7, dtype="<i8"),
    "model.embed_tokens.weight": numpy.arange(60, dtype="<f4").reshape(12, 5),
}
CONFIG = {"model_type": "llama", "dtype": "float32", "text_config": {"torch_dtype": "float32"}}


def save(folder: Path, tensors: dict[str, numpy.ndarray] = TENSORS, ties: Sequence[tuple[str, ...]] = ()) -> Path:
    """Write a local checkpoint of two ranks, with every tensor sharded in its first dim, and a manifest."""
    (folder / LOCAL).mkdir(parents=True)
    for rank in (0, 1):
        entries, pieces = {}, {}
        for name, whole in tensors.items():
            parts = numpy.array_split(whole, 2) if whole.ndim else [whole, whole]
            offsets = [len(parts[0]) * rank, *[0] * (whole.ndim - 1)] if whole.ndim else []
            entries[name] = numpy.array(parts[rank], order="C")
            pieces[name] = {"name": name, "shape": list(whole.shape), "offsets": offsets}
        aliases = {name: kept for kept, *rest in ties for name in rest}
        description = {"rank": rank, "world_size": 2, "pieces": pieces, "aliases": aliases}
        save_file(entries, folder / LOCAL / f"0_rank{rank}.safetensors", {"fsdp_local": json.dumps(description)})
    (folder / "optimizer.pt").write_bytes(b"moments")
    parameters = {name: (str(whole.dtype), whole.shape) for name, whole in tensors.items()}
    parameters |= {name: parameters[kept] for kept, *rest in ties for name in rest}
    saved.write_manifest(folder, parameters=parameters, ties=tuple(ties))
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
