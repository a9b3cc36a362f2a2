"""Damage to any file of a checkpoint is found by verify; a merge reports it, or writes what an undamaged one writes."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from hf_fsdp_plugin.checkpoint.formats.known_formats import read_stored_model
from hf_fsdp_plugin.problems import CheckpointError
from hf_fsdp_plugin.tools.merge.merging import MergeOptions, merge
from hf_fsdp_plugin.tools.verify.verification import verify
from tests.support import damages, saved
from tests.support.merge_inputs import tree

Damage = Callable[[Path, Path], object]


DAMAGES: dict[str, Damage] = {
    "first byte": lambda first, _: damages.flip(first, 0),
    "middle byte": lambda first, _: damages.flip(first),
    "last byte": lambda first, _: damages.flip(first, -1),
    "cut": lambda first, _: damages.truncate(first),
    "delete": lambda first, _: first.unlink(),
    "swap": damages.exchange,
    "copy": shutil.copyfile,
}


@pytest.fixture(scope="module", params=["local", "sharded", "full", "sharded, many hashes"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = saved.any_checkpoint(tmp_path_factory.mktemp("run") / "checkpoint-20", request.param)
    if request.param == "local":
        return folder
    if request.param == "full":
        for part in ("pytorch_model_fsdp_0", "optimizer_0"):
            shutil.rmtree(folder / part)
        for part in ("00001-of-00002", "00002-of-00002"):
            saved.write_safetensors(folder / f"model-{part}.safetensors", {f"w{part}": (8, 3)}, {})
        names = {f"w{part}": f"model-{part}.safetensors" for part in ("00001-of-00002", "00002-of-00002")}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    places: saved.Places = {}
    if "many" in request.param:
        size = (folder / "pytorch_model_fsdp_0" / "__0_0.distcp").stat().st_size
        places = {"pytorch_model_fsdp_0/__0_0.distcp": [(0, size // 2, "first half"), (size // 2, size, "rest")]}
    parameters = {name: (tensor.dtype, tensor.shape) for name, tensor in read_stored_model(folder).tensors.items()}
    saved.write_manifest(folder, places=places, parameters=parameters)
    assert verify(folder, config_check=False).ok
    return folder


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_found_or_has_no_effect(checkpoint: Path, tmp_path: Path, damage: str) -> None:
    merge(checkpoint, tmp_path / "whole", MergeOptions())
    whole = tree(tmp_path / "whole")
    files = sorted(path.relative_to(checkpoint) for path in checkpoint.rglob("*") if path.is_file())
    pairs = [*itertools.pairwise(files), (files[-1], files[0])]
    for first, second in pairs:
        same = (checkpoint / first).read_bytes() == (checkpoint / second).read_bytes()
        if damage in ("swap", "copy") and same:
            continue
        if damage == "delete" and first.name == "fsdp_manifest.json":
            continue  # then it is a checkpoint without a manifest
        copy, out = tmp_path / "checkpoint-20", tmp_path / "out"
        for folder in (copy, out):
            shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(checkpoint, copy)
        DAMAGES[damage](copy / first, copy / second)
        assert not verify(copy, config_check=False).ok, (first, second)
        try:
            merge(copy, out, MergeOptions())
        except CheckpointError as error:
            assert all(problem.fix for problem in error.problems)
        else:
            assert tree(out) == whole, (first, second)
