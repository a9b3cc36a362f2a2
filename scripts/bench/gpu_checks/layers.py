"""Layers of Llama-3-8B at 8,192 tokens: eager, compiled, selective and fp8, against hand-written FSDP2.

The published runs of torchtitan are of eight GPUs, which communicate. One GPU does not, so its share of the peak must
be larger than theirs.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

from scripts.bench.gpu_checks.base import (
    TINY,
    Case,
    Run,
    Size,
    Skipped,
    check,
    device_module,
    device_of,
    expect,
    free_memory,
    llama_3_8b_layers,
    reset_accelerate,
    reset_process,
    torch_device,
)
from scripts.bench.gpu_checks.speed import (
    LEAST_RATIO,
    PlainLoop,
    alternate,
    make_system,
    medians,
    ratio_of,
    why_no_compiler,
)

_COMPILED = {"dynamo_config": {"dynamo_backend": "INDUCTOR", "dynamo_use_regional_compilation": True}}
_FP8 = {"mixed_precision": "fp8", "fp8_config": {"backend": "AO"}}
_SELECTIVE = {"fsdp_activation_checkpointing": "selective"}
MODES: dict[str, Case] = {
    "eager": {},
    "selective": {"settings": _SELECTIVE},
    "compiled": {"top": _COMPILED},
    "compiled selective": {"top": _COMPILED, "settings": _SELECTIVE},
    "fp8 compiled": {"top": {**_COMPILED, **_FP8}},
}
"""Name of a mode -> what it adds to a case."""
_TORCHTITAN = {"selective": 5762, "compiled selective": 6667, "fp8 compiled": 8532}
"""Tokens per second of one of eight H100 (500 W) with Llama-3.1-8B at 8,192 tokens (torchtitan, benchmarks/)."""
_FLOPS_OF_8B = 57.9e9
"""Operations per token of that model at that length, as torchtitan counts them."""
_PEAKS = {"H100": 989e12, "H200": 989e12, "A100": 312e12}
"""Part of a device's name -> dense bf16 operations per second, from its data sheet."""
_PRODUCTS = frozenset({"aten::mm", "aten::addmm", "aten::_scaled_mm"})


@check(seconds=40, limit=240)
def layers(case: Case) -> Case:
    """Compare a mode with hand-written FSDP2: tokens per second, share of the peak, and matrix products of a step.

    A mode that recomputes more than it should has more products than the hand-written loop.
    """
    mode, size = case["mode"], _largest_size(case)
    if "compiled" in mode and (reason := why_no_compiler(case)):
        raise Skipped(f"torch.compile does not work here without this package: {reason}")
    if "fp8" in mode and (reason := _why_no_fp8(case)):
        raise Skipped(reason)
    changed = MODES[mode]
    top = changed.get("top", {})
    if case["device"] != "cuda" and "compiled" in mode:
        top = {**top, "dynamo_config": {**_COMPILED["dynamo_config"], "dynamo_backend": "AOT_EAGER"}}
    case = {**case, "settings": {**case.get("settings", {}), **changed.get("settings", {})}, "top": top}
    device, batches = torch_device(case), size.batches(torch_device(case))
    loops: dict[str, Any] = {}
    for system in ("plugin", "raw"):
        reset_accelerate()  # hooks stay: the loops install and remove them
        loops[system] = (
            make_system(case, system, size)
            if system == "plugin"
            else PlainLoop(case, size.model(device), device, change=partial(_apply, mode, case))
        )
        loops[system].enter()
        for number in range(3):
            loops[system].step(batches[number])
        loops[system].leave()
    counted = partial(_count_products, batch=batches[0], device=device_of(case), compiled="compiled" in mode)
    products = {system: counted(loop) for system, loop in loops.items()}
    expect(products["plugin"] <= products["raw"], f"matrix products of a step: {products}")
    times = alternate(loops, batches, device_of(case), is_tiny=size is TINY)
    loops.clear()
    if "compiled" in mode:
        _reset_compiler()
    return _result(case, mode, size, times, products)


