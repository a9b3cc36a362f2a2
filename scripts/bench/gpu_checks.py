"""What gpu_check.py tests on the ranks of a case. Every check also runs on CPU ranks, where it tests less.

A check is a function with the case as argument. It raises an error if it fails, and returns measurements. It may start
several Accelerators, one after the other. The process group exists.
"""

from __future__ import annotations

import copy
import gc
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from common import ROOT, make_llama

Case = dict[str, Any]
NUM_STEPS = 10
VOCABULARY = 1024
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
CHECKS: dict[str, Callable[[Case], Case]] = {}
"""Name of a check -> its function."""


def check(function: Callable[[Case], Case]) -> Callable[[Case], Case]:
    CHECKS[function.__name__] = function
    return function


def expect(condition: Any, text: str) -> None:
    if not condition:
        raise RuntimeError(text)


def config(case: Case) -> Case:
    """Return the Accelerate config of a case. Hybrid strategies need a mesh, because the world has one or two ranks."""
    hybrid = case["strategy"].startswith("hybrid")
    return {
        "distributed_type": "FSDP",
        "num_processes": case["ranks"],
        "mixed_precision": "no" if case["precision"] == "fp32" else case["precision"],
        **({"use_cpu": True} if case["device"] == "cpu" else {}),
        "fsdp_config": {
            "fsdp_version": case["version"],
            "fsdp_sharding_strategy": case["strategy"].upper(),
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_offload_params": case["offload"],
            "fsdp_async_save": True,
            **case.get("settings", {}),
        },
        **case.get("top", {}),
        **({"parallelism_config": {"dp_replicate_size": 1, "dp_shard_size": case["ranks"]}} if hybrid else {}),
    }


def new_accelerator(case: Case) -> Any:
    """A new Accelerator in a process that may have had others."""
    from accelerate.state import AcceleratorState, GradientState

    import hf_fsdp_plugin as hfp

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    gc.collect()
    return hfp.accelerator(hfp.load_spec(config(case), environ={}))


class Run:
    """A small Llama that is trained on random tokens, each rank with rows of its own."""

    def __init__(self, case: Case, **optimizer: Any) -> None:
        import torch

        from hf_fsdp_plugin.torch_private.grad_scaler import ShardedGradScaler

        self.accelerator = new_accelerator(case)
        if case.get("scaled") and case["device"] == "cpu":  # CPU ranks have no fp16 training
            self.accelerator.scaler = ShardedGradScaler("cpu", init_scale=1024.0)
        model = make_llama(**SIZES)
        adamw = torch.optim.AdamW(model.parameters(), lr=1e-3, **optimizer)
        self.model, self.optimizer = self.accelerator.prepare(model, adamw)
        generator = torch.Generator().manual_seed(1 + self.accelerator.process_index)
        self.ids = torch.randint(0, VOCABULARY, (4, 64), generator=generator).to(self.accelerator.device)

    def backward(self) -> float:
        loss = self.model(input_ids=self.ids, labels=self.ids).loss
        self.accelerator.backward(loss)
        return float(loss.item())

    def step(self, *, clip: bool = True) -> float:
        loss = self.backward()
        if clip:
            self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def train(self, num_steps: int = NUM_STEPS, *, clip: bool = True) -> list[float]:
        import torch

        losses = [self.step(clip=clip) for _ in range(num_steps)]
        expect(all(torch.isfinite(torch.tensor(losses))) and losses[-1] < losses[0], f"the loss did not fall: {losses}")
        return losses


def device_of(case: Case) -> Any:
    from hf_fsdp_plugin.devices import get_device

    return get_device(case["device"])


def local(tensor: Any) -> Any:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


@contextmanager
def shared_folder() -> Iterator[Path]:
    """A new folder that all ranks use, on this machine."""
    import torch.distributed as dist

    folders = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folders)
    try:
        yield Path(str(folders[0]))
    finally:
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(str(folders[0]))


