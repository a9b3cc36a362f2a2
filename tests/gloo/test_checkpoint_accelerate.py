"""Accelerate's ``save_state``, ``load_state`` and ``save_model``, and Accelerate's tools on the files."""

from __future__ import annotations

import inspect
import io
import subprocess
import sys
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from accelerate.utils import ProjectConfiguration, merge_fsdp_weights
from safetensors.torch import load_file

import hf_fsdp_plugin as hfp
from hf_fsdp_plugin import host_memory
from hf_fsdp_plugin.backends.sharding.shard import plan_of
from hf_fsdp_plugin.checkpoint.file_io import PAGE
from hf_fsdp_plugin.checkpoint.formats.manifest import read_manifest
from hf_fsdp_plugin.integrations.saving import manager
from hf_fsdp_plugin.plan.fsdp_plan import FsdpPlan
from hf_fsdp_plugin.state import parts_of
from hf_fsdp_plugin.tools.plan.estimate.memory.peak import estimate_memory
from hf_fsdp_plugin.tools.plan.estimate.types import Workload
from hf_fsdp_plugin.tools.verify.verification import verify
from tests.support.checkpoint_accelerate_runs import Loop, trained_loop
from tests.support.ranks import Ranks, on_accelerator
from tests.support.tiny import parallel_config, tiny_llama

LOOPS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"version": 2}, {"version": 2}),
    ({"version": 1, "state_dict_type": "FULL"}, {"version": 2}),
    ({"version": 2, "state_dict_type": "LOCAL"}, {"version": 1}),
    ({"version": 2, "async_save": True}, {"version": 2, "async_save": True}),
    ({"version": 1, "async_save": True, "state_dict_type": "FULL"}, {"version": 1}),
]


