"""A folder of a sharded model has the files and the names that one process writes, also if they depend on the class."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, dynamic_module_utils

from tests.gloo import cases_saved_names as cases
from tests.support.matrices import slow
from tests.support.ranks import Ranks


def contents(folder: Path) -> dict[str, Any]:
    """The files of a folder; the JSON of the configs, the text of the code."""
    files = {path.name: path for path in folder.iterdir() if path.name != "fsdp_manifest.json"}
    return {
        name: json.loads(path.read_text()) if path.suffix == ".json" else path.suffix == ".py" and path.read_text()
        for name, path in files.items()
    }


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("name", ["gpt_neox", "remote", slow("segformer"), slow("beit")])
def test_saved_folder_equals_that_of_one_process(two_ranks: Ranks, tmp_path: Path, name: str, version: int) -> None:
    weights = two_ranks.run(cases.train_and_save, str(tmp_path), name, version)[0]["weights"]
    model: Any = cases.BUILDERS[name]()
    model.load_state_dict(weights)
    model.save_pretrained(tmp_path / "one_process")
    expected = load_file(tmp_path / "one_process" / "model.safetensors")
    for form in ("pretrained", "given"):
        assert contents(tmp_path / form) == contents(tmp_path / "one_process"), form
        found = load_file(tmp_path / form / "model.safetensors")
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())


@pytest.mark.parametrize("version", [1, 2])
def test_saved_custom_code_loads(
    two_ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: int
) -> None:
    weights = two_ranks.run(cases.train_and_save, str(tmp_path), "remote", version)[0]["weights"]
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "pretrained", trust_remote_code=True)
    assert type(loaded).__module__.startswith("transformers_modules.") and type(loaded).__name__ == "RemoteForCausalLM"
    assert all(torch.equal(tensor, weights[key]) for key, tensor in loaded.state_dict().items())
