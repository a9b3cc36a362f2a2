"""A damaged checkpoint is never resumed with wrong numbers: the damage is reported on all ranks, or has no effect."""

from __future__ import annotations

import datetime
import itertools
import os
import pickle
import random
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist

from hf_fsdp_plugin.checkpoint.names import MANIFEST_NAME
from hf_fsdp_plugin.integrations.saving import manager
from hf_fsdp_plugin.integrations.session import attributes_in_block
from hf_fsdp_plugin.problems import SpecError
from tests.support.checkpoint_accelerate_runs import trained_loop
from tests.support.damages import exchange, flip, truncate
from tests.support.matrices import slow
from tests.support.ranks import Ranks
from tests.support.trainer_runs import losses, make_trainer

Damage = Callable[[Path], None]


class Averages:
    """An object for ``register_for_checkpointing``."""

    def __init__(self, **state: Any) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


class Unknown:
    """A class that no library allows."""


class MakesFolder:
    """An object whose pickle executes code."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


PLAIN = {
    "loss": numpy.float64(0.5), "window": numpy.arange(3), "tensor": torch.arange(2), "list": [1, None, "a", 0.5],
    "set": {1, 2}, "since": datetime.timedelta(seconds=3), "path": Path("a"), "generator": random.Random(0).getstate(),
}  # fmt: skip


NOT_READ = ("config.json", "generation_config.json")
"""Files of a checkpoint that Accelerate does not read."""

CODES = {"flip": {"FSDP-E471", "FSDP-E453"}, "cut": {"FSDP-E431"}, "delete": {"FSDP-E431"}}
"""A changed byte differs from its hash, or, in the header of a zip in the file, is found when the zip is opened."""

OTHER_FILE = {"FSDP-E453", "FSDP-E454", "FSDP-E455", "FSDP-E458", "FSDP-E459", "FSDP-E471"}
"""Codes of a file with the contents of another one, and of a damaged pickle."""


def _damages(folder: Path) -> dict[str, Damage]:
    """Return the name of every damage, and the function that does it to a copy of ``folder``."""
    files = sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    damages: dict[str, Damage] = {}
    for file in files:
        damages[f"flip {file}"] = lambda copy, file=file: flip(copy / file)
    damages[f"cut {files[-1]}"] = lambda copy: truncate(copy / files[-1])
    damages[f"delete {files[-1]}"] = lambda copy: (copy / files[-1]).unlink()
    for first, second in itertools.pairwise(files):
        if (folder / first).stat().st_size == (folder / second).stat().st_size:
            damages[f"swap {first} {second}"] = lambda copy, a=first, b=second: exchange(copy / a, copy / b)
            damages[f"copy {first} {second}"] = lambda copy, a=first, b=second: shutil.copy(copy / a, copy / b)
    return damages


def load_damaged(work: str, version: int, **settings: Any) -> dict[str, Any]:
    """Save a state, and load it from damaged copies.

    Returns:
        damage -> the codes and the text of the error on this rank, or no codes and the loss of the next step if the
        state was loaded; the entry ``""`` is that of the undamaged checkpoint.
    """
    original = Path(work) / "checkpoint_0"
    loop = trained_loop(version, **settings)
    # The size of a pickled RNG state depends on its numbers. The files of the ranks differ, but have the same size.
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(loop.rank)
    loop.accelerator.save_state(str(original))
    manager().wait()
    damages: dict[str, Damage] = {"": lambda copy: None, **_damages(original)}
    dist.barrier()
    found: dict[str, Any] = {}
    copy = Path(work) / "copy" / "checkpoint_0"
    for name, damage in damages.items():
        if loop.rank == 0:
            shutil.rmtree(copy, ignore_errors=True)
            shutil.copytree(original, copy)
            damage(copy)
        dist.barrier()
        try:
            loop.accelerator.load_state(str(copy))
        except SpecError as error:
            found[name] = {problem.code for problem in error.problems}, str(error)
        else:
            found[name] = set(), loop.step(2)
        dist.barrier()
    return found


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
    runs = two_ranks.run(load_damaged, str(tmp_path), **settings)
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
            expected = {"FSDP-E431"} if file == MANIFEST_NAME else CODES[kind]
            assert len(found[0]) == 1 and found[0] <= expected, (name, found)
            assert Path(file).name in found[1], (name, found)


def load_hostile(work: str, version: int) -> dict[str, Any]:
    """Load copies of a checkpoint without a manifest, each with one pickle that would create a folder."""
    original, copy = Path(work) / "checkpoint_0", Path(work) / "copy" / "checkpoint_0"
    loop = trained_loop(version)
    loop.accelerator.register_for_checkpointing(Averages(**PLAIN))
    loop.accelerator.save_state(str(original))
    if loop.rank == 0:
        (original / MANIFEST_NAME).unlink()
    dist.barrier()
    found: dict[str, Any] = {}
    for name in ("scheduler.bin", "random_states_0.pkl", "random_states_1.pkl", "custom_checkpoint_0.pkl",
                 "pytorch_model_fsdp_0/.metadata", "optimizer_0/.metadata"):  # fmt: skip
        if loop.rank == 0:
            shutil.rmtree(copy, ignore_errors=True)
            shutil.copytree(original, copy)
            hostile = {"state": MakesFolder(str(Path(work) / "executed"))}
            if name.endswith(".metadata"):
                (copy / name).write_bytes(pickle.dumps(hostile))
            else:
                torch.save(hostile, copy / name)
        dist.barrier()
        try:
            loop.accelerator.load_state(str(copy))
        except SpecError as error:
            found[name] = str(error)
        dist.barrier()
    return found


@pytest.mark.parametrize("version", [slow(1), 2])
def test_pickles_of_a_resume_are_not_executed(two_ranks: Ranks, tmp_path: Path, version: int) -> None:
    runs = two_ranks.run(load_hostile, str(tmp_path), version)
    assert len(runs[0]) == 6 and runs[1] == runs[0]
    for name, text in runs[0].items():
        assert name in text and "posix.mkdir" in text and "not executed" in text, text
        assert ("FSDP-E431" if name.endswith(".metadata") else "FSDP-E454") in text
    assert not (tmp_path / "executed").exists()


def load_registered_objects(work: str, version: int) -> dict[str, Any]:
    """Save and load registered objects: plain data, and a class, which must be allowed."""
    folder = str(Path(work) / "state")
    loop = trained_loop(version)
    plain, other = Averages(**PLAIN), Averages(value=Unknown())
    loop.accelerator.register_for_checkpointing(plain, other)
    loop.accelerator.save_state(folder)
    found: dict[str, Any] = {}
    try:
        loop.accelerator.load_state(folder)
    except SpecError as error:
        found["refused"] = str(error)
    other.state = {}
    with torch.serialization.safe_globals([Unknown]):
        loop.accelerator.load_state(folder)
    found["allowed"] = type(other.state["value"]) is Unknown
    other.state = {}
    loop.accelerator.load_state(folder, load_kwargs={"weights_only": False})
    found["all_allowed"] = type(other.state["value"]) is Unknown
    found["plain"] = {key: repr(value) for key, value in plain.state.items()}
    return found


def test_registered_objects_load_plain_data_and_allowed(two_ranks: Ranks, tmp_path: Path) -> None:
    for run in two_ranks.run(load_registered_objects, str(tmp_path), 2):
        assert run["plain"] == {key: repr(value) for key, value in PLAIN.items()}
        assert "custom_checkpoint_1.pkl" in run["refused"] and "test_damage.Unknown" in run["refused"]
        assert "add_safe_globals" in run["refused"] and "FSDP-E454" in run["refused"]
        assert run["allowed"] and run["all_allowed"]


def resume_trainer(output_dir: str, arguments: dict[str, Any]) -> dict[str, str]:
    """Resume a Trainer from copies of a checkpoint: each has a damaged file, or a pickle that would create a folder."""
    run, executed = Path(output_dir), Path(output_dir) / "executed"
    trainer = make_trainer(output_dir, save_strategy="steps", save_steps=1, max_steps=2, **arguments)
    trainer.train()
    original, kept = run / "checkpoint-1", run / "kept"
    if dist.get_rank() == 0:
        original.rename(kept)
    dist.barrier()
    found: dict[str, str] = {}
    for name in ("scheduler.pt", "rng_state_0.pth", "rng_state_1.pth", "trainer_state.json"):
        for kind in ("flip", "hostile")[: 1 if name == "trainer_state.json" else 2]:
            if dist.get_rank() == 0:
                shutil.rmtree(original, ignore_errors=True)
                shutil.copytree(kept, original)
                if kind == "flip":
                    flip(original / name)
                else:
                    torch.save({"python": MakesFolder(str(executed))}, original / name)
                    (original / MANIFEST_NAME).unlink()
            dist.barrier()
            resumed = make_trainer(output_dir, save_strategy="no", max_steps=2, **arguments)
            try:
                resumed.train(resume_from_checkpoint=str(original))
            except SpecError as error:
                found[f"{kind} {name}"] = str(error)
            dist.barrier()
    return found


@pytest.mark.parametrize("version", [1, slow(2)])
def test_trainer_resumes_from_undamaged_plain_states(two_ranks: Ranks, tmp_path: Path, version: int) -> None:
    settings = {"fsdp": "full_shard auto_wrap", "fsdp_config": {"fsdp_version": version}}
    runs = two_ranks.run(resume_trainer, str(tmp_path), settings)
    assert len(runs[0]) == 7 and runs[0] == runs[1]
    for name, text in runs[0].items():
        kind, file = name.split()
        assert file in text and ("FSDP-E471" if kind == "flip" else "FSDP-E454") in text, (name, text)
    assert not (tmp_path / "executed").exists()


def resume_from_split_files(output_dir: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Resume a Trainer from a model in several files, and from copies of the checkpoint with one damaged file each.

    Returns:
        the losses of the run that saved and of the resumed one, and file -> the error of its copy.
    """
    split = attributes_in_block(manager(), save_model=partial(manager().save_model, max_shard_size=100_000))
    saved = make_trainer(output_dir, save_strategy="steps", save_steps=1, max_steps=2, **arguments)
    with split:
        saved.train()
    original, kept = Path(output_dir) / "checkpoint-1", Path(output_dir) / "kept"
    resumed = make_trainer(output_dir, save_strategy="no", max_steps=2, **arguments)
    resumed.train(resume_from_checkpoint=str(original))
    if dist.get_rank() == 0:
        shutil.copytree(original, kept)
    dist.barrier()
    errors: dict[str, str] = {}
    for name in sorted(file.name for file in kept.glob("model-*.safetensors"))[:2]:
        if dist.get_rank() == 0:
            shutil.rmtree(original)
            shutil.copytree(kept, original)
            flip(original / name)
        dist.barrier()
        damaged = make_trainer(output_dir, save_strategy="no", max_steps=2, **arguments)
        try:
            damaged.train(resume_from_checkpoint=str(original))
        except SpecError as error:
            errors[name] = str(error)
        dist.barrier()
    return {"saved": losses(saved), "resumed": losses(resumed), "errors": errors}


@pytest.mark.parametrize("version", [1, 2])
def test_trainer_compares_models_in_several_files(two_ranks: Ranks, tmp_path: Path, version: int) -> None:
    settings = {
        "fsdp": "full_shard auto_wrap",
        "fsdp_config": {"version": version, "state_dict_type": "FULL_STATE_DICT"},
    }
    runs = two_ranks.run(resume_from_split_files, str(tmp_path), settings)
    assert runs[0]["resumed"][-1] == runs[0]["saved"][-1]
    assert len(runs[0]["errors"]) == 2 and runs[0] == runs[1]
    for name, text in runs[0]["errors"].items():
        assert name in text and "FSDP-E471" in text, text
