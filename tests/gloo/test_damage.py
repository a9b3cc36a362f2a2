"""A damaged checkpoint is never resumed with wrong numbers: the damage is reported on all ranks, or has no effect."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hf_fsdp_plugin.checkpoint.names import MANIFEST_NAME
from tests.gloo import cases_damage as cases
from tests.support.matrices import slow
from tests.support.ranks import Ranks

NOT_READ = ("config.json", "generation_config.json")
"""Files of a checkpoint that Accelerate does not read."""
CODES = {"flip": "FSDP-E471", "cut": "FSDP-E431", "delete": "FSDP-E431"}
OTHER_FILE = {"FSDP-E453", "FSDP-E454", "FSDP-E455", "FSDP-E458", "FSDP-E459", "FSDP-E471"}
"""Codes of a file with the contents of another one, and of a damaged pickle."""


@pytest.mark.parametrize(
    "settings",
    [
        {"version": 2, "state_dict_type": "SHARDED"},
        slow({"version": 1, "state_dict_type": "FULL"}),
        slow({"version": 2, "state_dict_type": "LOCAL", "async_save": True}),
        slow({"version": 1, "state_dict_type": "SHARDED", "async_save": True}),
    ],
    ids=lambda settings: "-".join(map(str, settings.values())),
)
def test_damaged_file_ends_all_ranks_or_is_not_read(two_ranks: Ranks, tmp_path: Path, settings: dict[str, Any]) -> None:
    runs = two_ranks.run(cases.load_damaged, str(tmp_path), **settings)
    whole = runs[0].pop("")
    assert runs[1].pop("") == whole and not whole[0]
    assert sum(name.startswith("swap ") for name in runs[0]) >= 2
    for name, found in runs[0].items():
        kind, file, *_ = name.split()
        if kind == "flip" and file in NOT_READ:
            assert found == whole, name
            continue
        assert runs[1][name] == found, name
        if kind in ("swap", "copy") or file.endswith(".metadata"):
            assert found[0] and found[0] <= OTHER_FILE, (name, found)
        else:
            assert found[0] == {"FSDP-E431" if file == MANIFEST_NAME else CODES[kind]}, (name, found)
            assert Path(file).name in found[1], (name, found)


@pytest.mark.parametrize("version", [slow(1), 2])
def test_pickles_of_a_resume_are_not_executed(two_ranks: Ranks, tmp_path: Path, version: int) -> None:
    runs = two_ranks.run(cases.load_hostile, str(tmp_path), version)
    assert len(runs[0]) == 6 and runs[1] == runs[0]
    for name, text in runs[0].items():
        assert name in text and "posix.mkdir" in text and "not executed" in text, text
        assert ("FSDP-E431" if name.endswith(".metadata") else "FSDP-E454") in text
    assert not (tmp_path / "executed").exists()


def test_registered_objects_load_plain_data_and_allowed(two_ranks: Ranks, tmp_path: Path) -> None:
    for run in two_ranks.run(cases.load_registered_objects, str(tmp_path), 2):
        assert run["plain"] == {key: repr(value) for key, value in cases.PLAIN.items()}
        assert "custom_checkpoint_1.pkl" in run["refused"] and "cases_damage.Unknown" in run["refused"]
        assert "add_safe_globals" in run["refused"] and "FSDP-E454" in run["refused"]
        assert run["allowed"] and run["all_allowed"]


@pytest.mark.parametrize("version", [1, slow(2)])
def test_trainer_resumes_from_undamaged_plain_states(two_ranks: Ranks, tmp_path: Path, version: int) -> None:
    settings = {"fsdp": "full_shard auto_wrap", "fsdp_config": {"fsdp_version": version}}
    runs = two_ranks.run(cases.resume_trainer, str(tmp_path), settings)
    assert len(runs[0]) == 7 and runs[0] == runs[1]
    for name, text in runs[0].items():
        kind, file = name.split()
        assert file in text and ("FSDP-E471" if kind == "flip" else "FSDP-E454") in text, (name, text)
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("version", [1, 2])
def test_trainer_compares_models_in_several_files(two_ranks: Ranks, tmp_path: Path, version: int) -> None:
    settings = {
        "fsdp": "full_shard auto_wrap",
        "fsdp_config": {"version": version, "state_dict_type": "FULL_STATE_DICT"},
    }
    runs = two_ranks.run(cases.resume_from_split_files, str(tmp_path), settings)
    assert runs[0]["resumed"][-1] == runs[0]["saved"][-1]
    assert len(runs[0]["errors"]) == 2 and runs[0] == runs[1]
    for name, text in runs[0]["errors"].items():
        assert name in text and "FSDP-E471" in text, text
