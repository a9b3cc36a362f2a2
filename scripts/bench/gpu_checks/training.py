"""Training: strategies, precisions, ignored modules, the gradient scaler, clipping, compile and generation."""

from __future__ import annotations

import gc
import time
from typing import Any

from scripts.bench.gpu_checks.base import (
    TINY,
    Case,
    Run,
    Skipped,
    check,
    device_module,
    device_of,
    expect,
    local,
    new_accelerator,
    on_accelerator,
    on_all,
    shared_folder,
    size_for,
)
from scripts.bench.gpu_checks.speed import why_no_compiler


@check(seconds=5, limit=120)
def training(case: Case) -> Case:
    """Train, save a checkpoint of each state dict type in the background, verify it, and continue from it."""
    from hf_fsdp_plugin.backends.sharding.shard import plan_of

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
    from hf_fsdp_plugin.integrations.saving import manager
    from hf_fsdp_plugin.tools.verify.verification import verify

    with shared_folder() as folder:
        run.accelerator.state.fsdp_plugin.set_state_dict_type(kind)
        run.accelerator.save_state(str(folder / kind))
        before = [run.step() for _ in range(3)]
        manager().wait()
        problems = verify(folder / kind).problems
        expect(not problems, f"{kind} checkpoint: {problems[:1]}")
        run.accelerator.load_state(str(folder / kind))
        after = [run.step() for _ in range(3)]
        equal = all(abs(a - b) <= 1e-3 * abs(b) for a, b in zip(after, before, strict=True))
        expect(equal, f"{kind} checkpoint: losses {before}, but {after} after loading it")


@check(seconds=4)
def ignored_modules(case: Case) -> Case:
    """Train trainable ignored modules with each implementation of the optimizer (C1, C2)."""
    found = {}
    for name, optimizer in {"default": {}, "foreach": {"foreach": True}, "fused": {"fused": True}}.items():
        run = Run({**case, "settings": {"fsdp_ignored_modules": r"lm_head|model\.norm"}}, **optimizer)
        found[name] = round(run.train()[-1], 4)
    expect(max(found.values()) - min(found.values()) < 0.05, f"the implementations give different losses: {found}")
    return {"last_losses": found}


@check(seconds=5)
def scaler(case: Case) -> Case:
    """Make a gradient of one rank infinite: all ranks must skip the step, with a fused optimizer too (L6)."""
    import torch
    import torch.distributed as dist

    found = {}
    size = TINY.with_layers(2, micro_batch=1, seq=16)  # without a GPU, fp16 is slow
    for name, optimizer in {"default": {}, "fused": {"fused": True}}.items():
        run = Run({**case, "scaled": True}, size, **optimizer)
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


@check(seconds=2)
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


@check(seconds=40, limit=180)
def compiled(case: Case) -> Case:
    """Train with compiled layers under FSDP's hooks, and compare with eager training."""
    import torch

    backend = "inductor" if case["device"] == "cuda" else "aot_eager"
    if reason := why_no_compiler(case):
        raise Skipped(f"torch.compile does not work here without this package: {reason}")
    eager = Run(case).train()
    run = Run({**case, "top": {"dynamo_config": {"dynamo_backend": backend.upper()}}})
    losses = run.train()
    expect(abs(losses[-1] - eager[-1]) < 0.05, f"compiled {losses[-1]}, eager {eager[-1]}")
    torch.compiler.reset()
    return {"eager": round(eager[-1], 4), backend: round(losses[-1], 4)}


@check(seconds=4)
def generation(case: Case) -> Case:
    """Generate with the sharded model between steps, and compare the tokens of all ranks (C2)."""
    import torch

    run = Run(case)
    run.train(2)
    prompt = torch.arange(1, 6, device=run.accelerator.device)[None]
    with torch.no_grad():
        tokens = run.accelerator.unwrap_model(run.model).generate(prompt, max_new_tokens=8, do_sample=False)
    expect(tokens.shape[1] > 5, f"no new tokens: {tuple(tokens.shape)}")
    found = on_all(tokens.tolist())
    expect(all(one == found[0] for one in found), f"the ranks generated {found}")
    run.train(3)
    return {"tokens": found[0][0]}


@check(seconds=4)
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


@check(seconds=12, limit=120)
def optimizer_offload(case: Case) -> Case:
    """Train with the optimizer's state in CPU memory: the losses, where the state is, and the time of a step."""
    size, losses, figures = size_for(case, 24, "0.4 B"), {}, {}
    for name, offload in {"device": False, "host": True}.items():
        run = Run({**case, "settings": {"fsdp_offload_optimizer": offload}}, size, fused=True)
        losses[name] = run.train(5)
        tensors = [value for state in run.optimizer.state.values() for value in state.values() if value.dim()]
        devices = {local(value).device.type for value in tensors}
        expect(devices == {"cpu" if offload else case["device"]}, f"the state is on {sorted(devices)}")
        run.backward()
        seconds = _seconds_of(case, run.optimizer.step)
        run.optimizer.zero_grad()
        num_bytes = sum(local(value).nbytes for value in tensors)
        figures[name] = {"step_ms": round(seconds * 1e3, 1), "state_gb": round(num_bytes / 1e9, 2)}
        if on_accelerator(case):
            figures[name]["allocated_gb"] = round(device_module(case).memory_allocated() / 1e9, 2)
        if offload:
            _check_checkpoint(run, "sharded")
        del run, tensors
        gc.collect()
    difference = max(abs(a / b - 1) for a, b in zip(losses["host"], losses["device"], strict=True))
    expect(difference < 1e-3, f"losses {losses}")
    gb = figures["host"]["state_gb"]
    text = f"{gb:.2f} GB in each direction in {figures['host']['step_ms']:.0f} ms"
    return {"text": text, "relative_difference": difference, **figures}


def _seconds_of(case: Case, run: Any) -> float:
    if on_accelerator(case):
        device_module(case).synchronize()
    start = time.perf_counter()
    run()
    if on_accelerator(case):
        device_module(case).synchronize()
    return time.perf_counter() - start
