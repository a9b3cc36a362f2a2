"""Steps: whether the host waits for the device in them, and their time against stock Accelerate and plain torch."""

from __future__ import annotations

import gc
import statistics
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from scripts.bench.gpu_checks.base import (
    TINY,
    Case,
    Size,
    Skipped,
    check,
    device_module,
    device_of,
    expect,
    on_accelerator,
    on_all,
    reset_accelerate,
    size_for,
    spec_of,
    torch_device,
)

LEAST_RATIO = 0.9
"""Tokens per second over those of another system below which a check fails, unless the model is tiny."""


def make_system(case: Case, system: str, size: Size) -> Any:
    """Return the training loop of this package, of stock Accelerate or of plain torch (``raw``)."""
    from hf_fsdp_plugin.tools.bench import cases as bench
    from hf_fsdp_plugin.tools.bench.rank import make_loop

    device = torch_device(case)
    if system == "raw":
        return PlainLoop(case, size.model(device), device)
    one = bench.Case(world_size=case["ranks"], strategy=case["strategy"], version=case["version"], system=system)  # type: ignore[arg-type]
    return make_loop(one, spec_of(case), size.model(device), device)


class PlainLoop:
    """The training loop of plain torch, with the units and settings of the plan. Collective.

    Args:
        change: changes the model before it is sharded, and returns what is called after each optimizer step.
        lr: learning rate; that of the other loops by default.
    """

    def __init__(
        self, case: Case, model: Any, device: Any, change: Callable[[Any], Any] | None = None, lr: float | None = None
    ) -> None:
        import torch

        from hf_fsdp_plugin.plan.resolve import resolve
        from hf_fsdp_plugin.tools.bench.rank import LEARNING_RATE

        plan = resolve(spec_of(case), model, world_size=case["ranks"], device_type=device.type)
        self._after_step = None if change is None else change(model)
        self.model = _fsdp1(plan, model, device) if plan.version == 1 else _fsdp2(plan, model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr or LEARNING_RATE)
        self.clips_itself = plan.version == 1

    def step(self, batch: Any, *, clip: bool = True) -> Any:
        import torch

        from hf_fsdp_plugin.tools.bench.rank import MAX_GRAD_NORM

        loss = self.model(**batch).loss
        loss.backward()
        if clip and self.clips_itself:
            self.model.clip_grad_norm_(MAX_GRAD_NORM)
        elif clip:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_GRAD_NORM)
        self.optimizer.step()
        if self._after_step is not None:
            self._after_step()
        self.optimizer.zero_grad()
        return loss.detach()

    def enter(self) -> None:
        from hf_fsdp_plugin.integrations.patching import changes

        changes().remove()

    def leave(self) -> None:
        """Leave nothing: plain torch has no state of the process."""


def _fsdp2(plan: Any, model: Any) -> Any:
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    from hf_fsdp_plugin.plan.fsdp_plan import torch_dtype

    casts = {f"{name}_dtype": torch_dtype(getattr(plan.precision, name)) for name in ("param", "reduce")}
    last = MixedPrecisionPolicy(**casts, output_dtype=torch_dtype(plan.precision.output))
    offload = CPUOffloadPolicy(pin_memory=plan.pin_memory) if plan.offload_params else OffloadPolicy()
    options: dict[str, Any] = {"mesh": _mesh(plan), "offload_policy": offload}
    for unit in plan.units:
        modules = [model.get_submodule(name) for name in unit.modules]
        policy = last if unit.modules == ("",) else MixedPrecisionPolicy(**casts)
        fully_shard(modules, reshard_after_forward=unit.reshard_after_forward, mp_policy=policy, **options)
    if plan.units[-1].modules != ("",):
        fully_shard(model, mp_policy=last, **options)
    return model


def _fsdp1(plan: Any, model: Any, device: Any) -> Any:
    from torch.distributed.fsdp import (
        BackwardPrefetch,
        CPUOffload,
        FullyShardedDataParallel,
        MixedPrecision,
        ShardingStrategy,
    )
    from torch.distributed.fsdp.wrap import CustomPolicy

    from hf_fsdp_plugin.plan.fsdp_plan import torch_dtype
    from hf_fsdp_plugin.strategies import STRATEGIES

    wrapped = {id(model.get_submodule(name)) for unit in plan.units for name in unit.modules if name}
    casts = {f"{name}_dtype": torch_dtype(getattr(plan.precision, name)) for name in ("param", "reduce", "buffer")}
    changes = plan.precision.param != "unchanged" or plan.precision.buffer != "unchanged"
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=CustomPolicy(lambda module: id(module) in wrapped),
        sharding_strategy=ShardingStrategy[STRATEGIES[plan.strategy].torch_name],
        device_mesh=_mesh(plan) if STRATEGIES[plan.strategy].is_sharded else None,
        cpu_offload=CPUOffload(offload_params=plan.offload_params and device.type != "cpu"),
        mixed_precision=MixedPrecision(**casts) if changes else None,
        backward_prefetch={
            "pre": BackwardPrefetch.BACKWARD_PRE, "post": BackwardPrefetch.BACKWARD_POST, "none": None,
        }[plan.prefetch.backward],
        forward_prefetch=plan.prefetch.forward,
        limit_all_gathers=plan.prefetch.limit_all_gathers,
        use_orig_params=plan.use_orig,
        device_id=device,
    )  # fmt: skip


