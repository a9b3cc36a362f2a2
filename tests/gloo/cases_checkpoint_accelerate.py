"""Cases that ranks run: an Accelerate loop with ``save_state``, ``load_state`` and ``save_model``."""

from __future__ import annotations

import inspect
import io
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from accelerate.utils import ProjectConfiguration

import hf_fsdp_plugin as hfp
from hf_fsdp_plugin import host_memory
from hf_fsdp_plugin.backends.sharding.shard import PLAN_ATTRIBUTE, plan_of
from hf_fsdp_plugin.integrations.saving import manager
from hf_fsdp_plugin.tools.plan.estimate.memory.peak import estimate_memory
from hf_fsdp_plugin.tools.plan.estimate.types import Workload
from tests.support.ranks import on_accelerator
from tests.support.tiny import global_batch, my_part, parallel_config, tiny_llama


class Loop:
    """A prepared model, optimizer and scheduler, and their steps."""

    def __init__(self, version: int, *, project: ProjectConfiguration | None = None, **settings: Any) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        spec = hfp.load_spec(parallel_config("full_shard", version, self.world_size, **settings))
        self.accelerator = hfp.accelerator(spec, project_config=project)
        raw = tiny_llama()
        optimizer = torch.optim.AdamW(raw.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.9)
        self.model, self.optimizer, self.scheduler = self.accelerator.prepare(raw, optimizer, scheduler)

    def step(self, number: int) -> float:
        batch = my_part(global_batch(number), self.rank, self.world_size)
        loss = self.model(**batch).loss
        self.accelerator.backward(loss)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        return float(self.accelerator.reduce(loss.detach(), "mean"))

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in self.accelerator.get_state_dict(self.model).items()}


def trained_loop(version: int, num_steps: int = 2, **settings: Any) -> Loop:
    """Return a loop after ``num_steps`` steps."""
    loop = Loop(version, **settings)
    for number in range(num_steps):
        loop.step(number)
    return loop


def save_and_load(folder: str, before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Train two steps, save, train two more; then repeat the last two in a new loop from the checkpoint."""
    first = trained_loop(**before)
    saved = first.accelerator.save_state(folder)
    drawn = torch.rand(3).tolist()
    whole = [first.step(number) for number in (2, 3)]
    manager.wait()
    second = Loop(**after)
    second.step(9)
    second.accelerator.load_state(folder)
    return {
        "saved": str(saved),
        "drawn": (drawn, torch.rand(3).tolist()),
        "losses": (whole, [second.step(number) for number in (2, 3)]),
        "rates": (first.scheduler.get_last_lr(), second.scheduler.get_last_lr()),
    }


def save_with_memory(folder: str, system: str, version: int) -> dict[str, Any]:
    """Save asynchronously, and resume, on a machine whose available memory is in the files of the folder ``system``.

    Returns what is printed, too, and the bytes of the copies in memory.
    """
    manager.close()  # free the copies of earlier cases
    settings = {"version": version, "async_save": True}
    with (
        redirect_stderr(io.StringIO()) as printed,
        mock.patch.object(host_memory, "SYSTEM", Path(system)),
        mock.patch.object(manager, "_has_warned", False),
    ):
        run = save_and_load(folder, settings, settings)
        again = trained_loop(**settings)
        again.accelerator.save_state(f"{folder}-2")
    copies = [buffer.numel() for buffer in manager.buffers._memory.values()]
    manager.close()
    with torch.device("meta"):
        model = tiny_llama()
    predicted = estimate_memory(plan_of(again.model), model, Workload(micro_batch=1, seq_len=8)).staging_bytes
    num_tensors = 4 * sum(1 for _ in model.parameters())  # with those of the optimizer's state
    return {**run, "printed": printed.getvalue(), "copies": copies, "predicted": predicted, "num_tensors": num_tensors}


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


def save_named(project: str, **settings: Any) -> dict[str, Any]:
    """Save with Accelerate's automatic names and a limit, then damage the newest checkpoint and load."""
    configuration = ProjectConfiguration(project_dir=project, automatic_checkpoint_naming=True, total_limit=2)
    loop = Loop(2, project=configuration, **settings)
    after = {}
    for number in range(4):
        loop.step(number)
        loop.accelerator.save_state()
        after[number] = loop.weights()
    manager.wait()
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
    delattr(second.model, PLAN_ATTRIBUTE)
    for name, arguments in (("load_fsdp_model", ()), ("load_fsdp_optimizer", (second.optimizer.optimizer,))):
        inspect.unwrap(getattr(fsdp_utils, name))(plugin, accelerator, *arguments, second.model, folder)
    return {"whole": whole, "stock": [second.step(number) for number in (2, 3)]}


def export(folder: str, version: int, tied: bool, max_shard_size: str) -> dict[str, torch.Tensor]:
    """Call ``save_model``, and return the weights."""
    spec = hfp.load_spec(parallel_config("full_shard", version, dist.get_world_size()))
    accelerator = hfp.accelerator(spec)
    model = accelerator.prepare(tiny_llama(tied=tied))
    accelerator.save_model(model, folder, max_shard_size=max_shard_size)
    return {name: tensor.clone() for name, tensor in accelerator.get_state_dict(model).items()}


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
