"""Loading: each rank reads its part, the time against stock Accelerate, and resuming."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from scripts.bench.gpu_checks.base import (
    TINY,
    Case,
    Run,
    Size,
    check,
    device_module,
    device_of,
    expect,
    is_rank_0,
    local,
    new_accelerator,
    on_accelerator,
    on_all,
    reset_process,
    shared_folder,
    size_for,
    spec_of,
    torch_device,
)


@check(seconds=4)
def loading(case: Case) -> Case:
    """Load a model from files and shard it: each rank copies its own part to the device, and no whole model (C11)."""
    import torch
    import torch.distributed as dist
    from transformers import LlamaForCausalLM

    import hf_fsdp_plugin as hfp

    with shared_folder() as folder:
        bare = TINY.model()
        if is_rank_0():
            bare.save_pretrained(folder)
        dist.barrier()
        settings = {"fsdp_cpu_ram_efficient_loading": True}
        accelerator = new_accelerator({**case, "settings": settings})
        private, growth = private_bytes(), 0
        if on_accelerator(case):
            device_module(case).reset_peak_memory_stats()
            before = device_module(case).memory_allocated()
        spec = spec_of({**case, "settings": settings})
        model = hfp.from_pretrained(str(folder), spec, model_class=LlamaForCausalLM)
        model = accelerator.prepare(model)
        if on_accelerator(case):
            growth = device_module(case).max_memory_allocated() - before
        private = private_bytes() - private
        state = accelerator.get_state_dict(model)
        expected = bare.state_dict()
        different = [name for name, tensor in state.items() if not torch.equal(tensor, expected[name])]
        expect(not different, f"weights differ from the file: {different[:3]}")
        ids = torch.ones(2, 4, dtype=torch.long, device=accelerator.device)
        accelerator.backward(model(input_ids=ids, labels=ids).loss)
        whole = 4 * sum(parameter.numel() for parameter in bare.parameters())
    return {"whole_bytes": whole, "private_growth_bytes": private, "gpu_growth_bytes": growth}


def private_bytes() -> int:
    """Return the private memory of this process in bytes; 0 if the system does not tell."""
    path = Path("/proc/self/smaps_rollup")
    rows = path.read_text().splitlines() if path.exists() else []
    return sum(int(row.split()[1]) << 10 for row in rows if row.startswith(("Private_Clean", "Private_Dirty")))


@check(seconds=40, limit=150)
def load_speed(case: Case) -> Case:
    """Time `from_pretrained` and `prepare` of a bf16 model on disk, in its dtype, against stock Accelerate.

    The shards are fp32 in both, because they are trained. The file is in the page cache. Rates are bytes of the file on
    each rank's machine per second.
    """
    import torch
    import torch.distributed as dist

    size = size_for(case, 3 * 4 + 4)
    num_bytes = 2 * size.num_params
    with shared_folder(2 * num_bytes) as folder:
        if is_rank_0():
            size.model(torch_device(case)).to(torch.bfloat16).save_pretrained(folder, max_shard_size="1GB")
        dist.barrier()
        times: dict[str, list[float]] = {"plugin": [], "stock": []}
        kept: dict[str, Any] = {}
        for system in ("plugin", "stock", "plugin", "stock"):
            kept.pop(system, None)
            reset_process()
            dist.barrier()
            elapsed, kept[system] = _load(case, folder, size, stock=system == "stock")
            times[system].append(max(on_all(elapsed)))
    pairs = zip(kept["plugin"].named_parameters(), kept["stock"].named_parameters(), strict=True)
    if case["version"] == 2:
        different = [name for (name, own), (_, other) in pairs if not torch.equal(local(own), local(other))]
        expect(not different, f"weights differ from those of stock Accelerate: {different[:3]}")
    best = {system: round(min(found), 3) for system, found in times.items()}
    rates = {system: round(num_bytes / found / 1e9, 2) for system, found in best.items()}
    expect(best["plugin"] < 1.2 * best["stock"] or size is TINY, f"slower than stock Accelerate: {times} s")
    text = f"{num_bytes / 1e9:.1f} GB in {best['plugin']} s, {rates['plugin']} GB/s; stock Accelerate {best['stock']} s"
    return {"text": text, "file_bytes": num_bytes, "load_seconds": best, "gb_per_second": rates}


def _load(case: Case, folder: Path, size: Size, *, stock: bool) -> tuple[float, Any]:
    """Load and shard a model. Returns seconds until the weights are on the device, and the model."""
    import torch
    from transformers import LlamaForCausalLM

    import hf_fsdp_plugin as hfp

    case = {**case, "settings": {"fsdp_cpu_ram_efficient_loading": True}}
    accelerator = new_accelerator(case, stock=stock, model=size.model("meta"))
    start = time.perf_counter()
    if stock:
        model = LlamaForCausalLM.from_pretrained(folder, dtype="auto")
    else:
        model = hfp.from_pretrained(str(folder), spec_of(case), model_class=LlamaForCausalLM, dtype="auto")
    # Accelerate prepares an FSDP2 model together with its optimizer only.
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    device_of(case).synchronize()
    return time.perf_counter() - start, model


@check(seconds=8)
def fused_resume(case: Case) -> Case:
    """Resume a run with fused AdamW, whose step counts are on the device, in a new model and optimizer."""
    import torch

    from hf_fsdp_plugin.integrations.saving import manager

    with shared_folder() as folder:
        run = Run(case, fused=True)
        run.train(4)
        run.accelerator.save_state(str(folder / "saved"))
        expected = run.train(4)
        manager().wait()
        counts = _step_counts(run)
        del run
        resumed = Run(case, fused=True)
        resumed.accelerator.load_state(str(folder / "saved"))
        losses = [resumed.step() for _ in range(4)]
        counts_after = _step_counts(resumed)
    differences = [abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True)]
    expect(max(differences) < 1e-3, f"losses {expected}, but {losses} after resuming")
    expect(counts == counts_after, f"step counts {counts}, but {counts_after} after resuming")
    place = case["device"] if not case["offload"] else "cpu"
    expect(set(counts) == {(8.0, place)}, f"values and devices of the step counts: {counts}")
    return {
        "text": f"losses after resuming differ by at most {max(differences):.0e}; step counts on {place}",
        "relative_difference": max(differences),
        "is_equal": bool(torch.equal(torch.tensor(losses), torch.tensor(expected))),
    }


def _step_counts(run: Run) -> list[tuple[float, str]]:
    """Return the different values and devices of ``step`` in the optimizer's state."""
    states = run.optimizer.optimizer.state.values()
    found = {(float(local(state["step"])), local(state["step"]).device.type) for state in states if "step" in state}
    return sorted(found)