@check
def training(case: Case) -> Case:
    """Train, save a checkpoint of each state dict type in the background, verify it, and continue from it."""
    from hf_fsdp_plugin.backends.shard import plan_of

    run = Run(case)
    losses = run.train()
    plan = plan_of(run.model)
    expect(plan is not None and (plan.backend, plan.strategy) == (f"fsdp{case['version']}", case["strategy"]), "plan")
    devices = {parameter.device.type for parameter in run.model.parameters()}
    expect(devices == {"cpu" if case["offload"] else case["device"]}, f"the parameters are on {sorted(devices)}")
    for kind in ("sharded", "full", "local"):
        _check_checkpoint(run, kind)
    return {
        "first_loss": round(losses[0], 4),
        "last_loss": round(losses[-1], 4),
        "grad_scaler": run.accelerator.scaler is not None,
        "peak_bytes": device_of(case).peak_memory(),
    }


def _check_checkpoint(run: Run, kind: str) -> None:
    from hf_fsdp_plugin.checkpoint import verify
    from hf_fsdp_plugin.integrations.saving import manager

    with shared_folder() as folder:
        run.accelerator.state.fsdp_plugin.set_state_dict_type(kind)
        run.accelerator.save_state(str(folder / kind))
        before = [run.step() for _ in range(3)]
        manager.wait()
        problems = verify(folder / kind).problems
        expect(not problems, f"{kind} checkpoint: {problems[:1]}")
        run.accelerator.load_state(str(folder / kind))
        after = [run.step() for _ in range(3)]
        equal = all(abs(a - b) <= 1e-3 * abs(b) for a, b in zip(after, before, strict=True))
        expect(equal, f"{kind} checkpoint: losses {before}, but {after} after loading it")


@check
def ignored_modules(case: Case) -> Case:
    """Train trainable ignored modules with each implementation of the optimizer (C1, C2)."""
    found = {}
    for name, optimizer in {"default": {}, "foreach": {"foreach": True}, "fused": {"fused": True}}.items():
        run = Run({**case, "settings": {"fsdp_ignored_modules": r"lm_head|model\.norm"}}, **optimizer)
        found[name] = round(run.train()[-1], 4)
    expect(max(found.values()) - min(found.values()) < 0.05, f"the implementations give different losses: {found}")
    return {"last_losses": found}


@check
def scaler(case: Case) -> Case:
    """Make a gradient of one rank infinite: all ranks must skip the step, with a fused optimizer too (L6)."""
    import torch
    import torch.distributed as dist

    found = {}
    for name, optimizer in {"default": {}, "fused": {"fused": True}}.items():
        run = Run({**case, "scaled": True}, **optimizer)
        expect(run.accelerator.scaler is not None, "the Accelerator has no gradient scaler")
        for _ in range(20):  # torch's initial scale of 65,536 may overflow
            run.step(clip=False)
        scale = run.accelerator.scaler.get_scale()
        run.backward()
        if dist.get_rank() == dist.get_world_size() - 1:
            gradients = (local(p.grad) for p in run.model.parameters() if p.grad is not None)
            next(gradient for gradient in gradients if gradient.numel()).view(-1)[0] = float("inf")
        before = [local(parameter.detach()).clone() for parameter in run.model.parameters()]
        run.optimizer.step()
        after = [local(parameter.detach()) for parameter in run.model.parameters()]
        changed = any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
        expect(not changed, f"{name}: this rank did not skip the step")
        expect(run.accelerator.scaler.get_scale() == scale / 2, f"{name}: the scale was not halved")
        found[name] = scale
    return {"scales": found}


@check
def pinned_saves(case: Case) -> Case:
    """Save in the background twice, with memory that is pinned in a thread (C3, L1, L2, C11).

    No process may have a context on the GPU of another rank, and no error may be left for the next kernel.
    """
    import torch.distributed as dist

    from hf_fsdp_plugin.integrations.saving import manager

    run = Run(case)
    run.train()
    seconds = {}
    with shared_folder() as folder:
        for name in ("first", "second"):
            begin = time.perf_counter()
            run.accelerator.save_state(str(folder / name))
            seconds[f"{name}_stall_s"] = round(time.perf_counter() - begin, 3)
            run.step()  # a kernel raises an error that the runtime has kept
            manager.wait()
            seconds[f"{name}_total_s"] = round(time.perf_counter() - begin, 3)
        run.accelerator.state.fsdp_plugin.async_save = False
        begin = time.perf_counter()
        manager.save_model(run.model, folder / "now", "sharded")
        seconds["foreground_s"] = round(time.perf_counter() - begin, 3)
    if case["device"] != "cuda":
        return seconds
    pids: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    used = gpu_processes(os.getpid())
    expect(len(used) <= 1, f"process {os.getpid()} uses several GPUs: {used}")
    return {**seconds, "gpu_bytes_by_process": used, "pids": pids}


