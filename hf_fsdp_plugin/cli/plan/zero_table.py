"""``hf-fsdp plan --zero-table``: the formulas of ZeRO, and how real training differs."""

from __future__ import annotations

import argparse
import re
from typing import TYPE_CHECKING, Final

from hf_fsdp_plugin.cli.output import OK, print_json, text_width
from hf_fsdp_plugin.cli.plan.arguments import Planned, read_size
from hf_fsdp_plugin.estimate.zero import DIFFERENCES, SHARDED, ZeroRow, zero_table
from hf_fsdp_plugin.problems import Origin, Problem, SpecError
from hf_fsdp_plugin.text import format_table, wrap_words

if TYPE_CHECKING:
    from hf_fsdp_plugin.estimate.results import Moment

_COUNT: Final = re.compile(r"(\d+(?:\.\d+)?(?:e\d{1,2})?)\s*([kmbt]?)", re.IGNORECASE)
_UNITS: Final = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
_LARGEST: Final = 10**15


def print_zero_table(args: argparse.Namespace, planned: Planned | None = None) -> int:
    """Print the formulas, and for a model what a step needs with everything included beside them. Returns 0.

    Raises:
        SpecError: ``--params`` or ``--world-size`` cannot be read, or the model cannot be predicted.
    """
    peaks: list[Moment] = []
    if planned is None:
        num_params, world_size = _read_sizes(args)
        subject = f"{num_params:,} parameters on {world_size} ranks, fp32, AdamW"
    else:
        from hf_fsdp_plugin.estimate.memory import estimate_scheme

        plan, workload = planned.plan, planned.workload
        num_params, world_size = plan.num_params, plan.world_size
        subject = (
            f"{num_params:,} parameters on {world_size} ranks; the formulas are for fp32 and AdamW, the prediction for "
            f"the config, micro-batch {workload.micro_batch} × {workload.seq_len:,} tokens and {workload.optimizer}"
        )
        peaks = [estimate_scheme(scheme, plan, planned.model, workload).peak for scheme in SHARDED]
    rows = zero_table(num_params, world_size)
    if args.json:
        predicted = [{"predicted_peak_bytes": peak.bytes, "peak_at": peak.where} for peak in peaks] or [{}] * len(rows)
        found = [{**_json(row), **more} for row, more in zip(rows, predicted, strict=True)]
        print_json({"ok": True, "rows": found, "differences": DIFFERENCES})
        return OK
    table = [("scheme", "parameters", "optimizer", "gradients", "total", "FSDP"), *map(_cells, rows)]
    if peaks:
        more = [("predicted", "at"), *((f"{peak.bytes / 1e9:,.4g}", peak.where) for peak in peaks)]
        table = [(*cells, *others) for cells, others in zip(table, more, strict=True)]
    print(f"memory of a rank in GB (10⁹ bytes), {subject}\n")
    print(format_table(table, right=(1, 2, 3, 4, 6)))
    print("\n" + "\n".join(wrap_words(DIFFERENCES, text_width() or 110, "")))
    return OK


def _read_sizes(args: argparse.Namespace) -> tuple[int, int]:
    """Return the number of parameters and of ranks."""
    problems: list[Problem] = []
    world_size = read_size(args, "world-size", problems)
    num_params = parse_count(args.params)
    if num_params is None:
        origin = Origin(source="command line", spelling="--params", text=args.params)
        message = f"--params: {args.params!r} is not a number of parameters between 1 and {_LARGEST:.0e}."
        problems.append(Problem(code="FSDP-E722", message=message, fix="Write 7e9 or 7B.", origin=origin))
    if num_params is None or world_size is None:
        raise SpecError(problems)
    return num_params, world_size


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
