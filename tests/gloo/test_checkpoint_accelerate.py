"""Accelerate's ``save_state``, ``load_state`` and ``save_model``, and Accelerate's tools on the files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.utils import merge_fsdp_weights
from safetensors.torch import load_file

from hf_fsdp_plugin.checkpoint.checking.verify import verify
from hf_fsdp_plugin.checkpoint.formats.manifest import read_manifest
from tests.gloo import cases_checkpoint_accelerate as cases
from tests.support.ranks import Ranks

LOOPS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"version": 2}, {"version": 2}),
    ({"version": 1, "state_dict_type": "FULL"}, {"version": 2}),
    ({"version": 2, "state_dict_type": "LOCAL"}, {"version": 1}),
    ({"version": 2, "async_save": True}, {"version": 2, "async_save": True}),
    ({"version": 1, "async_save": True, "state_dict_type": "FULL"}, {"version": 1}),
]


@pytest.mark.parametrize(("before", "after"), LOOPS, ids=str)
def test_loop_resumes_with_same_losses(
    two_ranks: Ranks, tmp_path: Path, before: dict[str, Any], after: dict[str, Any]
) -> None:
    folder = tmp_path / "state"
    runs = two_ranks.run(cases.save_and_load, str(folder), before, after)
    for run in runs:
        whole, resumed = run["losses"]
        assert resumed == pytest.approx(whole, rel=1e-6 if before["version"] == after["version"] else 1e-5)
        assert run["drawn"][0] == run["drawn"][1]
        assert run["rates"][0] == run["rates"][1]
    assert (folder / "config.json").exists() and (folder / "fsdp_manifest.json").exists()
    assert runs[0]["saved"] == str(folder)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(("available", "num_copies"), [(1 << 20, 2), (290 << 10, 1), (40 << 10, 0)])
def test_asynchronous_save_without_memory_is_synchronous(
    two_ranks: Ranks, tmp_path: Path, version: int, available: int, num_copies: int
) -> None:
    """Copies of the model and of the optimizer are in memory, or only of the model, or none."""
    system, available = tmp_path / "system", available + version * 1024  # a warning that no case before has printed
    (system / "proc/self").mkdir(parents=True)
    (system / "sys/fs/cgroup").mkdir(parents=True)
    (system / "proc/meminfo").write_text("MemAvailable: 64000000 kB\n")
    (system / "proc/self/cgroup").write_text("0::/\n")
    (system / "sys/fs/cgroup/memory.max").write_text(f"{available + 5000}\n")
    (system / "sys/fs/cgroup/memory.current").write_text("5000\n")
    runs = two_ranks.run(cases.save_with_memory, str(tmp_path / "state"), str(system), version)
    for run in runs:
        whole, resumed = run["losses"]
        assert resumed == pytest.approx(whole, rel=1e-6)
        assert len(run["copies"]) == num_copies
        if num_copies == 2:  # a file has about 1 KB beside each of the tensors
            assert 0 <= sum(run["copies"]) - run["predicted"] <= 2048 * run["num_tensors"]
    warned = num_copies < 2
    assert runs[0]["printed"].count("FSDP-W284") == warned
    assert not warned or f"may use {int(available * 0.9) // 2 / 1024:.1f} KiB" in runs[0]["printed"]
    for folder in (tmp_path / "state", tmp_path / "state-2"):
        assert verify(folder).ok
        assert read_manifest(folder).asynchronous == (not warned)


def test_save_replaces_a_checkpoint_and_keeps_other_files(two_ranks: Ranks, tmp_path: Path) -> None:
    folder = tmp_path / "state"
    for expected, found in two_ranks.run(cases.save_over, str(folder)):
        assert found == expected
    assert (folder / "notes.txt").read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["state"]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_automatic_naming_applies_limit_and_skips_damaged(two_ranks: Ranks, tmp_path: Path, asynchronous: bool) -> None:
    run = two_ranks.run(cases.save_named, str(tmp_path), async_save=asynchronous)[0]
    assert run["names"] == ["checkpoint_2", "checkpoint_3"]
    assert run["loaded"] == [2]


@pytest.mark.parametrize("version", [1, 2])
def test_checkpoint_loads_with_functions_of_accelerate(two_ranks: Ranks, tmp_path: Path, version: int) -> None:
    run = two_ranks.run(cases.load_with_stock_functions, str(tmp_path / "state"), version)[0]
    assert run["stock"] == pytest.approx(run["whole"], rel=1e-6)


@pytest.mark.parametrize("version", [1, 2])
def test_accelerate_function_saves_with_stock_plugin(two_ranks: Ranks, tmp_path: Path, version: int) -> None:
    weights = two_ranks.run(cases.save_with_function_and_stock_plugin, str(tmp_path / "saved"), version)[0]
    merge_fsdp_weights(str(tmp_path / "saved/pytorch_model_fsdp_0"), str(tmp_path / "merged"))
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    assert merged.keys() == weights.keys()
    assert all(torch.equal(merged[name], tensor) for name, tensor in weights.items())


def test_accelerate_merge_weights_reads_checkpoint(two_ranks: Ranks, tmp_path: Path) -> None:
    folder = tmp_path / "state"
    two_ranks.run(cases.save_and_load, str(folder), {"version": 1}, {"version": 1})
    command = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "merge-weights"]
    given = [str(folder / "pytorch_model_fsdp_0"), str(tmp_path / "stock")]
    subprocess.run([*command, *given], check=True, capture_output=True, timeout=120)
    ours = [sys.executable, "-m", "hf_fsdp_plugin.cli.main", "merge", str(folder), str(tmp_path / "ours")]
    subprocess.run(ours, check=True, capture_output=True, timeout=120)
    stock, merged = load_file(tmp_path / "stock" / "model.safetensors"), load_file(tmp_path / "ours/model.safetensors")
    assert stock.keys() == merged.keys()
    assert all(torch.equal(stock[name], merged[name]) for name in stock)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("version", [1, 2])
def test_save_model_is_readable_by_from_pretrained(two_ranks: Ranks, tmp_path: Path, version: int, tied: bool) -> None:
    from transformers import AutoModelForCausalLM

    folder = tmp_path / "model"
    expected = two_ranks.run(cases.export, str(folder), version, tied, "20KB")[0]
    assert (folder / "model.safetensors.index.json").exists()
    loaded = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.items())
    assert [path.name for path in tmp_path.iterdir()] == ["model"] and not list(folder.glob(".*"))
