"""A rank of a benchmark: ``python -m hf_fsdp_plugin.tools.bench.rank FOLDER``, started by ``hf-fsdp bench``.

It builds the cases, and lets their blocks of steps alternate. A case is run by this package, by stock Accelerate with
the units and settings of the plan of this package, or, as DDP, by stock Accelerate.
"""

from __future__ import annotations

import gc
import json
import os
import pickle
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin, send_to_device
from torch import nn
from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy

from hf_fsdp_plugin.devices import get_device
from hf_fsdp_plugin.hangs.watch_files import write_if_possible
from hf_fsdp_plugin.integrations.accelerate.accelerator import accelerator as planned_accelerator
from hf_fsdp_plugin.integrations.accelerate.private import SharedStates, set_in_states
from hf_fsdp_plugin.integrations.install import uninstall
from hf_fsdp_plugin.integrations.patching import changes
from hf_fsdp_plugin.messages import printer
from hf_fsdp_plugin.plan.fsdp_plan import FsdpPlan, torch_dtype
from hf_fsdp_plugin.plan.model_config import config_and_class
from hf_fsdp_plugin.plan.resolve import resolve
from hf_fsdp_plugin.rank_variables import launched_local_rank
from hf_fsdp_plugin.sources.handover import LaunchHandover
from hf_fsdp_plugin.sources.interface import SourceSettings
from hf_fsdp_plugin.spec.fsdp_spec import FsdpSpec
from hf_fsdp_plugin.spec.load import add_settings, combine
from hf_fsdp_plugin.strategies import STRATEGIES
from hf_fsdp_plugin.tools.bench.cases import DDP, JOB_FILE, Case, CaseGroup, WorldJob
from hf_fsdp_plugin.tools.meta_model import meta_model
from hf_fsdp_plugin.tools.preflight.clone import MadeData, collate

MAX_GRAD_NORM: Final = 1.0
LEARNING_RATE: Final = 1e-4
Batch = Mapping[str, Any]
_NUM_BATCHES: Final = 4
"""Different batches of a rank. They are made before the steps, so that no data loading is measured."""
_SEED: Final = 0
_TIMEOUT: Final = timedelta(minutes=10)
"""Time without progress after which a case fails."""
_PREFIXES: Final = ("ACCELERATE_", "FSDP_", "PARALLELISM_")


