"""Compare predicted memory with the counter of an accelerator: the simulated one of the tests, on two ranks.

Its counter rounds each allocation as torch's CUDA allocator does, and does not see temporary memory of kernels. Each
point is predicted first, in a process that measures nothing. The second and third step are measured; the result is the
largest peak of the ranks' smallest ones, as in memory_error.py. Attention is eager at all points: the simulated device
computes ``scaled_dot_product_attention`` by its formula, for which the estimate of a device assumes a fused kernel.

    python -m scripts.bench memory_on_device           (four minutes on 2 cores; docs/results/memory_on_device.json)
    python -m scripts.bench memory_on_device --points version=1,precision=bf16
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from scripts.bench.common import child_environment, run_two_ranks
from scripts.bench.measure.memory_error import make_row, parse_points, predict, predictions, write
from scripts.bench.measure.memory_points import Point, make_model, make_optimizers, make_spec, train_step

DEVICE = "npu"
STEPS = 2
_TOKENS = Point(attention="eager")
"""Activations need most of the memory."""
_WIDE = replace(_TOKENS, hidden=512, inter=1536, seq=64)
"""Parameters, gradients and the optimizer need most of the memory."""
POINTS = (
    _TOKENS,
    replace(_TOKENS, version=1),
    replace(_TOKENS, precision="bf16"),
    replace(_TOKENS, version=1, precision="bf16"),
    replace(_TOKENS, checkpointing=True),
    replace(_TOKENS, version=1, checkpointing=True, precision="bf16", batch=8),
    replace(_TOKENS, checkpointing=True, offload_activations=True, batch=8),
    replace(_TOKENS, version=1, checkpointing=True, offload_activations=True, batch=8),
    replace(_TOKENS, accumulation=2, precision="bf16"),
    replace(_WIDE, offload_params=True),
    replace(_WIDE, offload_params=True, precision="bf16", checkpointing=True),
    replace(_WIDE, offload_params=True, strategy="no_shard"),
    replace(_WIDE, version=1, offload_params=True),
    replace(_WIDE, version=1, offload_params=True, precision="bf16"),
    replace(_WIDE, version=1, offload_params=True, strategy="shard_grad_op"),
    replace(_WIDE, strategy="shard_grad_op", loop="foreach"),
    replace(_WIDE, version=1, strategy="shard_grad_op", precision="bf16"),
    replace(_TOKENS, family="gpt2", precision="bf16"),
    replace(_TOKENS, family="bert", version=1, checkpointing=True, loop="fused"),
)


def main() -> int:
    args, points = parse_points("memory_on_device", POINTS, __doc__)
    if args.predict:
        args.predict.write_text(json.dumps([predict(point, DEVICE) for point in points]))
        return 0
    if args.measure:
        measure_all(points, args.measure)
        return 0
    from tests.accelerator.accelerator_build import BACKEND, available

    if reason := available():
        print(f"The simulated accelerator cannot be built: {reason}.", file=sys.stderr)
        return 1
    environ = child_environment(os.environ, BACKEND)
    predicted = predictions(points, __file__, environ)
    with tempfile.TemporaryDirectory(prefix="memory_on_device_") as folder:
        measured = Path(folder) / "measured.json"
        if run_two_ranks(__file__, ["--measure", str(measured), "--points", *map(str, points)], environ) != 0:
            return 1
        peaks = json.loads(measured.read_text())
    write("memory_on_device", args.out.resolve(), list(map(make_row, points, predicted, peaks)))
    return 0


def measure_all(points: list[Point], out: Path) -> None:
    """Write the measured peak of each point in bytes."""
    import gc

    import torch.distributed as dist
    from accelerate.state import AcceleratorState, GradientState

    peaks = []
    for point in points:
        own = measure(point)
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, own)
        peaks.append(max(every))
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        gc.collect()
    if dist.get_rank() == 0:
        out.write_text(json.dumps(peaks))
    dist.barrier()
    dist.destroy_process_group()


def measure(point: Point) -> int:
    """Train, and return the smallest peak of this rank's steps from the second on, above what was allocated before."""
    import gc

    import torch

    import hf_fsdp_plugin as hfp
    from hf_fsdp_plugin.tools.plan.estimate.memory.meta_pass import meta_batch

    accelerator = hfp.accelerator(make_spec(point, use_cpu=False), gradient_accumulation_steps=point.accumulation)
    memory = torch.get_device_module(DEVICE)
    gc.collect()
    before = memory.memory_allocated()
    model = make_model(point)
    shapes = meta_batch(model, micro_batch=point.batch, seq_len=point.seq)
    optimizers = make_optimizers(model, point, DEVICE)
    model, *optimizers = accelerator.prepare(model.train(), *optimizers)
    generator = torch.Generator().manual_seed(1 + accelerator.process_index)
    peaks = []
    for _ in range(1 + STEPS):
        memory.reset_peak_memory_stats()
        train_step(point, accelerator, model, optimizers, shapes, generator)
        peaks.append(memory.max_memory_allocated() - before)
        accelerator.wait_for_everyone()
    return min(peaks[1:])


if __name__ == "__main__":
    raise SystemExit(main())
