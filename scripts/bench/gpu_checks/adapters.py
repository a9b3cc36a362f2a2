"""LoRA, and QLoRA on bitsandbytes' 4-bit weights."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from typing import Any

from scripts.bench.gpu_checks.base import (
    Case,
    Skipped,
    check,
    device_of,
    expect,
    local,
    new_accelerator,
    on_accelerator,
    on_rank_0,
    shared_folder,
)
from scripts.bench.measure.memory_points import Point, make_model

_POINT = Point(lora=8, hidden=256, inter=512, layers=2, vocab=1024, heads=4, kv_heads=2, seq=64, batch=4)


@check(seconds=6)
def lora(case: Case) -> Case:
    """Train LoRA adapters, and save them as PEFT does."""
    return _train(case, _POINT, ("peft",))


@check(seconds=12)
def qlora(case: Case) -> Case:
    """Train LoRA adapters on weights that bitsandbytes has packed in 4 bits, and save the adapters."""
    return _train(case, replace(_POINT, qlora=True), ("peft", "bitsandbytes"))


def _train(case: Case, point: Point, needed: tuple[str, ...]) -> Case:
    import torch

    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        raise Skipped(f"not installed: {', '.join(missing)}")
    if point.qlora and case["device"] not in ("cpu", "cuda"):
        raise Skipped(f"bitsandbytes has no kernels for {case['device']}")
    accelerator = new_accelerator(case)
    precision: Any = "bf16" if case["precision"] == "bf16" else "no"
    model = make_model(replace(point, precision=precision)).train()
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    generator = torch.Generator().manual_seed(1 + accelerator.process_index)
    ids = torch.randint(0, point.vocab, (point.batch, point.seq), generator=generator).to(accelerator.device)
    losses = []
    for _ in range(10):
        loss = model(input_ids=ids, labels=ids).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(round(loss.item(), 4))
    expect(losses[-1] < losses[0], f"the loss did not fall: {losses}")
    if on_accelerator(case):
        devices = {local(parameter).device.type for parameter in model.parameters()}
        expect(devices == {case["device"]}, f"the parameters are on {sorted(devices)}")
    with shared_folder() as folder:
        accelerator.unwrap_model(model).save_pretrained(folder)
        names = on_rank_0(lambda _: sorted(path.name for path in folder.iterdir()))
    expect("adapter_model.safetensors" in names, f"files of the adapters: {names}")
    return {
        "text": f"loss {losses[0]} to {losses[-1]}; saved {', '.join(names)}",
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "peak_bytes": device_of(case).peak_memory(),
    }
