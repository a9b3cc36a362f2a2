"""Memory: predicted against the counters of torch's allocator and of the driver."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

import psutil

from scripts.bench.common import child_environment
from scripts.bench.gpu_checks.base import (
    Case,
    Run,
    Size,
    broadcast,
    check,
    device_module,
    expect,
    is_rank_0,
    on_accelerator,
    on_all,
    reset_process,
    shared_folder,
    size_for,
    torch_device,
)
from scripts.bench.measure.memory_points import Point

_ERROR = 0.2
"""Largest relative error of the predicted peak of allocated memory."""
FIGURES = ("allocated", "reserved", "total")
_PROBE = 1 << 26
"""Bytes of the pinned tensor that shows whether pinned memory is resident."""


@check(seconds=40, limit=200, fresh=True)
def prediction(case: Case) -> Case:
    """Compare the peak of a step with the prediction: allocated, and reserved if it is predicted.

    On CPU ranks, torch has no figure for the peak; ``python -m scripts.bench memory_error`` counts it there.
    """
    return _compare(case, {})


@check(seconds=40, limit=200, fresh=True)
def checkpointed_prediction(case: Case) -> Case:
    """The same with activation checkpointing and a batch that is four times as large."""
    return _compare(case, {"checkpointing": True})


@check(seconds=20, limit=300, fresh=True)
def host_prediction(case: Case) -> Case:
    """Compare the memory of the host that offload and an asynchronous save take with the prediction.

    Only on GPUs: the memory of CPU ranks and of the simulated device is memory of the host.
    """
    size, point = _point_of(case, size_for(case, 24, largest="0.4 B"), {"offload_params": case["offload"]})
    predicting = start_prediction(point, case) if is_rank_0() else None
    measured = measure_host(case, size)
    predicted = _output_of(predicting)
    errors = {name: round(predicted[name] / number - 1, 4) for name, number in measured.items() if predicted[name]}
    gb = ", ".join(f"{name} {number / 1e9:.3f} GB" for name, number in measured.items())
    text = f"{size.name}: host memory: {gb}; errors of the prediction {errors}"
    if case["device"] == "cuda":
        wrong = [name for name, error in errors.items() if abs(error) > _ERROR]
        expect(not wrong, f"the prediction is not near the memory of {' and '.join(wrong)}. {text}")
    expect(predicted["staging"] > 0, f"no memory is predicted for the copies of an asynchronous save. {text}")
    return {
        "text": text,
        "errors": errors,
        "model": size.name,
        "predicted_bytes": predicted,
        "measured_bytes": measured,
    }


def measure_host(case: Case, size: Size) -> dict[str, int]:
    """Train and save in the background. Return the largest growth of a rank's memory of the host in bytes.

    ``offload`` is the growth by three steps, ``staging`` that by the save, whose buffers stay for the next one.
    """
    from hf_fsdp_plugin.integrations.saving import manager

    Run({**case, "offload": False}).step()  # loads kernels and libraries, which take memory of the host too
    reset_process()
    gc.collect()
    begin = host_memory(case)
    run = Run(case, size)
    for _ in range(3):
        run.step()
    trained = host_memory(case)
    with shared_folder(12 * size.num_params) as folder:
        run.accelerator.save_state(str(folder / "saved"))
        run.step()  # waits for the copies
        saved = host_memory(case)
        manager().close()
    ranks = on_all({"offload": trained - begin, "staging": saved - trained})
    return {name: max(rank[name] for rank in ranks) for name in ("offload", "staging")}


def host_memory(case: Case) -> int:
    """Return the bytes of this process in the memory of the host: resident ones, and those that torch has pinned.

    Memory that the driver allocates, as torch's allocator of pinned memory asks it to, is not resident on all systems:
    a new pinned tensor shows whether it is on this one.
    """
    import torch

    gc.collect()
    process = psutil.Process()
    resident = int(process.memory_info().rss)
    statistics = getattr(device_module(case), "host_memory_stats", None)
    if statistics is None:
        return resident
    probe = torch.ones(_PROBE, dtype=torch.uint8, pin_memory=True)
    counted = process.memory_info().rss - resident > _PROBE // 2
    del probe
    return resident + (0 if counted else int(statistics()["active_bytes.current"]))


def _compare(case: Case, changed: dict[str, Any]) -> Case:
    size = size_for(case, 24)
    if changed:
        size = replace(size, micro_batch=4 * size.micro_batch)
    size, point = _point_of(case, size, changed)
    predicting = start_prediction(point, case) if is_rank_0() else None
    settings = {"fsdp_activation_checkpointing": "checkpointing" in changed}
    measured = measure({**case, "settings": settings}, size) if on_accelerator(case) else {}
    predicted = _output_of(predicting)
    found = {"model": size.name, "point": str(point), "predicted_bytes": predicted, "measured_bytes": measured}
    if not measured:
        expect(predicted["allocated"] > 0, f"{predicted}")
        return {"text": f"predicted: {predicted}", **found}
    errors = {name: round(predicted[name] / measured[name] - 1, 4) for name in FIGURES if predicted.get(name)}
    gb = ", ".join(f"{name} {number / 1e9:.3f} GB" for name, number in measured.items())
    text = f"{size.name}: {gb}; errors of the prediction {errors}"
    expect(abs(errors["allocated"]) <= _ERROR, f"the prediction is not near the peak. {text}")
    return {"text": text, "errors": errors, **found}


def _point_of(case: Case, size: Size, changed: dict[str, Any]) -> tuple[Size, Point]:
    """Return a size with the attention of the device, and the point of the prediction for it."""
    c = size.config
    attention = attention_of(case, size)
    point = Point(
        version=case["version"], strategy=case["strategy"], ranks=case["ranks"], attention=attention,
        precision="no" if case["precision"] == "fp32" else case["precision"],
        prefetch="none",  # as in the config of the checks
        loop=_loop(case),
        batch=size.micro_batch, seq=size.seq_len, layers=c["num_hidden_layers"], hidden=c["hidden_size"],
        inter=c["intermediate_size"], vocab=c["vocab_size"], heads=c["num_attention_heads"],
        kv_heads=c["num_key_value_heads"], **changed,
    )  # fmt: skip
    return replace(size, config={**c, "attn_implementation": attention}), point


def _output_of(predicting: subprocess.Popen[str] | None) -> dict[str, int]:
    """Return what predict.py has printed for rank 0. Collective."""
    output = predicting.communicate(timeout=180) if predicting is not None else ("", "")
    code, (out, err) = broadcast((predicting.returncode if predicting is not None else 0, output))
    expect(code == 0, f"the prediction failed: {err[-1500:]}")
    printed: dict[str, int] = json.loads(out.splitlines()[-1])
    return printed


def _loop(case: Case) -> Any:
    """Return the implementation of AdamW: on GPUs the default of ``TrainingArguments``.

    The fused kernels of other devices may be made of operators whose results take memory.
    """
    if not on_accelerator(case):
        return "for_loop"
    return "fused" if case["device"] == "cuda" else "foreach"


def attention_of(case: Case, size: Size) -> Any:
    """Return ``sdpa`` if the device has a fused kernel for the attention of a model, else ``eager``.

    The estimate of a device assumes a fused kernel. Without one, torch computes ``sdpa`` by its formula, and in bf16
    that keeps copies of queries, keys and values in fp32.
    """
    import torch

    if not on_accelerator(case):
        return "sdpa"
    heads = size.config["num_attention_heads"]
    shape = (size.micro_batch, heads, size.seq_len, size.config["hidden_size"] // heads)
    dtype = torch.float32 if case["precision"] == "fp32" else torch.bfloat16
    states = torch.zeros(shape, device=torch_device(case), dtype=dtype, requires_grad=True)
    attention = torch.nn.functional.scaled_dot_product_attention(states, states, states, is_causal=True)
    return "sdpa" if "ScaledDotProduct" in type(attention.grad_fn).__name__ else "eager"


def measure(case: Case, size: Size) -> dict[str, int]:
    """Train, and return the largest of each figure of the ranks in bytes.

    ``allocated`` and ``reserved`` are peaks of the third step without the workspaces of cuBLAS, which are made first
    and returned as ``workspaces``; ``outside`` is what the driver counts and torch's allocator does not.
    """
    memory, device = device_module(case), torch_device(case)
    memory.synchronize()
    before_workspaces = memory.memory_allocated()
    warm_blas(device)
    gc.collect()
    memory.empty_cache()
    before = {"allocated": memory.memory_allocated(), "reserved": memory.memory_reserved()}
    run = Run(case, size, **{_loop(case): True})
    for _ in range(2):
        run.step()
    memory.synchronize()
    memory.reset_peak_memory_stats()
    run.step()
    memory.synchronize()
    found = {
        "allocated": memory.max_memory_allocated() - before["allocated"],
        "reserved": memory.max_memory_reserved() - before["reserved"],
        "workspaces": before["allocated"] - before_workspaces,
    }
    if hasattr(memory, "mem_get_info"):
        free, total = memory.mem_get_info()
        found |= {"total": total - free, "outside": total - free - memory.memory_reserved()}
    ranks = on_all(found)
    return {name: max(rank[name] for rank in ranks) for name in found}


def warm_blas(device: Any) -> None:
    """Let cuBLAS make its workspaces: one for this thread, one for the thread of the device's backward pass."""
    import torch

    for dtype in (torch.float32, torch.bfloat16):
        matrix = torch.ones(64, 64, device=device, dtype=dtype, requires_grad=True)
        (matrix @ matrix).sum().backward()


def capability(case: Case) -> list[str]:
    """The compute capability of a CUDA device, which decides the size of cuBLAS' workspaces."""
    return [".".join(map(str, device_module(case).get_device_capability()))] if case["device"] == "cuda" else []


def start_prediction(point: Point, case: Case) -> subprocess.Popen[str]:
    """Start predict.py, which runs beside the measurement."""
    set_for_ranks = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    environ = {name: value for name, value in os.environ.items() if name not in set_for_ranks}
    environ = child_environment(environ) | {"CUDA_VISIBLE_DEVICES": ""}
    return subprocess.Popen(
        [sys.executable, "-m", "scripts.bench.gpu_checks.predict", str(point), case["device"], *capability(case)],
        env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