def _mesh(plan: Any) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    from hf_fsdp_plugin.strategies import STRATEGIES

    strategy = STRATEGIES[plan.strategy]
    if strategy.is_sharded and not strategy.hybrid:
        return init_device_mesh(plan.device_type, (plan.mesh.shard,))
    sizes = (plan.mesh.replicate, plan.mesh.shard)
    return init_device_mesh(plan.device_type, sizes, mesh_dim_names=("replicate", "shard"))


# ---- host waits -----------------------------------------------------------------------------------------------------


@check(seconds=8)
def sync_free_steps(case: Case) -> Case:
    """Count host waits of steps, with stock Accelerate and with this package, in one process.

    On CUDA, torch's debug mode of synchronizing operations counts them (not waits for events, nor collectives). Where
    stock has none, a step of this package also runs in the mode ``error``. The first steps count too, because this
    package observes them.
    """
    import torch

    if not on_accelerator(case):
        raise Skipped("the host waits for accelerators only")
    if case["device"] != "cuda" and not hasattr(sys.modules.get("torch_npu"), "HostWaits"):
        raise Skipped(f"not seen: torch.{case['device']} does not list synchronizing operations")
    found: dict[str, list[list[str]]] = {}
    for system in ("stock", "plugin"):
        reset_accelerate()  # hooks stay: the loops install and remove them
        loop = make_system(case, system, TINY)
        batch = TINY.batches(torch_device(case), 1)[0]
        # Without a mask of four dimensions, Transformers reads a value to find packed sequences (masking_utils.py).
        mask = torch.ones(TINY.seq_len, TINY.seq_len, dtype=torch.bool, device=torch_device(case)).tril()
        batch["attention_mask"] = mask.expand(TINY.micro_batch, 1, -1, -1)
        loop.enter()
        found[system] = [waits_of(case, lambda loop=loop, batch=batch: loop.step(batch)) for _ in range(5)]
    counts = {system: list(map(len, steps)) for system, steps in found.items()}
    more = [a > b for a, b in zip(counts["plugin"], counts["stock"], strict=True)]
    added = Counter(place for step in found["plugin"] for place in step)
    added -= Counter(place for step in found["stock"] for place in step)
    places = "; ".join(f"{count} × {place}" for place, count in added.most_common(5))
    expect(not any(more), f"waits in each step: {counts}, at {places}")
    if case["device"] == "cuda" and not any(found["stock"]):
        with sync_mode("error"):
            loop.step(batch)
    text = f"host waits in steps 1 to 5: {counts['plugin']}, stock Accelerate {counts['stock']}"
    return {"text": text, "waits": counts, "places": sorted({place for step in found["plugin"] for place in step})}


def waits_of(case: Case, run: Callable[[], Any]) -> list[str]:
    """Call a function, and return the place of each host wait."""
    if case["device"] != "cuda":
        import torch_npu  # the simulated accelerator, the only other device that lists waits

        with torch_npu.HostWaits() as waits:
            run()
        return [" < ".join(wait.stack.split(" < ")[:3]) for wait in waits.events if "threading.py" not in wait.stack]
    with sync_mode("warn"), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    return [f"{each.filename}:{each.lineno}" for each in caught if "synchronizing CUDA" in str(each.message)]


@contextmanager
def sync_mode(mode: str) -> Iterator[None]:
    import torch

    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode(mode)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


# ---- throughput -----------------------------------------------------------------------------------------------------