def _result(case: Case, mode: str, size: Size, times: dict[str, list[float]], products: dict[str, int]) -> Case:
    seconds = medians(times)
    tokens = size.micro_batch * size.seq_len
    flops = flops_per_token(size)
    tflops = {system: round(tokens * flops / each / 1e12, 1) for system, each in seconds.items()}
    ratio = ratio_of(times, "raw")
    expect(ratio >= LEAST_RATIO or size is TINY, f"{ratio} times as fast as hand-written FSDP2: {times} s")
    peak = _peak(case)
    share = f", {tflops['plugin'] * 1e12 / peak:.0%} of the peak" if peak else ""
    text = (
        f"{mode}, {size.name}: {tokens / seconds['plugin']:,.0f} tokens/s per GPU, {tflops['plugin']} TFLOP/s{share}; "
    )
    text += (
        f"{ratio:.3f} × hand-written FSDP2; {products['plugin']} matrix products a step, hand-written {products['raw']}"
    )
    if mode in _TORCHTITAN and peak:
        published = _TORCHTITAN[mode] * _FLOPS_OF_8B / 1e12
        place = "above" if tflops["plugin"] > published else "below"
        text += f"; {place} the {published:.0f} TFLOP/s of torchtitan on eight H100, which also communicate"
    return {
        "text": text,
        "mode": mode,
        "model": size.name,
        "tokens_per_second": {system: round(tokens / each, 1) for system, each in seconds.items()},
        "tflop_per_second": tflops,
        "share_of_peak": round(tflops["plugin"] * 1e12 / peak, 4) if peak else None,
        "times_as_fast_as_raw": ratio,
        "products": products,
    }


def flops_per_token(size: Size) -> float:
    """Return the operations of forward and backward per token, without recomputation.

    As torchtitan counts them: six for each parameter except the embeddings, and attention over the whole length.
    """
    c = size.config
    embeddings = c["vocab_size"] * c["hidden_size"]
    return 6.0 * (size.num_params - embeddings) + 12.0 * c["num_hidden_layers"] * c["hidden_size"] * size.seq_len


def _largest_size(case: Case) -> Size:
    """Return the largest number of layers of which two training states and the activations of one fit.

    A layer keeps about 54 bytes per token and hidden element without recomputation, and the loss 12 per token and word.
    """
    free = free_memory(case)
    for count in (8, 6, 4, 2):
        size = llama_3_8b_layers(count)
        c, tokens = size.config, size.micro_batch * size.seq_len
        activations = tokens * (54 * c["hidden_size"] * count + 12 * c["vocab_size"])
        if 28 * size.num_params + activations < 0.9 * free:
            return size
    return TINY


def _peak(case: Case) -> float | None:
    if case["device"] != "cuda":
        return None
    name = device_module(case).get_device_name()
    return next((peak for part, peak in _PEAKS.items() if part in name and "PCIe" not in name), None)


def _why_no_fp8(case: Case) -> str:
    from importlib.util import find_spec

    if find_spec("torchao") is None:
        return "torchao is not installed"
    if case["device"] != "cuda":
        return "not seen: only GPUs multiply in fp8"
    capability = device_module(case).get_device_capability()
    return "" if capability >= (8, 9) else f"compute capability {capability} has no fp8"


def _apply(mode: str, case: Case, model: Any) -> Any:
    """Convert, checkpoint and compile the layers, in the order of torchtitan; then the caller shards them.

    Returns:
        What is called after each optimizer step.
    """
    after_step: Callable[[], Any] = lambda: None  # noqa: E731
    if "fp8" in mode:
        from accelerate.utils.ao import convert_model_to_fp8_ao
        from torchao.float8 import Float8LinearConfig, precompute_float8_dynamic_scale_for_fsdp

        convert_model_to_fp8_ao(model, config=Float8LinearConfig(enable_fsdp_float8_all_gather=True))
        after_step = partial(precompute_float8_dynamic_scale_for_fsdp, model)
    for index, layer in enumerate(model.model.layers):
        if "selective" in mode:
            layer = _checkpointed(layer)
            model.model.layers[index] = layer
        if "compiled" in mode:
            layer.compile(backend="inductor" if case["device"] == "cuda" else "aot_eager")
    return after_step