def on_accelerator(case: Case) -> bool:
    return case["device"] not in ("cpu", "meta")


def device_module(case: Case) -> Any:
    """Return the module of torch with the device's functions, such as ``torch.cuda``."""
    import torch

    return torch.get_device_module(case["device"])


def gpu_processes(pid: int) -> dict[str, int]:
    """Return GPU -> bytes that a process uses on it, from nvidia-smi; empty if it does not see the process."""
    query = ["nvidia-smi", "--query-compute-apps=pid,gpu_uuid,used_memory", "--format=csv,noheader,nounits"]
    done = subprocess.run(query, capture_output=True, text=True, check=False)
    rows = (line.split(", ") for line in done.stdout.splitlines())
    return {row[1]: int(row[2]) << 20 for row in rows if len(row) == 3 and row[0] == str(pid) and row[2].isdecimal()}


@check
def state_dict(case: Case) -> Case:
    """Gather the whole state dict: only rank 0 has it, in CPU memory, and no GPU holds the model (C4)."""
    import torch.distributed as dist

    run = Run(case)
    run.train(2)
    whole_bytes = 4 * sum(parameter.numel() for parameter in make_llama(**SIZES).parameters())
    growth = 0
    if on_accelerator(case):
        device_module(case).synchronize()
        device_module(case).reset_peak_memory_stats()
        before = device_module(case).memory_allocated()
    state = run.accelerator.get_state_dict(run.model)
    if on_accelerator(case):
        growth = device_module(case).max_memory_allocated() - before
        # FSDP1 with offload gathers nothing; otherwise rank 0's part is copied from the device piece by piece.
        expect(growth < whole_bytes / 2, f"the GPU held {growth} of {whole_bytes} bytes")
    if dist.get_rank() == 0:
        expect({t.device.type for t in state.values()} == {"cpu"}, "a tensor is not in CPU memory")
        expect(sum(t.numel() for t in state.values()) * 4 == whole_bytes, "the state dict is not whole")
    else:
        expect(not state, "a rank other than 0 has tensors")
    return {"whole_bytes": whole_bytes, "gpu_growth_bytes": growth}


@check
def clipping(case: Case) -> Case:
    """Clip by each kind of norm, with a rank whose shard of a parameter is empty (C10)."""
    import torch

    accelerator = new_accelerator({**case, "settings": {"fsdp_auto_wrap_policy": "NO_WRAP"}})
    model = torch.nn.Linear(4, 1)  # one row: the other rank has none
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    norms = {}
    for kind in (2.0, 1.0, float("inf")):
        accelerator.backward(model(torch.ones(2, 4, device=accelerator.device)).square().mean())
        norms[str(kind)] = round(float(accelerator.clip_grad_norm_(model.parameters(), 1e-3, kind)), 6)
        optimizer.step()
        optimizer.zero_grad()
    expect(norms["inf"] <= norms["2.0"] <= norms["1.0"], f"norms {norms}")
    return {"norms": norms}


@check
def reports(case: Case) -> Case:
    """Report a run, also to a path that cannot be written, and read what it says about the device (C7, C8)."""
    import torch.distributed as dist

    import hf_fsdp_plugin as hfp
    from hf_fsdp_plugin.integrations.run_report import report_run

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


@check
def process_groups(case: Case) -> Case:
    """Prepare several models of one mesh: no new process groups, and all have the time-out of the run (C9, C11)."""
    from datetime import timedelta

    import torch.distributed as dist

    from hf_fsdp_plugin.backends.shard import plan_of
    from hf_fsdp_plugin.backends.torch_types import device_mesh
    from hf_fsdp_plugin.torch_private.process_groups import set_timeout, timeout_of

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
        return {"counts": counts, "backend": str(dist.get_backend_config()), "timeouts": sorted(seconds)}
    finally:
        if before is not None:
            set_timeout(before)


