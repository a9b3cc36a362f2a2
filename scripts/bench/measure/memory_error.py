"""Compare predicted memory with the peak of what torch's allocator holds in real training steps on real ranks.

The predictions are computed first, in a process of their own, which knows nothing of the measurements. Then each point
is trained on forked gloo ranks through the plugin's Accelerator. The peak of a step is exact: `allocator/` counts every
allocation and free on every thread. The steps from the second on are measured. A thread of gloo may free the buffer of
a collective a moment after the collective has returned, so that some steps need that buffer in addition: the result is
the smallest peak of a rank's steps, and the largest of all ranks. The largest peak of any step is in the file as well.

    python -m scripts.bench memory_error        (seven minutes on 2 cores; writes docs/results/memory_error.json)
    python -m scripts.bench memory_error --points family=bert,seq=512 version=1,precision=bf16,hidden=512
    python -m scripts.bench memory_error --only mixtral --out /tmp/error.json
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import Any

from scripts.bench.allocator import NoCounter, restart_with_counter
from scripts.bench.common import child_environment, make_parser
from scripts.bench.measure.memory_points import (
    POINTS,
    Point,
    make_model,
    make_spec,
    make_workload,
    measure,
    parse_point,
)
from scripts.bench.tables.update_results import write_result

STEPS = 3
"""Measured steps of each point."""
_LIMIT = 300.0


def parse_args() -> argparse.Namespace:
    parser = make_parser(__doc__, "memory_error")
    parser.add_argument("--points", nargs="*", help="points instead of those of the table, as key=value,key=value")
    parser.add_argument("--only", default="", help="only points whose text contains this")
    parser.add_argument("--predict", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def predict(point: Point) -> dict[str, Any]:
    """Return the peaks that the methods predict, in bytes, and how long this took."""
    import torch

    import hf_fsdp_plugin as hfp
    from hf_fsdp_plugin.tools.plan.estimate.memory.peak import estimate_memory
    from scripts.bench.traced_memory import CannotTrace, trace_memory

    with torch.device("meta"):
        model = make_model(point)
    plan = hfp.resolve(make_spec(point), model, world_size=point.ranks, device_type="cpu")
    workload = make_workload(point)
    methods: dict[str, Any] = {"traced": trace_memory, "closed_form": estimate_memory}
    if plan.mesh.has_model_axes:  # a trace has whole layers and sequences
        del methods["traced"]
    found: dict[str, Any] = {}
    for name, method in methods.items():
        start = time.perf_counter()
        try:
            peak = method(plan, model, workload).peak
        except (hfp.SpecError, CannotTrace) as error:  # such as an optimizer that reads values of tensors
            print(point, name, error, flush=True)
            continue
        found[name] = {"bytes": peak.bytes, "at": peak.where, "seconds": round(time.perf_counter() - start, 2)}
    return found


def predictions(points: list[Point]) -> list[dict[str, Any]]:
    """Return the predictions for all points, from a process of their own."""
    with tempfile.TemporaryDirectory(prefix="memory_error_") as folder:
        out = Path(folder) / "predictions.json"
        command = [sys.executable, __file__, "--predict", str(out), "--points", *map(str, points)]
        subprocess.run(command, check=True)
        found: list[dict[str, Any]] = json.loads(out.read_text())
        return found


def measured(point: Point) -> list[list[int]]:
    """Return the peaks of each rank's steps."""
    from scripts.bench.ranks.forked import World

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        os.environ["MASTER_PORT"] = str(free.getsockname()[1])
    ranks = range(point.ranks)
    with tempfile.TemporaryDirectory(prefix="memory_error_") as name:
        os.chdir(name)  # the plugin writes its report into the current folder
        try:
            with closing(World.fork(measure, Path(name) / "log", point, STEPS, world_size=point.ranks)) as world:
                world.until(lambda: all(world.last("peaks", rank) is not None for rank in ranks), _LIMIT)
                return [world.last("peaks", rank) for rank in ranks]
        finally:
            os.chdir("/")


def row(point: Point, predicted: dict[str, Any]) -> dict[str, Any]:
    peaks = measured(point)
    real = max(min(steps) for steps in peaks)
    errors = {name: round(found["bytes"] / real - 1, 5) for name, found in predicted.items()}
    print(point, f"{real:,}", {name: f"{error:+.2%}" for name, error in errors.items()}, flush=True)
    return {
        "point": str(point), "measured_bytes": real, "largest_bytes": max(map(max, peaks)), "predicted": predicted,
        "error": errors,
    }  # fmt: skip


def main() -> int:
    args = parse_args()
    points = [parse_point(text) for text in args.points] if args.points else list(POINTS)
    points = [point for point in points if args.only in str(point)]
    if args.predict:
        args.predict.write_text(json.dumps([predict(point) for point in points]))
        return 0
    try:
        # Points with 4-bit weights need bitsandbytes, which scripts/environment.sh installs beside the environment.
        os.environ.update(child_environment(os.environ, Path(sys.prefix, "libraries")))
        restart_with_counter()
    except NoCounter as error:
        raise SystemExit(str(error)) from error
    found = predictions(points)
    from scripts.bench.ranks.forked import preload

    preload()
    import transformers  # noqa: F401

    rows = [row(point, predicted) for point, predicted in zip(points, found, strict=True)]
    summary = {
        name: {
            "median": statistics.median(map(abs, found)),
            "worst": max(found, key=abs),
        }
        for name in ("traced", "closed_form")
        if (found := [each["error"][name] for each in rows if name in each["error"]])
    }
    command = "python -m scripts.bench memory_error" + "".join(f" {word}" for word in sys.argv[1:])
    write_result("memory_error", args.out.resolve(), {"command": command, "summary": summary, "points": rows})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
