"""Which flags of ``hf-fsdp plan`` have an effect together. Others are refused, so that none is ignored silently."""

from __future__ import annotations

import argparse
from typing import Final

from hf_fsdp_plugin.cli.parser import needless_flag

_CONFIG: Final = frozenset(
    {"model", "config_option", "config_file", "fsdp", "fsdp_config", "overrides", "distributed_config"}
)
_WORKLOAD: Final = frozenset(
    {
        "world_size", "micro_batch", "seq_len", "global_batch", "accumulation", "optimizer", "update_loop", "no_clip",
        "attention", "lora_rank", "qlora",
    }
)  # fmt: skip
_PICTURES: Final = frozenset({"html", "png", "force"})
_MODES: Final = {
    "calibrate": frozenset({"world_size", "device", "json"}),
    "zero_table": _CONFIG | _WORKLOAD | {"params", "sync_each_batch", "device", "json"},
    "advise": _CONFIG | _WORKLOAD | _PICTURES | {"gpu_memory", "machine", "json"},
    "": _CONFIG | _WORKLOAD | _PICTURES | {
        "sync_each_batch", "gpu_memory", "machine", "device", "trace", "scaling", "json",
    },
}  # fmt: skip
"""Flag that selects what the verb does -> other flags that have an effect then; "" for the prediction."""
_FORMULAS: Final = frozenset({"params", "world_size", "json"})
"""Flags of ``--zero-table`` without a model."""
_NEEDS: Final = {
    "force": ("html", "png"),
    "scaling": ("machine",),
}
"""Flag -> flags of which it needs one."""


def unused_flags(args: argparse.Namespace) -> str:
    """Return why a combination of flags is refused, because one of them would have no effect; empty if none is."""
    given: dict[str, str] = args.given
    mode = next((name for name in _MODES if name in given), "")
    applies = _MODES[mode]
    shown = given.get(mode, "")
    if mode == "zero_table":
        applies, shown = (applies - {"params"}, f"{shown} --model") if args.model else (_FORMULAS, f"{shown} alone")
    for name, flag in given.items():
        if name != mode and name not in applies:
            return f"{flag} has no effect with {shown}." if mode else f"{flag} is only for --zero-table."
    if reason := needless_flag(args, _NEEDS):
        return reason
    takes_settings = mode != "calibrate" and applies is not _FORMULAS
    rest = () if takes_settings else (*([args.configs] if args.configs else []), *args.command_line)
    return f"{rest[0]} has no effect with {shown}." if rest else ""