class CaseRunner:
    """Measures the cases of a job on one rank.

    Args:
        given: the settings that all cases share.
    """

    def __init__(self, job: WorldJob, device: torch.device, given: Sequence[SourceSettings]) -> None:
        self._job, self._device, self._given = job, device, given
        self._table = get_device(device.type)
        self._on_cpu = device.type == "cpu"
        self._memory = torch.get_device_module(device.type)
        self._environ = _settings_in(os.environ)
        size, num_ranks = job.workload["micro_batch"], dist.get_world_size()
        data = MadeData(meta_model(job.model), num_ranks * _NUM_BATCHES * size, num_tokens=job.workload["seq_len"])
        first = dist.get_rank() * _NUM_BATCHES
        self._batches: list[Batch] = [
            send_to_device(collate([data[number * size + index] for index in range(size)]), device)
            for number in range(first, first + _NUM_BATCHES)
        ]

    def prepare(self, group: CaseGroup) -> None:
        """Run one step of each case of a group, unmeasured: libraries are imported and threads are started then."""
        for case in group:
            loop = self._build(case)
            loop.step(self._batch(0))
            del loop
            self._free()

    def run(self, group: CaseGroup) -> list[dict[str, Any]]:
        """Measure a group of cases, and return what is added to the row of each case. Collective."""
        workload = self._job.workload
        loops: dict[Case, Loop] = {}
        rows: dict[Case, dict[str, Any]] = {}
        for case in group:
            held = self._free()
            loops[case] = self._build(case)
            for index in range(workload["warm_up"]):
                loops[case].step(self._batch(index))
            peaks = self._measure_peak(loops[case], held)
            loops[case].leave()
            rows[case] = {"case": case.name, **peaks, "seconds": [], "losses": []}
        for block in range(workload["blocks"]):
            for case in group if block % 2 == 0 else reversed(group):
                seconds, loss = self._block(loops[case], block)
                rows[case]["seconds"].append(seconds)
                rows[case]["losses"].append(loss)
        loops.clear()
        self._free()
        return list(rows.values())

    def _free(self) -> int:
        """Return unused memory to the device, and return the bytes that are held."""
        gc.collect()
        if self._on_cpu:
            return 0
        self._memory.empty_cache()
        return int(self._memory.memory_allocated())

    def _measure_peak(self, loop: Loop, held: int) -> dict[str, Any]:
        """Make a step, and return the largest peak of all ranks above `held`; ``None`` on the CPU."""
        if not self._on_cpu:
            self._memory.reset_peak_memory_stats()
        loop.step(self._batch(0))
        self._table.synchronize()
        if self._on_cpu:
            return {"peak_bytes": None, "peak_source": None}
        grown = torch.tensor(max(0, int(self._memory.max_memory_allocated()) - held))
        dist.all_reduce(grown, dist.ReduceOp.MAX)
        return {"peak_bytes": int(grown), "peak_source": self._table.peak_source}

    def _build(self, case: Case) -> Loop:
        for name in _settings_in(os.environ).keys() - self._environ.keys():
            del os.environ[name]  # set by an Accelerator of another case
        config, model_class = config_and_class(self._job.model)
        if hasattr(config, "use_cache"):
            config.use_cache = False
        torch.manual_seed(_SEED)
        model: nn.Module = model_class(config)  # random fp32 weights, the same on all ranks
        spec = combine(add_settings(self._given, overrides=case.overrides)).checked_spec()
        loop = make_loop(case, spec, model.train(), self._device)
        loop.enter()
        return loop

    def _batch(self, index: int) -> Batch:
        return self._batches[index % _NUM_BATCHES]

    def _block(self, loop: Loop, block: int) -> tuple[float, float]:
        """Run the steps of a block, and return the seconds of a step of all ranks, and the mean of the last losses."""
        loop.enter()
        num_steps = self._job.workload["steps"]
        self._table.synchronize()
        dist.barrier()
        start = time.perf_counter()
        for index in range(num_steps):
            loss = loop.step(self._batch(block * num_steps + index))
        self._table.synchronize()
        dist.barrier()
        seconds = time.perf_counter() - start
        loop.leave()
        mean_loss = torch.tensor(float(loss), dtype=torch.float64)
        dist.all_reduce(mean_loss)
        return seconds / num_steps, float(mean_loss) / dist.get_world_size()


class Loop:
    """One built case. Collective.

    Args:
        hooked: whether the hooks of this package are installed while it runs.
    """

    def __init__(self, accelerator: Any, model: nn.Module, *, hooked: bool = False) -> None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
        self._accelerator, self.hooked, self._states = accelerator, hooked, SharedStates()
        self._model, self._optimizer = accelerator.prepare(model, optimizer)
        self.leave()

    def step(self, batch: Batch) -> torch.Tensor:
        """Run one optimizer step and return its loss, without waiting for the device."""
        loss: torch.Tensor = self._model(**batch).loss
        self._accelerator.backward(loss)
        self._accelerator.clip_grad_norm_(self._model.parameters(), MAX_GRAD_NORM)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss.detach()

    def enter(self) -> None:
        """Install the hooks and the state of Accelerate that this loop needs. Other loops of the process may differ."""
        changes().remove()
        if self.hooked:
            changes().install("accelerate")
        self._states.restore()

    def leave(self) -> None:
        self._states.keep()


