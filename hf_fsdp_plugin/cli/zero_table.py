"""``hf-fsdp plan --zero-table``: the formulas of ZeRO, and how real training differs."""

from __future__ import annotations

import argparse
import re
import sys
from typing import TYPE_CHECKING, Final

from hf_fsdp_plugin.cli.exit_codes import OK, PROBLEMS, USAGE
from hf_fsdp_plugin.cli.output import print_json
from hf_fsdp_plugin.cli.plan_arguments import read_size
from hf_fsdp_plugin.cli.terminal import print_problems, text_width
from hf_fsdp_plugin.estimate.zero import DIFFERENCES, ZeroRow, zero_table
from hf_fsdp_plugin.problems import Origin, Problem
from hf_fsdp_plugin.text import format_table, wrap_words

if TYPE_CHECKING:
    from hf_fsdp_plugin.cli.plan_subject import Planned

_COUNT: Final = re.compile(r"(\d+(?:\.\d+)?(?:e\d{1,2})?)\s*([kmbt]?)", re.IGNORECASE)
_UNITS: Final = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
_LARGEST: Final = 10**15


def zero_table_verb(args: argparse.Namespace) -> int:
    """Print the table. Returns 1 for a count or a number of ranks that cannot be read."""
    if args.params is None or args.world_size is None:
        print("hf-fsdp plan: --zero-table needs --params and --world-size, or --model.", file=sys.stderr)
        return USAGE
    problems: list[Problem] = []
    world_size = read_size(args, "world-size", problems)
    num_params = parse_count(args.params)
    if num_params is None:
        origin = Origin(source="command line", spelling="--params", text=args.params)
        message = f"--params: {args.params!r} is not a number of parameters between 1 and {_LARGEST:.0e}."
        problems.append(Problem(code="FSDP-E722", message=message, fix="Write 7e9 or 7B.", origin=origin))
    if num_params is None or world_size is None:
        if args.json:
            print_json({"ok": False, "problems": [problem.to_json() for problem in problems]})
        else:
            print_problems(problems)
        return PROBLEMS
    rows = zero_table(num_params, world_size)
    if args.json:
        print_json({"ok": True, "rows": [_json(row) for row in rows], "differences": DIFFERENCES})
        return OK
    print(f"memory of a rank in GB (10⁹ bytes), {num_params:,} parameters on {world_size} ranks, fp32, AdamW\n")
    head = ("scheme", "parameters", "optimizer", "gradients", "total", "FSDP")
    print(format_table([head, *(_cells(row) for row in rows)], right=(1, 2, 3, 4)))
    print("\n" + "\n".join(wrap_words(DIFFERENCES, text_width() or 110, "")))
    return OK


def scheme_table_verb(args: argparse.Namespace, planned: Planned) -> int:
    """Print the formulas for a model beside what a step needs with everything included."""
    from hf_fsdp_plugin.estimate.memory import estimate_scheme

    plan, rows = planned.plan, zero_table(planned.plan.num_params, planned.plan.world_size)
    peaks = [estimate_scheme(row.scheme, plan, planned.model, planned.workload).peak for row in rows]
    if args.json:
        found = [
            {**_json(row), "predicted_peak_bytes": peak.bytes, "peak_at": peak.where}
            for row, peak in zip(rows, peaks, strict=True)
        ]
        print_json({"ok": True, "rows": found, "differences": DIFFERENCES})
        return OK
    workload = planned.workload
    print(
        f"memory of a rank in GB (10⁹ bytes), {plan.num_params:,} parameters on {plan.world_size} ranks; the formulas "
        f"are for fp32 and AdamW, the prediction for the config, micro-batch {workload.micro_batch} × "
        f"{workload.seq_len:,} tokens and {workload.optimizer}\n"
    )
    head = ("scheme", "parameters", "optimizer", "gradients", "total", "FSDP", "predicted", "at")
    cells = ((*_cells(row), f"{peak.bytes / 1e9:,.4g}", peak.where) for row, peak in zip(rows, peaks, strict=True))
    print(format_table([head, *cells], right=(1, 2, 3, 4, 6)))
    print("\n" + "\n".join(wrap_words(DIFFERENCES, text_width() or 110, "")))
    return OK


def parse_count(text: str) -> int | None:
    """Return the number of parameters in ``7e9``, ``7B`` or ``7000000000``; ``None`` for anything else."""
    found = _COUNT.fullmatch(text.strip())
    if found is None:
        return None
    count = round(float(found[1]) * _UNITS[found[2].lower()])
    return count if 1 <= count <= _LARGEST else None


def _cells(row: ZeroRow) -> tuple[str, ...]:
    sizes = (row.params, row.optimizer, row.grads, row.total)
    return (row.scheme, *(f"{size / 1e9:,.4g}" for size in sizes), row.fsdp or "–")


def _json(row: ZeroRow) -> dict[str, object]:
    sizes = {"params": row.params, "optimizer": row.optimizer, "grads": row.grads, "total": row.total}
    return {"scheme": row.scheme, "fsdp": row.fsdp or None, **{f"{kind}_bytes": round(b) for kind, b in sizes.items()}}