@check
def compiled(case: Case) -> Case:
    """Train with compiled layers under FSDP's hooks, and compare with eager training."""
    import torch

    backend = "inductor" if case["device"] == "cuda" else "aot_eager"
    eager = Run(case).train()
    run = Run({**case, "top": {"dynamo_config": {"dynamo_backend": backend.upper()}}})
    losses = run.train()
    expect(abs(losses[-1] - eager[-1]) < 0.05, f"compiled {losses[-1]}, eager {eager[-1]}")
    torch.compiler.reset()
    return {"eager": round(eager[-1], 4), backend: round(losses[-1], 4)}


@check
def generation(case: Case) -> Case:
    """Generate with the sharded model between steps, and compare the tokens of all ranks (C2)."""
    import torch
    import torch.distributed as dist

    run = Run(case)
    run.train(2)
    prompt = torch.arange(1, 6, device=run.accelerator.device)[None]
    with torch.no_grad():
        tokens = run.accelerator.unwrap_model(run.model).generate(prompt, max_new_tokens=8, do_sample=False)
    expect(tokens.shape[1] > 5, f"no new tokens: {tuple(tokens.shape)}")
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, tokens.tolist())
    expect(all(one == found[0] for one in found), f"the ranks generated {found}")
    run.train(3)
    return {"tokens": found[0][0]}


@check
def activation_offload(case: Case) -> Case:
    """Train with checkpointed and offloaded activations, and compare losses and memory with neither."""

    losses, peaks = {}, {}
    offload = {"fsdp_activation_checkpointing": True, "fsdp_activation_cpu_offload": True}
    for name, settings in {"none": {}, "offload": offload}.items():
        if on_accelerator(case):
            gc.collect()
            device_module(case).reset_peak_memory_stats()
        run = Run({**case, "settings": settings})
        losses[name] = round(run.train()[-1], 4)
        peaks[name] = device_of(case).peak_memory()
        del run
    expect(abs(losses["none"] - losses["offload"]) < 0.02, f"last losses {losses}")
    return {"last_losses": losses, "peak_bytes": peaks}


@check
def loading(case: Case) -> Case:
    """Load a model from files and shard it: each rank copies its own part to the device, and no whole model (C11)."""
    import torch
    import torch.distributed as dist
    from transformers import LlamaForCausalLM

    import hf_fsdp_plugin as hfp

    with shared_folder() as folder:
        bare = make_llama(**SIZES)
        if dist.get_rank() == 0:
            bare.save_pretrained(folder)
        dist.barrier()
        settings = {"fsdp_cpu_ram_efficient_loading": True}
        accelerator = new_accelerator({**case, "settings": settings})
        private, growth = private_bytes(), 0
        if on_accelerator(case):
            device_module(case).reset_peak_memory_stats()
            before = device_module(case).memory_allocated()
        spec = hfp.load_spec(config({**case, "settings": settings}), environ={})
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


@check
def ranks_per_machine(case: Case) -> Case:
    """Resolve a hybrid mesh without LOCAL_WORLD_SIZE, as under plain srun (C12)."""
    import torch.distributed as dist

    from hf_fsdp_plugin.backends.cluster import ranks_per_machine as resolve

    environ = {name: value for name, value in os.environ.items() if "LOCAL" not in name and "SLURM" not in name}
    size = resolve(environ, dist.get_world_size(), device_of(case).count())
    expect(dist.get_world_size() % size == 0, f"{size} ranks on this machine")
    return {"ranks_per_machine": size, "devices": device_of(case).count()}


