"""Process groups, ranks of a machine, reports, and the record of collectives."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from scripts.bench.gpu_checks.base import (
    Case,
    Run,
    check,
    device_module,
    device_of,
    expect,
    on_accelerator,
    on_all,
    torch_device,
)


@check(seconds=3)
def reports(case: Case) -> Case:
    """Report a run, also to a path that cannot be written, and read what it says about the device (C7, C8)."""
    import torch.distributed as dist

    import hf_fsdp_plugin as hfp
    from hf_fsdp_plugin.integrations.accelerate.run_report import report_run

    run = Run({**case, "settings": {"fsdp_sync_module_states": True}})
    run.train(2)
    growth = 0
    if on_accelerator(case):
        device_module(case).reset_peak_memory_stats()
        before = device_module(case).memory_allocated()
    found = hfp.report(run.accelerator).to_json()
    if on_accelerator(case):
        growth = device_module(case).max_memory_allocated() - before
    differing = [row["setting"] for row in found["settings"] if row["status"] == "differs"]
    expect(not differing, f"settings differ: {differing}")
    expect(found["device"] == case["device"], f"the report names device {found['device']}")
    report_run(run.accelerator, output_dir="/dev/null/no/folder")
    dist.barrier()
    return {"gpu_growth_bytes": growth, "peak_source": found["memory"].get("peak_source")}


@check(seconds=3)
def process_groups(case: Case) -> Case:
    """Prepare several models of one mesh: no new process groups, and all have the time-out of the run (C9, C11)."""
    from datetime import timedelta

    import torch.distributed as dist

    from hf_fsdp_plugin.backends.device_meshes import device_mesh
    from hf_fsdp_plugin.backends.sharding.shard import plan_of
    from hf_fsdp_plugin.torch_private.functions import set_timeout, timeout_of

    before = timeout_of()
    set_timeout(timedelta(seconds=1234))
    try:
        counts, plan = [], None
        for _ in range(3):
            run = Run(case)
            counts.append(len(dist.distributed_c10d._world.pg_map))
            plan = plan_of(run.model)
        expect(counts[0] == counts[-1], f"process groups after each model: {counts}")
        assert plan is not None
        seconds = {str(timeout_of(group)) for group in device_mesh(plan).get_all_groups()}
        given = str(timedelta(seconds=1234))
        # A group may have been created before, by an earlier check in this process.
        expect(seconds <= {given, str(before)}, f"time-outs of the groups of the mesh: {seconds}")
        backend = str(dist.get_backend_config())
        expect(
            not on_accelerator(case) or "cpu:gloo" in backend, f"the group has no backend for CPU tensors: {backend}"
        )
        return {"counts": counts, "backend": backend, "timeouts": sorted(seconds)}
    finally:
        if before is not None:
            set_timeout(before)


@check(seconds=1)
def ranks_per_machine(case: Case) -> Case:
    """Resolve a hybrid mesh without LOCAL_WORLD_SIZE, as under plain srun (C12)."""
    import torch.distributed as dist

    from hf_fsdp_plugin.backends.ranks.cluster import ranks_per_machine as resolve

    environ = {name: value for name, value in os.environ.items() if "LOCAL" not in name and "SLURM" not in name}
    size = resolve(environ, dist.get_world_size(), device_of(case).count())
    expect(dist.get_world_size() % size == 0, f"{size} ranks on this machine")
    return {"ranks_per_machine": size, "devices": device_of(case).count()}


@check(seconds=3)
def collectives(case: Case) -> Case:
    """Record the collectives of steps for the diagnosis of hangs: they are equal on all ranks, and have units."""
    import torch
    import torch.distributed as dist

    from hf_fsdp_plugin.hangs.calls import rank_from_json, read_calls, record
    from hf_fsdp_plugin.hangs.hang_cause import compare_calls
    from hf_fsdp_plugin.integrations.collective_hooks import record_calls

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "calls"
        record_calls(path)
        try:
            Run(case).train(2)
            dist.all_reduce(torch.ones(1, device=torch_device(case)))  # one rank has no other collective
            dist.barrier()
            own = read_calls(dist.get_rank(), path)
        finally:
            record().close()
    ranks = [rank_from_json(content) for content in on_all(own.to_json())]
    expect(not compare_calls(ranks), f"the records differ: {compare_calls(ranks)}")
    units = {call.unit for group in own.groups.values() for call in group.calls if call.unit}
    if case["ranks"] > 1 and case["strategy"] == "full_shard":
        expect(any("layers.3" in unit for unit in units), f"units: {sorted(units)}")
    enqueues = {group.enqueues for name, group in own.groups.items() if " of ranks " in name}
    expect(enqueues == {on_accelerator(case) and case["backend"] != "gloo"}, f"enqueues: {enqueues}")
    expect(own.wait is None, f"a rank waits: {own.wait}")
    return {"units": sorted(units), "groups": {name: group.last for name, group in own.groups.items()}}


@check(seconds=3, min_ranks=2)
def one_visible_gpu(case: Case) -> Case:
    """Train on ranks that see one GPU each, as with ``srun --gpus-per-task 1``. A barrier uses the right device."""
    run = Run(case)
    run.train(2)
    run.accelerator.wait_for_everyone()
    visible = device_of(case).count() if on_accelerator(case) else 0
    expect(visible <= 1 or case["device"] != "cuda", f"this rank sees {visible} GPUs")
    return {"text": f"visible GPUs of a rank: {visible}", "visible": visible}
