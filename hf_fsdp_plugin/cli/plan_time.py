"""The options of ``hf-fsdp plan`` for time: machine, calibration and scaling, and the text of their results."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any, Final

from hf_fsdp_plugin.cli.exit_codes import OK
from hf_fsdp_plugin.cli.output import print_json
from hf_fsdp_plugin.problems import Problem, SpecError
from hf_fsdp_plugin.text import format_table, plural, printable

if TYPE_CHECKING:
    from hf_fsdp_plugin.cli.plan_subject import Planned
    from hf_fsdp_plugin.estimate.results import TimeEstimate
    from hf_fsdp_plugin.estimate.time import ScalingRow, TimeModel

FLAGS: Final = frozenset({"machine", "calibrate", "scaling"})
SCALING_WORLDS: Final = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)


def add_time_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("time")
    group.add_argument(
        "--machine",
        metavar="NAME|FILE",
        help="predict the time of a step on a100-40gb, a100-80gb, h100-sxm, h100-pcie, h100-96gb-500w, h200, "
        "b200, or with another network, as h100-sxm:efa-3200; `calibrated` for the present machine",
    )
    group.add_argument(
        "--calibrate", action="store_true", help="measure the present machine with --world-size ranks, and stop"
    )
    group.add_argument("--scaling", action="store_true", help="also print the time on 8 to 4,096 ranks of --machine")


def calibrate_verb(args: argparse.Namespace, num_ranks: int) -> int:
    """Measure the present machine and store its figures. Returns 0."""
    from hf_fsdp_plugin.devices import accelerator_type
    from hf_fsdp_plugin.estimate.calibration_ranks import calibrate_ranks
    from hf_fsdp_plugin.estimate.machine_file import calibration_path

    path = calibration_path()
    machine = calibrate_ranks(num_ranks, args.device or accelerator_type() or "cpu", path)
    if args.json:
        print_json({"ok": True, "machine": machine.label, "file": str(path), "ranks": num_ranks})
    else:
        print(f"{machine.label}\nMeasured with {plural(num_ranks, 'rank')} at work. Use it with --machine calibrated.")
        print(printable(f"written: {path}"))
    return OK


def time_json(estimate: TimeEstimate | None, rows: list[ScalingRow]) -> dict[str, Any]:
    """Return the keys of ``plan --json`` for time; null without a machine."""
    if estimate is None:
        return {"step_seconds": None, "tokens_per_second": None, "machine": None, "time": None, "scaling": []}
    return {
        "step_seconds": estimate.step_seconds,
        "tokens_per_second": estimate.tokens_per_second,
        "machine": estimate.machine,
        "time": {
            "low_seconds": estimate.low_seconds,
            "high_seconds": estimate.high_seconds,
            "evidence": estimate.evidence,
            "compute_seconds": estimate.compute_seconds,
            "communication_seconds": estimate.communication_seconds,
            "exposed_seconds": estimate.exposed_seconds,
            "mfu": estimate.mfu,
        },
        "scaling": [
            {
                "world_size": row.world_size,
                "step_seconds": row.estimate.step_seconds,
                "tokens_per_second": row.estimate.tokens_per_second,
                "exposed_seconds": row.estimate.exposed_seconds,
                "mfu": row.estimate.mfu,
                "efficiency": row.efficiency,
            }
            for row in rows
        ],
    }


def time_model(planned: Planned, problems: list[Problem]) -> TimeModel | None:
    """Return the counted operations; ``None`` without a machine, or if they cannot be counted, which is a warning."""
    if planned.machine is None:
        return None
    from hf_fsdp_plugin.estimate.time import TimeModel, no_time

    try:
        return TimeModel(planned.plan, planned.model, planned.workload)
    except SpecError as error:
        problems.append(no_time(error))
        return None


def time_text(
    estimate: TimeEstimate | None, rows: list[ScalingRow], world_size: int, machine: str | None = None
) -> list[str]:
    """Return the lines of the text."""
    if estimate is None and machine is not None:
        return [f"time: unknown on {machine}, because the operations of the model cannot be counted."]
    if estimate is None:
        return ["time: unknown. Set --machine, such as h100-sxm, or measure this one with --calibrate."]
    mfu = f"{estimate.mfu:.1%}" if estimate.mfu is not None else "unknown"
    table = [
        ("time per step", _seconds(estimate.step_seconds)),
        ("interval", interval_text(estimate)),
        ("computation", _seconds(estimate.compute_seconds)),
        ("communication", _seconds(estimate.communication_seconds)),
        ("not overlapped", _seconds(estimate.exposed_seconds)),
        ("tokens/s", f"{estimate.tokens_per_second:,.0f}"),
        ("tokens/s per rank", f"{estimate.tokens_per_second / world_size:,.0f}"),
        ("model FLOP/s utilization", mfu),
    ]
    lines = [format_table(table, right=(1,)), f"  {estimate.evidence}", f"  on {estimate.machine}"]
    if rows:
        lines += ["", format_table(_scaling_rows(rows), right=(0, 2, 3, 4, 5))]
    return lines


def interval_text(estimate: TimeEstimate) -> str:
    if estimate.low_seconds is None or estimate.high_seconds is None:
        return "none"
    return f"{_seconds(estimate.low_seconds)} to {_seconds(estimate.high_seconds)}"


def _scaling_rows(rows: list[ScalingRow]) -> list[tuple[str, ...]]:
    found: list[tuple[str, ...]] = [("ranks", "mesh", "step", "not overlapped", "tokens/s", "efficiency")]
    for row in rows:
        estimate = row.estimate
        found.append(
            (
                f"{row.world_size:,}", f"{row.mesh.replicate} × {row.mesh.shard}", _seconds(estimate.step_seconds),
                _seconds(estimate.exposed_seconds), f"{estimate.tokens_per_second:,.0f}", f"{row.efficiency:.0%}",
            )
        )  # fmt: skip
    return found


def scaling_of(model: TimeModel, machine: Any, largest: int = 4096) -> list[ScalingRow]:
    return model.scaling(machine, [world for world in SCALING_WORLDS if world <= largest])


def _seconds(seconds: float) -> str:
    return f"{seconds * 1000:,.1f} ms" if seconds < 1 else f"{seconds:,.2f} s"