def _checkpointed(layer: Any) -> Any:
    """Return a layer that keeps every other matrix product and computes the rest again, as torchtitan's layers do."""
    import torch
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    aten = torch.ops.aten
    products = {aten.mm.default, aten.addmm.default, aten._scaled_mm.default}

    def contexts() -> Any:
        seen = [0, 0]  # in the forward, in the recomputation

        def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            if op in products:
                seen[context.is_recompute] += 1
                if seen[context.is_recompute] % 2:
                    return CheckpointPolicy.MUST_SAVE
            return CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy)

    return checkpoint_wrapper(layer, context_fn=contexts, preserve_rng_state=False)


def _count_products(loop: Any, batch: Any, device: Any, *, compiled: bool) -> int:
    """Return the number of matrix products of a step.

    A dispatch mode does not see products inside of compiled code, and a profiler counts products whose result selective
    checkpointing has kept.
    """
    from torch.profiler import ProfilerActivity, profile

    loop.enter()
    if compiled:
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            loop.step(batch)
            device.synchronize()
        loop.leave()
        return sum(event.count for event in profiler.key_averages() if event.key in _PRODUCTS)
    with product_counter() as counter:
        loop.step(batch)
    loop.leave()
    return counter.count


def product_counter() -> Any:
    """Return a dispatch mode whose ``count`` is the number of matrix products that ran in its block."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    aten = torch.ops.aten
    products = {aten.mm.default, aten.addmm.default, aten._scaled_mm.default}

    class ProductCounter(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.count += func in products
            return func(*args, **(kwargs or {}))

    return ProductCounter()


def _reset_compiler() -> None:
    import torch

    torch.compiler.reset()


@check(seconds=10, limit=120)
def host_time(case: Case) -> Case:
    """Time the host's work for each unit: steps that are too small for the device, against hand-written FSDP."""
    size = TINY if free_memory(case) < 12e9 else TINY.with_layers(32, micro_batch=1, seq=128)
    batches = size.batches(torch_device(case))
    loops: dict[str, Any] = {}
    for system in ("plugin", "raw"):
        reset_accelerate()
        loops[system] = make_system(case, system, size)
        loops[system].enter()
        for number in range(5):
            loops[system].step(batches[number % len(batches)])
        loops[system].leave()
    times = alternate(loops, batches, device_of(case), is_tiny=size is TINY)
    seconds = medians(times)
    units = size.config["num_hidden_layers"] + 3
    added = statistics.median(a - b for a, b in zip(times["plugin"], times["raw"], strict=True)) / units * 1e6
    ratio = ratio_of(times, "raw")
    expect(
        ratio > 0.75 or size is TINY,
        f"{1e3 * seconds['plugin']:.1f} ms a step, hand-written {1e3 * seconds['raw']:.1f} ms",
    )
    text = f"{1e3 * seconds['plugin']:.1f} ms a step of {units} units, hand-written {1e3 * seconds['raw']:.1f} ms: "
    text += f"{added:+.0f} µs a unit"
    return {"text": text, "step_seconds": seconds, "added_microseconds_per_unit": round(added, 1)}


@check(seconds=12, limit=240)
def parity(case: Case) -> Case:
    """Train 50 steps (20 without CUDA) here and with hand-written FSDP: the losses of each step must be equal.

    Without clipping, whose sums have another order here: bf16 makes more of the last bit of a norm.
    """
    device, num_steps = torch_device(case), 50 if case["device"] == "cuda" else 20
    run = Run(case)
    batches = TINY.batches(device, 8)
    losses = {"plugin": [run.step(batches[number % 8], clip=False) for number in range(num_steps)]}
    del run
    reset_process()
    plain = PlainLoop(case, TINY.model(), device, lr=Run.LEARNING_RATE)
    losses["raw"] = [float(plain.step(batches[number % 8], clip=False)) for number in range(num_steps)]
    differences = [abs(a / b - 1) for a, b in zip(losses["plugin"], losses["raw"], strict=True)]
    largest = max(differences)
    first = next((number for number, each in enumerate(differences, 1) if each > 1e-6), None)
    expect(first is None, f"losses differ by {largest:.1e} from those of hand-written FSDP, first in step {first}")
    expect(losses["raw"][-1] < losses["raw"][0], f"the loss did not fall: {losses['raw']}")
    text = f"{num_steps} losses from {losses['raw'][0]:.4f} to {losses['raw'][-1]:.4f} differ by at most {largest:.0e}"
    return {"text": text, "largest_difference": largest, "losses": losses["plugin"][::7]}
