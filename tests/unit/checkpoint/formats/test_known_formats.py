"""The table of formats: search order, speed, and files with wrong bytes."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from hf_fsdp_plugin.checkpoint.formats.known_formats import (
    read_stored_model,
    read_stored_optimizer,
    stored_state_dict_type,
)
from hf_fsdp_plugin.plan import names
from hf_fsdp_plugin.problems import CheckpointError


def test_folder_without_model_reports_searched_names(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError) as raised:
        read_stored_model(tmp_path, 1)
    for sought in (
        "pytorch_model_fsdp_1/.metadata", "model_1.safetensors",
        "pytorch_model_fsdp_1.bin", "pytorch_model_fsdp_1_rank*.bin",
    ):  # fmt: skip
        assert sought in str(raised.value)
    assert [problem.code for problem in raised.value.problems] == ["FSDP-E451"]
    assert read_stored_optimizer(tmp_path) is None


def test_path_that_is_not_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"absent: .*FSDP-E450"):
        read_stored_model(tmp_path / "absent")
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(CheckpointError, match=rf"{tmp_path}\. \[FSDP-E450\]"):
        read_stored_optimizer(tmp_path / "model.safetensors")


def test_formats_are_searched_in_table_order(tmp_path: Path) -> None:
    weights = {"a": torch.zeros(2)}
    torch.save(weights, tmp_path / "pytorch_model_fsdp_0_rank0.bin")
    assert read_stored_model(tmp_path).format == "per_rank"
    torch.save(weights, tmp_path / "pytorch_model_fsdp.bin")
    assert read_stored_model(tmp_path).format == "bin"
    save_file(weights, tmp_path / "model.safetensors")
    assert read_stored_model(tmp_path).format == "full"
    dcp.save({"model": weights}, checkpoint_id=tmp_path / "pytorch_model_fsdp_0", no_dist=True)
    assert read_stored_model(tmp_path).format == "dcp"
    assert stored_state_dict_type(tmp_path) == "sharded"


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ("model.safetensors.index.json", "full"),
        ("pytorch_model_fsdp.bin", "full"), ("pytorch_model_fsdp_0_rank0.bin", "sharded"), ("optimizer.bin", None),
    ],
)  # fmt: skip
def test_state_dict_type_follows_from_file_names(tmp_path: Path, file: str, expected: str | None) -> None:
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).touch()
    assert stored_state_dict_type(tmp_path) == expected


def test_wrapper_attributes_are_removed_from_names() -> None:
    written = {"_orig_mod.a._fsdp_wrapped_module.b": "a.b", "a._checkpoint_wrapped_module.weight": "a.weight"}
    for name, clean in {**written, "model.a": "model.a"}.items():
        assert names.canonical_name(name) == clean


def write_all(folder: Path) -> list[Path]:
    """Write a small checkpoint of each format. Returns the files."""
    weights = {f"layer{i}.weight": torch.arange(6.0).reshape(2, 3) for i in range(3)}
    for form in ("dcp", "bin", "full"):
        (folder / form).mkdir()
    dcp.save({"model": weights}, checkpoint_id=folder / "dcp" / "pytorch_model_fsdp_0", no_dist=True)
    torch.save(weights, folder / "bin" / "pytorch_model_fsdp.bin")
    save_file(weights, folder / "full" / "model.safetensors")
    return [path for path in folder.rglob("*") if path.is_file()]


@pytest.mark.parametrize("seed", range(4))
def test_wrong_bytes_never_crash_the_readers(tmp_path: Path, seed: int) -> None:
    files = write_all(tmp_path)
    draw = random.Random(seed)
    for _ in range(250):
        path = draw.choice(files)
        whole = path.read_bytes()
        damaged = bytearray(whole)
        for _ in range(draw.choice((1, 1, 4))):
            damaged[draw.randrange(len(damaged))] = draw.randrange(256)
        path.write_bytes(damaged[: draw.choice((len(whole), len(whole), draw.randrange(len(whole))))])
        root = tmp_path / path.relative_to(tmp_path).parts[0]
        try:
            index = read_stored_model(root)
        except CheckpointError as error:
            assert str(root) in str(error)
        else:
            for tensor in index.tensors.values():
                assert all(0 <= p.offset < (root / p.file).stat().st_size for p in tensor.pieces)
        path.write_bytes(whole)


def test_readers_import_no_heavy_library(tmp_path: Path) -> None:
    write_all(tmp_path)
    program = (
        "import sys; from pathlib import Path\n"
        "from hf_fsdp_plugin.checkpoint.formats.known_formats import read_stored_model\n"
        f"for form in ('dcp', 'bin', 'full'): read_stored_model(Path({str(tmp_path)!r}) / form)\n"
        "loaded = sorted({'torch', 'transformers', 'accelerate'} & set(sys.modules))\n"
        "sys.exit(f'loaded {loaded}' if loaded else 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env={}, timeout=60)
    assert done.returncode == 0, done.stderr