def make_loop(case: Case, spec: FsdpSpec, model: nn.Module, device: torch.device) -> Loop:
    """Build a case around a model on the CPU. Collective.

    Args:
        spec: the settings of the case.

    Raises:
        SpecError: the settings do not fit the model or the number of ranks.
    """
    changes().remove()
    SharedStates().restore()
    if case.strategy == DDP:
        return Loop(Accelerator(cpu=device.type == "cpu", mixed_precision=spec.launch.mixed_precision), model)
    if case.system == "plugin":
        return Loop(planned_accelerator(spec), model, hooked=True)
    plan = resolve(spec, model, world_size=case.world_size, device_type=device.type)
    return Loop(stock_accelerator(plan, device), model)


def stock_accelerator(plan: FsdpPlan, device: torch.device) -> Accelerator:
    """Return the Accelerator. The hooks of this package must not be installed.

    The precision is passed as an object, because a config file cannot set the dtype of the reduction. On CPU ranks
    Accelerate would run DDP: for this comparison its state is set to FSDP before `prepare`.
    """
    classes = sorted({name for unit in plan.units if unit.from_policy for name in unit.class_names})
    policy = MixedPrecision if plan.version == 1 else MixedPrecisionPolicy
    names = ("param", "reduce", "buffer" if plan.version == 1 else "output")
    dtypes: dict[str, Any] = {f"{name}_dtype": torch_dtype(getattr(plan.precision, name)) for name in names}
    strategy, prefetch = STRATEGIES[plan.strategy], plan.prefetch
    settings: dict[str, Any] = {
        "reshard_after_forward": strategy.reshards_after_forward,
        "cpu_offload": plan.offload_params,
    }
    if plan.version == 1:
        prefetches = {"pre": "BACKWARD_PRE", "post": "BACKWARD_POST", "none": "NO_PREFETCH"}
        settings = {
            "sharding_strategy": strategy.torch_name,
            "backward_prefetch": prefetches[prefetch.backward],
            "forward_prefetch": prefetch.forward,
            "limit_all_gathers": prefetch.limit_all_gathers,
            "use_orig_params": plan.use_orig,
            "cpu_offload": plan.offload_params and plan.device_type != "cpu",
            "sync_module_states": False,
        }
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=plan.version,
        auto_wrap_policy="transformer_based_wrap" if classes else "no_wrap",
        transformer_cls_names_to_wrap=classes or None,
        mixed_precision_policy=policy(**dtypes) if any(dtypes.values()) else None,
        cpu_ram_efficient_loading=False,
        **settings,
    )
    precision = plan.precision.param if plan.precision.param in ("bf16", "fp16") else None
    accelerator = Accelerator(cpu=device.type == "cpu", fsdp_plugin=plugin, mixed_precision=precision)
    if device.type == "cpu":
        # FSDP1 refuses Accelerate's device cpu:0.
        set_in_states(accelerator.state, distributed_type=DistributedType.FSDP, device=torch.device("cpu"))
        accelerator.state.fsdp_plugin = plugin
    return accelerator


def _settings_in(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name.startswith(_PREFIXES)}


def main(folder: Path) -> None:
    """Measure the cases of a job. A failure ends this world, because the ranks may be in different collectives then."""
    job: WorldJob = pickle.loads((folder / JOB_FILE).read_bytes())
    handover = LaunchHandover.from_env(os.environ)
    assert handover is not None, "hf-fsdp bench starts its ranks with a handover"
    uninstall()  # each case installs what it needs
    printer().quiet = True  # the settings were checked by the verb
    warnings.simplefilter("ignore")
    local_rank = launched_local_rank()
    table = get_device(job.device)
    table.set_current(local_rank)
    if not dist.is_initialized():  # install() starts one for some settings
        dist.init_process_group(table.process_group_backend, timeout=_TIMEOUT)
    device = torch.device("cpu") if job.device == "cpu" else torch.device(job.device, local_rank)
    runner = CaseRunner(job, device, handover.given)
    runner.prepare(job.groups[0])
    for number, group in enumerate(job.groups):
        rows = runner.run(group)
        if dist.get_rank() == 0:
            write_if_possible(folder / f"{number}.json", json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