@check
def collectives(case: Case) -> Case:
    """Record the collectives of steps for the diagnosis of hangs: they are equal on all ranks, and have units."""
    import torch.distributed as dist

    from hf_fsdp_plugin.integrations.call_record import record_calls
    from hf_fsdp_plugin.observe.hang.call_files import CallFiles, read_calls
    from hf_fsdp_plugin.observe.hang.calls import from_json
    from hf_fsdp_plugin.observe.hang.diagnose import compare
    from hf_fsdp_plugin.observe.hang.record import record

    with tempfile.TemporaryDirectory() as folder:
        files = CallFiles(Path(folder) / "calls", Path(folder) / "names")
        record_calls(files)
        try:
            Run(case).train(2)
            dist.barrier()
            own = read_calls(dist.get_rank(), files)
        finally:
            record.close()
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own.to_json())
    ranks = [from_json(content) for content in everyone]
    expect(compare(ranks) is None, f"the records differ: {compare(ranks)}")
    units = {call.unit for group in own.groups.values() for call in group.calls if call.unit}
    if case["ranks"] > 1 and case["strategy"] == "full_shard":
        expect(any("layers.3" in unit for unit in units), f"units: {sorted(units)}")
    enqueues = {group.enqueues for name, group in own.groups.items() if " of ranks " in name}
    expect(enqueues == {on_accelerator(case) and case["backend"] != "gloo"}, f"enqueues: {enqueues}")
    expect(own.wait is None, f"a rank waits: {own.wait}")
    return {"units": sorted(units), "groups": {name: group.last for name, group in own.groups.items()}}


@check
def prediction(case: Case) -> Case:
    """Compare the peak of a step with the predictions of ``hf-fsdp plan``: in closed form, and traced.

    On CPU ranks, torch has no figure for the peak, so only the predictions are compared with each other.
    """
    import torch
    import torch.distributed as dist

    from hf_fsdp_plugin.estimate.memory.assumptions import framework_bytes

    done: list[Any] = [None]
    if dist.get_rank() == 0:
        with tempfile.TemporaryDirectory() as folder:
            done = [{name: run_plan(case, Path(folder), *flags) for name, flags in _METHODS.items()}]
    dist.broadcast_object_list(done)
    predicted = done[0]
    failed = {name: text for name, text in predicted.items() if not isinstance(text, int)}
    expect(not failed, f"plan: {failed}")
    found: Case = {f"{name}_bytes": size for name, size in predicted.items()}
    if case["device"] != "cuda":
        expect(abs(predicted["closed_form"] / predicted["traced"] - 1) < _ERROR["closed_form"], f"{found}")
        return found
    gc.collect()
    # cuBLAS keeps its workspace, which an earlier check may have made: it is made now, and counted as predicted.
    torch.ones(64, 64, device="cuda").matmul(torch.ones(64, 64, device="cuda"))
    before = torch.cuda.memory_allocated() - framework_bytes("cuda")
    run = Run(case)
    run.train(2)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    run.train(3)
    torch.cuda.synchronize()
    peaks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(peaks, torch.cuda.max_memory_allocated() - before)
    errors = {name: round(size / max(peaks) - 1, 4) for name, size in predicted.items()}
    result = {**found, "peak_bytes": max(peaks), "errors": errors}
    wrong = [name for name, error in errors.items() if abs(error) > _ERROR[name]]
    expect(not wrong, f"the predictions {wrong} are not near the peak: {result}")
    return result


_METHODS: dict[str, tuple[str, ...]] = {"closed_form": (), "traced": ("--trace",)}
_ERROR = {"closed_form": 0.2, "traced": 0.05}
"""Largest relative error of a predicted peak."""


def run_plan(case: Case, folder: Path, *flags: str) -> int | str:
    """Return the peak in bytes that ``hf-fsdp plan`` predicts for :class:`Run`, or its output if it fails."""
    (folder / "model").mkdir(exist_ok=True)
    model = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **SIZES}
    (folder / "model" / "config.json").write_text(json.dumps(model))
    (folder / "fsdp.json").write_text(json.dumps(config(case)))
    command = [
        sys.executable, "-m", "hf_fsdp_plugin.cli.main", "plan", "--json", "--model", str(folder / "model"),
        "--config", str(folder / "fsdp.json"), "--world-size", str(case["ranks"]), "--device", case["device"],
        "--micro-batch", "4", "--seq-len", "64", *flags,
    ]  # fmt: skip
    # A trace makes a process group of its own, and needs no device.
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        environ.pop(name, None)
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=200, check=False)
    if done.returncode:
        return (done.stdout + done.stderr)[-600:]
    return int(json.loads(done.stdout)["per_rank"]["peak_bytes"])


def run_check(case: Case) -> Case:
    """Run the check of a case on this rank, and return its measurements."""
    return CHECKS[case["check"]](copy.deepcopy(case))
