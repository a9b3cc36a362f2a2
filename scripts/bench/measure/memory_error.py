"""Compare predicted memory with the peak of what torch's allocator holds in real training steps on real ranks.

The predictions are computed first, in a process of their own, which knows nothing of the measurements. Then each point
is trained on forked gloo ranks through the plugin's Accelerator. The peak of a step is exact: `allocator/` counts every
allocation and free on every thread. The steps from the second on are measured. A thread of gloo may free the buffer of
a collective a moment after the collective has returned, so that some steps need that buffer in addition: the result is
the smallest peak of a rank's steps, and the largest of all ranks. The largest peak of any step is in the file as well.

    python -m scripts.bench memory_error        (seven minutes on 2 cores; writes docs/results/memory_error.json)
    python -m scripts.bench memory_error --points family=bert,seq=512 version=1,precision=bf16,hidden=512
    python -m scripts.bench memory_error --only mixtral --out /tmp/error.json
    python -m scripts.bench memory_error --random 20 --seed 1 --out /tmp/error.json     random settings
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from scripts.bench.allocator import NoCounter, restart_with_counter
from scripts.bench.common import child_environment, free_port, make_parser
from scripts.bench.measure.memory_points import (
    POINTS,
    Point,
    make_model,
    make_spec,
    make_workload,
    measure,
    parse_point,
    random_point,
)
from scripts.bench.tables.update_results import write_result

STEPS = 3
"""Measured steps of each point."""
_LIMIT = 300.0


def parse_points(name: str, points: Sequence[Point], description: str | None) -> tuple[argparse.Namespace, list[Point]]:
    """Return the arguments of a comparison, and its points."""
    parser = make_parser(description, name)
    parser.add_argument("--points", nargs="*", help="points instead of those of the table, as key=value,key=value")
    parser.add_argument("--only", default="", help="only points whose text contains this")
    parser.add_argument("--random", type=int, default=0, help="this many random points instead of those of the table")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--predict", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    numbers = random.Random(args.seed)
    chosen = [parse_point(text) for text in args.points] if args.points else list(points)
    if args.random:
        chosen = [random_point(numbers) for _ in range(args.random)]
    return args, [point for point in chosen if args.only in str(point)]


def predict(point: Point, device: str) -> dict[str, Any]:
    """Return the predicted peak in bytes, its place, and how long this took; empty if the settings are refused."""
    import torch

    import hf_fsdp_plugin as hfp
    from hf_fsdp_plugin.tools.plan.estimate.memory.peak import estimate_memory

    start = time.perf_counter()
    try:
        with torch.device("meta"):
            model = make_model(point)
        spec = make_spec(point, use_cpu=device == "cpu")
        plan = hfp.resolve(spec, model, world_size=point.ranks, device_type=device)
        peak = estimate_memory(plan, model, make_workload(point)).peak
    except hfp.SpecError as error:  # of random settings
        print(point, error, flush=True)
        return {}
    seconds = round(time.perf_counter() - start, 2)
    return {"closed_form": {"bytes": peak.bytes, "at": peak.where, "seconds": seconds}}


def predictions(points: list[Point], script: str, environ: Mapping[str, str] = os.environ) -> list[dict[str, Any]]:
    """Return the predictions for all points, from a process of their own."""
    with tempfile.TemporaryDirectory(prefix="predictions_") as folder:
        out = Path(folder) / "predictions.json"
        command = [sys.executable, script, "--predict", str(out), "--points", *map(str, points)]
        subprocess.run(command, check=True, env=environ)
        found: list[dict[str, Any]] = json.loads(out.read_text())
        return found


def make_row(point: Point, predicted: dict[str, Any], measured: int, **more: int) -> dict[str, Any]:
    errors = {name: round(found["bytes"] / measured - 1, 5) for name, found in predicted.items()}
    print(point, f"{measured:,}", {name: f"{error:+.2%}" for name, error in errors.items()}, flush=True)
    return {"point": str(point), "measured_bytes": measured, **more, "predicted": predicted, "error": errors}


def write(name: str, out: Path, rows: list[dict[str, Any]]) -> None:
    errors = [row["error"]["closed_form"] for row in rows]
    summary = {"closed_form": {"median": statistics.median(map(abs, errors)), "worst": max(errors, key=abs)}}
    command = f"python -m scripts.bench {name}" + "".join(f" {word}" for word in sys.argv[1:])
    write_result(name, out, {"command": command, "summary": summary, "points": rows})


def measured(point: Point) -> list[list[int]]:
    """Return the peaks of each rank's steps."""
    from scripts.bench.ranks.forked import World

    os.environ["MASTER_PORT"] = str(free_port())
    ranks = range(point.ranks)
    with tempfile.TemporaryDirectory(prefix="memory_error_") as name:
        os.chdir(name)  # the plugin writes its report into the current folder
        try:
            with closing(World.fork(measure, Path(name) / "log", point, STEPS, world_size=point.ranks)) as world:
                world.until(lambda: all(world.last("peaks", rank) is not None for rank in ranks), _LIMIT)
                return [world.last("peaks", rank) for rank in ranks]
        finally:
            os.chdir("/")


def main() -> int:
    args, points = parse_points("memory_error", POINTS, __doc__)
    out = args.out.resolve()
    if args.predict:
        args.predict.write_text(json.dumps([predict(point, "cpu") for point in points]))
        return 0
    try:
        # Points with 4-bit weights need bitsandbytes, which scripts/environment.sh installs beside the environment.
        os.environ.update(child_environment(os.environ, Path(sys.prefix, "libraries")))
        restart_with_counter()
    except NoCounter as error:
        raise SystemExit(str(error)) from error
    found = predictions(points, __file__)
    from scripts.bench.ranks.forked import preload

    preload()
    import transformers  # noqa: F401

    rows = []
    for point, predicted in zip(points, found, strict=True):
        if predicted:
            peaks = measured(point)
            rows.append(make_row(point, predicted, max(map(min, peaks)), largest_bytes=max(map(max, peaks))))
    write("memory_error", out, rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