@check(seconds=30, limit=200)
def throughput(case: Case) -> Case:
    """Compare tokens per second with stock Accelerate and plain torch: the same model, batches and settings.

    All systems are built in one process, and their blocks of steps alternate.
    """
    from hf_fsdp_plugin.tools.bench import cases as bench

    # Each system holds weights and optimizer state (12 bytes), one of them gradients and temporary memory (16).
    size, device = size_for(case, 3 * 12 + 16), device_of(case)
    one = bench.Case(world_size=case["ranks"], strategy=case["strategy"], version=case["version"])
    systems = ["plugin", *(["stock"] if not bench.why_not_in_stock(one, case["device"]) else []), "raw"]
    batches = size.batches(torch_device(case))
    loops: dict[str, Any] = {}
    peaks: dict[str, int] = {}
    losses: dict[str, float] = {}
    for system in systems:
        reset_accelerate()  # hooks stay: the loops install and remove them
        held = _held_memory(case)
        loops[system] = make_system(case, system, size)
        loops[system].enter()
        for number in range(3):
            if on_accelerator(case):
                device_module(case).reset_peak_memory_stats()
            losses[system] = float(loops[system].step(batches[number]))
        device.synchronize()
        if on_accelerator(case):
            peaks[system] = max(on_all(device_module(case).max_memory_allocated() - held))
        loops[system].leave()
    expect(max(losses.values()) - min(losses.values()) < 0.05, f"losses of step 3: {losses}")
    times = alternate(loops, batches, device, is_tiny=size is TINY)
    tokens = size.micro_batch * size.seq_len * case["ranks"]
    rates = {system: round(tokens / seconds, 1) for system, seconds in medians(times).items()}
    ratios = {other: ratio_of(times, other) for other in systems[1:]}
    tflops = round(6 * size.num_params * rates["plugin"] / case["ranks"] / 1e12, 1)
    slow = [other for other, ratio in ratios.items() if ratio < LEAST_RATIO and size is not TINY]
    expect(not slow, f"slower than {slow}: {rates} tokens/s")
    compared = "; ".join(f"{ratio:.3f} × {other}" for other, ratio in ratios.items())
    return {
        "text": f"{size.name}: {rates['plugin']:,.0f} tokens/s, {compared}; {tflops} TFLOP/s per GPU",
        "model": size.name,
        "tokens_per_second": rates,
        "times_as_fast_as": ratios,
        "tflop_per_second": tflops,
        "peak_bytes": peaks,
        "third_losses": {system: round(loss, 4) for system, loss in losses.items()},
    }


def _held_memory(case: Case) -> int:
    """Return unused memory to the accelerator, and return the bytes that tensors hold; 0 on the CPU."""
    gc.collect()
    if not on_accelerator(case):
        return 0
    device_module(case).empty_cache()
    return int(device_module(case).memory_allocated())


def alternate(loops: dict[str, Any], batches: list[Case], device: Any, *, is_tiny: bool) -> dict[str, list[float]]:
    """Let blocks of steps of several loops alternate, and return the seconds of a step in each block."""
    times: dict[str, list[float]] = {system: [] for system in loops}
    num_blocks, num_steps = (2, 2) if is_tiny else (5, 4)
    for block in range(num_blocks):
        for system in loops if block % 2 == 0 else reversed(loops):
            times[system].append(_time_of_step(loops[system], batches, num_steps, device))
    return times


def medians(times: dict[str, list[float]]) -> dict[str, float]:
    return {system: statistics.median(found) for system, found in times.items()}


def ratio_of(times: dict[str, list[float]], other: str) -> float:
    """Return how many times as fast as another system this package is: the median over the blocks."""
    return round(statistics.median(b / a for a, b in zip(times["plugin"], times[other], strict=True)), 4)


def _time_of_step(loop: Any, batches: list[dict[str, Any]], num_steps: int, device: Any) -> float:
    """Return the seconds of a step, of the slowest rank, from a block of steps."""
    loop.enter()
    device.synchronize()
    start = time.perf_counter()
    for number in range(num_steps):
        loop.step(batches[number % len(batches)])
    device.synchronize()
    elapsed = time.perf_counter() - start
    loop.leave()
    return max(on_all(elapsed)) / num_steps


@check(seconds=10, min_ranks=2)
def nccl(case: Case) -> Case:
    """Measure an all-gather and a reduce-scatter of 1 GB (64 MB on CPU ranks) on all ranks."""
    import torch
    import torch.distributed as dist

    device = torch_device(case)
    num_bytes = (1 << 30) if case["device"] == "cuda" else (1 << 26)
    whole = torch.ones(num_bytes // 4, device=device)
    part = torch.empty(whole.numel() // case["ranks"], device=device)
    calls = {
        "all_gather": lambda: dist.all_gather_into_tensor(whole, part.fill_(1)),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole),
    }
    rates = {}
    for name, call in calls.items():
        call()
        device_of(case).synchronize()
        dist.barrier()
        start = time.perf_counter()
        for _ in range(5):
            call()
        device_of(case).synchronize()
        elapsed = max(on_all(time.perf_counter() - start)) / 5
        # Bus bandwidth, as in nccl-tests: what each rank sends.
        rates[name] = round(num_bytes * (case["ranks"] - 1) / case["ranks"] / elapsed / 1e9, 2)
        expect(float(whole[-1]) == 1.0, f"{name}: wrong values")
    version = ".".join(map(str, device_module(case).nccl.version())) if case["device"] == "cuda" else ""
    text = f"{dist.get_backend_config()} {version}: {', '.join(f'{name} {rate} GB/s' for name, rate in rates.items())}"
    return {"text": text, "gb_per_second": rates, "nccl": version}


def why_no_compiler(case: Case) -> str:
    """Return why inductor cannot compile a kernel here: it needs a C compiler and the headers of Python."""
    import torch

    if case["device"] != "cuda":
        return ""
    function = torch.compile(lambda x: torch.sin(x) * 2 + 1)
    try:
        function(torch.ones(1024, device=torch.device("cuda", torch.cuda.current_device()))).sum().item()
    except Exception as error:  # of inductor, triton or the compiler
        return " ".join(f"{type(error).__name__}: {error}".split())[:300]
    return ""
