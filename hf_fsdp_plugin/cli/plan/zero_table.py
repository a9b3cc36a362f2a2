"""``hf-fsdp plan --zero-table``: the formulas for ZeRO of the literature, and how real training differs."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from typing import Any, Final

from hf_fsdp_plugin.cli.output import OK, print_json, text_width
from hf_fsdp_plugin.cli.plan.arguments import read_size
from hf_fsdp_plugin.problems import Origin, Problem, SpecError
from hf_fsdp_plugin.text import format_table, wrap_words

_COUNT: Final = re.compile(r"(\d+(?:\.\d+)?(?:e\d{1,2})?)\s*([kmbt]?)", re.IGNORECASE)
_UNITS: Final = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
_LARGEST: Final = 10**15
_BYTES: Final = {"params": 4, "optimizer": 8, "grads": 4}
"""Bytes per parameter with AdamW, everything in fp32."""
_SHARDED: Final[Mapping[str, tuple[str | None, tuple[str, ...]]]] = {
    "DDP": ("no_shard", ()),
    "ZeRO-1": (None, ("optimizer",)),
    "ZeRO-2": ("shard_grad_op", ("optimizer", "grads")),
    "ZeRO-3": ("full_shard", ("params", "optimizer", "grads")),
}
"""Scheme -> closest strategy of FSDP, and what is divided by the number of ranks (Rajbhandari et al., ZeRO: Memory
Optimizations Toward Training Trillion Parameter Models, 2020, figure 1, with K = 8 instead of 12, as there are no
separate fp16 copies)."""
_DIFFERENCES: Final = (
    "Real training differs: these formulas assume fp32 everywhere and even shards, and leave out activations, logits, "
    "the gathered parameters of the units in use, buffers of all-gathers and reduce-scatters, the buckets of DDP, and "
    "temporary tensors of the update. FSDP's shard_grad_op keeps whole parameters only between forward and backward, "
    "so its shards are those of ZeRO-3."
)


def print_zero_table(args: argparse.Namespace) -> int:
    """Print the formulas for a number of parameters and of ranks. Returns 0.

    Raises:
        SpecError: ``--params`` or ``--world-size`` cannot be read (FSDP-E722).
    """
    num_params, world_size = _read_sizes(args)
    rows = [_zero_row(scheme, num_params, world_size) for scheme in _SHARDED]
    if args.json:
        print_json({"ok": True, "rows": rows, "differences": _DIFFERENCES})
        return OK
    table = [("scheme", "parameters", "optimizer", "gradients", "total", "FSDP")]
    for row in rows:
        sizes = (f"{row[f'{kind}_bytes'] / 1e9:,.4g}" for kind in (*_BYTES, "total"))
        table.append((row["scheme"], *sizes, row["fsdp"] or "–"))
    print(f"memory of a rank in GB (10⁹ bytes), {num_params:,} parameters on {world_size} ranks, fp32, AdamW\n")
    print(format_table(table, right=(1, 2, 3, 4)))
    print("\n" + "\n".join(wrap_words(_DIFFERENCES, text_width() or 110, "")))
    return OK


def _zero_row(scheme: str, num_params: int, world_size: int) -> dict[str, Any]:
    fsdp, sharded = _SHARDED[scheme]
    sizes = {kind: num_params * size / (world_size if kind in sharded else 1) for kind, size in _BYTES.items()}
    sizes["total"] = sum(sizes.values())
    return {"scheme": scheme, "fsdp": fsdp, **{f"{kind}_bytes": round(size) for kind, size in sizes.items()}}


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