def save_and_load(folder: str, before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Train two steps, save, train two more; then repeat the last two in a new loop from the checkpoint."""
    first = trained_loop(**before)
    saved = first.accelerator.save_state(folder)
    drawn = torch.rand(3).tolist()
    whole = [first.step(number) for number in (2, 3)]
    manager().wait()
    second = Loop(**after)
    second.step(9)
    second.accelerator.load_state(folder)
    return {
        "saved": str(saved),
        "drawn": (drawn, torch.rand(3).tolist()),
        "losses": (whole, [second.step(number) for number in (2, 3)]),
        "rates": (first.scheduler.get_last_lr(), second.scheduler.get_last_lr()),
    }


@pytest.mark.parametrize(("before", "after"), LOOPS, ids=str)
def test_loop_resumes_with_same_losses(
    two_ranks: Ranks, tmp_path: Path, before: dict[str, Any], after: dict[str, Any]
) -> None:
    folder = tmp_path / "state"
    runs = two_ranks.run(save_and_load, str(folder), before, after)
    for run in runs:
        whole, resumed = run["losses"]
        assert resumed == pytest.approx(whole, rel=1e-6 if before["version"] == after["version"] else 1e-5)
        assert run["drawn"][0] == run["drawn"][1]
        assert run["rates"][0] == run["rates"][1]
    assert (folder / "config.json").exists() and (folder / "fsdp_manifest.json").exists()
    assert runs[0]["saved"] == str(folder)


def save_with_memory(folder: str, system: str, version: int) -> dict[str, Any]:
    """Save asynchronously, and resume, on a machine whose available memory is in the files of the folder ``system``.

    Returns what is printed, too, and the bytes of the copies in memory.
    """
    manager().close()  # free the copies of earlier cases
    settings = {"version": version, "async_save": True}
    with (
        redirect_stderr(io.StringIO()) as printed,
        mock.patch.object(host_memory, "SYSTEM", Path(system)),
        mock.patch.object(manager(), "_has_warned", False),
    ):
        run = save_and_load(folder, settings, settings)
        again = trained_loop(**settings)
        again.accelerator.save_state(f"{folder}-2")
    copies = sum(buffer.numel() for buffer in manager().buffers._memory.values())
    manager().close()
    with torch.device("meta"):
        model = tiny_llama()
    predicted = estimate_memory(plan_of(again.model), model, Workload(micro_batch=1, seq_len=8)).staging_bytes
    num_tensors = 4 * sum(1 for _ in model.parameters())  # with those of the optimizer's state
    return {**run, "printed": printed.getvalue(), "copies": copies, "predicted": predicted, "num_tensors": num_tensors}


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(("available", "num_copied"), [(1 << 20, 2), (290 << 10, 1), (40 << 10, 0)])
def test_asynchronous_save_without_memory_is_synchronous(
    two_ranks: Ranks, tmp_path: Path, version: int, available: int, num_copied: int
) -> None:
    """Copies of the model and of the optimizer are in memory, or only of the model, or none."""
    system, available = tmp_path / "system", available + version * 1024  # a warning that no case before has printed
    (system / "proc/self").mkdir(parents=True)
    (system / "sys/fs/cgroup").mkdir(parents=True)
    (system / "proc/meminfo").write_text("MemAvailable: 64000000 kB\n")
    (system / "proc/self/cgroup").write_text("0::/\n")
    (system / "sys/fs/cgroup/memory.max").write_text(f"{available + 5000}\n")
    (system / "sys/fs/cgroup/memory.current").write_text("5000\n")
    runs = two_ranks.run(save_with_memory, str(tmp_path / "state"), str(system), version)
    for run in runs:
        whole, resumed = run["losses"]
        assert resumed == pytest.approx(whole, rel=1e-6)
        if num_copied == 2:  # a file has about 1 KB beside each of the tensors
            assert 0 <= run["copies"] - run["predicted"] <= 2048 * run["num_tensors"]
        assert (run["copies"] > PAGE) == (num_copied > 0) and (num_copied == 2 or run["copies"] < run["predicted"])
    warned = num_copied < 2
    assert runs[0]["printed"].count("FSDP-W284") == warned
    assert not warned or f"may use {int(available * 0.9) // 2 / 1024:.1f} KiB" in runs[0]["printed"]
    for folder in (tmp_path / "state", tmp_path / "state-2"):
        assert verify(folder).ok
        assert read_manifest(folder).asynchronous == (not warned)


def save_over(folder: str) -> list[float]:
    """Save twice to one path, with a file of the user in the folder."""
    loop = trained_loop(2, 1)
    loop.accelerator.save_state(folder)
    if loop.rank == 0:
        (Path(folder) / "notes.txt").write_text("mine")
    loop.step(1)
    loop.accelerator.save_state(folder)
    expected = loop.step(2)
    loop.accelerator.load_state(folder)
    return [expected, loop.step(2)]


def test_save_replaces_a_checkpoint_and_keeps_other_files(two_ranks: Ranks, tmp_path: Path) -> None:
    folder = tmp_path / "state"
    for expected, found in two_ranks.run(save_over, str(folder)):
        assert found == expected
    assert (folder / "notes.txt").read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["state"]


def save_named(project: str, **settings: Any) -> dict[str, Any]:
    """Save with Accelerate's automatic names and a limit, then damage the newest checkpoint and load."""
    configuration = ProjectConfiguration(project_dir=project, automatic_checkpoint_naming=True, total_limit=2)
    loop = Loop(2, project=configuration, **settings)
    after = {}
    for number in range(4):
        loop.step(number)
        loop.accelerator.save_state()
        after[number] = loop.weights()
    manager().wait()
    run = Path(project) / "checkpoints"
    names = sorted(path.name for path in run.iterdir())
    dist.barrier()
    if loop.rank == 0:
        (run / "checkpoint_3" / "pytorch_model_fsdp_0" / "__1_0.distcp").unlink()
    dist.barrier()
    loop.accelerator.load_state()
    found = loop.weights()
    same = [number for number, state in after.items() if all(torch.equal(state[n], t) for n, t in found.items())]
    return {"names": names, "loaded": same}


@pytest.mark.parametrize("asynchronous", [False, True])
def test_automatic_naming_applies_limit_and_skips_damaged(two_ranks: Ranks, tmp_path: Path, asynchronous: bool) -> None:
    run = two_ranks.run(save_named, str(tmp_path), async_save=asynchronous)[0]
    assert run["names"] == ["checkpoint_2", "checkpoint_3"]
    assert run["loaded"] == [2]


def load_with_stock_functions(folder: str, version: int) -> dict[str, Any]:
    """Load a checkpoint of this package with Accelerate's original functions."""
    from accelerate.utils import FullyShardedDataParallelPlugin, fsdp_utils

    first = trained_loop(version)
    first.accelerator.save_state(folder)
    whole = [first.step(number) for number in (2, 3)]
    second = Loop(version)
    second.step(9)
    accelerator = second.accelerator
    plugin = FullyShardedDataParallelPlugin(fsdp_version=version, state_dict_type="SHARDED_STATE_DICT")
    if version == 1:
        # Accelerate requests state on the CPU, and FSDP1 crashes with that on CPU ranks.
        plugin.state_dict_config.offload_to_cpu = plugin.optim_state_dict_config.offload_to_cpu = False
    parts_of(second.model)._parts.pop(FsdpPlan)
    for name, arguments in (("load_fsdp_model", ()), ("load_fsdp_optimizer", (second.optimizer.optimizer,))):
        inspect.unwrap(getattr(fsdp_utils, name))(plugin, accelerator, *arguments, second.model, folder)
    return {"whole": whole, "stock": [second.step(number) for number in (2, 3)]}


@pytest.mark.parametrize("version", [1, 2])
def test_checkpoint_loads_with_functions_of_accelerate(two_ranks: Ranks, tmp_path: Path, version: int) -> None:
    run = two_ranks.run(load_with_stock_functions, str(tmp_path / "state"), version)[0]
    assert run["stock"] == pytest.approx(run["whole"], rel=1e-6)


def save_with_function_and_stock_plugin(folder: str, version: int) -> dict[str, torch.Tensor]:
    """Call ``accelerate.utils.save_fsdp_model`` with the stock plugin of the Accelerator, and return the weights."""
    import accelerate
    from accelerate.utils import FullyShardedDataParallelPlugin, fsdp_utils

    hfp.install({"distributed_type": "FSDP", "use_cpu": not on_accelerator(), "fsdp_config": {"fsdp_version": version}})
    plugin = FullyShardedDataParallelPlugin(fsdp_version=version)
    accelerator = accelerate.Accelerator(fsdp_plugin=plugin)
    model = accelerator.prepare(tiny_llama())
    plugin.set_state_dict_type("SHARDED_STATE_DICT")
    fsdp_utils.save_fsdp_model(plugin, accelerator, model, folder)
    return {name: tensor.clone() for name, tensor in accelerator.get_state_dict(model).items()}


@pytest.mark.parametrize("version", [1, 2])
def test_accelerate_function_saves_with_stock_plugin(two_ranks: Ranks, tmp_path: Path, version: int) -> None:
    weights = two_ranks.run(save_with_function_and_stock_plugin, str(tmp_path / "saved"), version)[0]
    merge_fsdp_weights(str(tmp_path / "saved/pytorch_model_fsdp_0"), str(tmp_path / "merged"))
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    assert merged.keys() == weights.keys()
    assert all(torch.equal(merged[name], tensor) for name, tensor in weights.items())


def test_accelerate_merge_weights_reads_checkpoint(two_ranks: Ranks, tmp_path: Path) -> None:
    folder = tmp_path / "state"
    two_ranks.run(save_and_load, str(folder), {"version": 1}, {"version": 1})
    command = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "merge-weights"]
    given = [str(folder / "pytorch_model_fsdp_0"), str(tmp_path / "stock")]
    subprocess.run([*command, *given], check=True, capture_output=True, timeout=120)
    ours = [sys.executable, "-m", "hf_fsdp_plugin.cli.main", "merge", str(folder), str(tmp_path / "ours")]
    subprocess.run(ours, check=True, capture_output=True, timeout=120)
    stock, merged = load_file(tmp_path / "stock" / "model.safetensors"), load_file(tmp_path / "ours/model.safetensors")
    assert stock.keys() == merged.keys()
    assert all(torch.equal(stock[name], merged[name]) for name in stock)


def export(folder: str, version: int, tied: bool, max_shard_size: str) -> dict[str, torch.Tensor]:
    """Call ``save_model``, and return the weights."""
    spec = hfp.load_spec(parallel_config("full_shard", version, dist.get_world_size()))
    accelerator = hfp.accelerator(spec)
    model = accelerator.prepare(tiny_llama(tied=tied))
    accelerator.save_model(model, folder, max_shard_size=max_shard_size)
    return {name: tensor.clone() for name, tensor in accelerator.get_state_dict(model).items()}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("version", [1, 2])
def test_save_model_is_readable_by_from_pretrained(two_ranks: Ranks, tmp_path: Path, version: int, tied: bool) -> None:
    from transformers import AutoModelForCausalLM

    folder = tmp_path / "model"
    expected = two_ranks.run(export, str(folder), version, tied, "20KB")[0]
    assert (folder / "model.safetensors.index.json").exists()
    loaded = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.items())
    assert [path.name for path in tmp_path.iterdir()] == ["model"] and not list(folder.glob(".*"))
