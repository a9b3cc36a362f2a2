"""What ``hf-fsdp check --run`` prints: a table of the stages and a line with the result."""

from __future__ import annotations

import signal

from hf_fsdp_plugin.cli.preflight import Preflight
from hf_fsdp_plugin.cli.terminal import Color, colored, text_width
from hf_fsdp_plugin.integrations.preflight.stages import STAGES
from hf_fsdp_plugin.text import fit_table, format_count, format_names, plural


def stage_table(preflight: Preflight) -> str:
    """Return the table of stages, with colors on a terminal, and one line with the result."""
    rows = [("stage", "result", "seconds", "")]
    for stage in preflight.stages:
        seconds = f"{stage.seconds:.1f}" if stage.seconds else ""
        rows.append((stage.stage, stage.result, seconds, stage.reason or STAGES[stage.stage]))
    head, *lines = fit_table(rows, text_width()).split("\n")
    colors: dict[str, Color] = {"failed": "red", "stood still": "red", "not tested": "dim"}
    shown = [
        colored(line, colors[stage.result]) if stage.result in colors else line
        for line, stage in zip(lines, preflight.stages, strict=False)
    ]
    return "\n".join([colored(head, "bold"), *shown, "", _summary(preflight)])


def _summary(preflight: Preflight) -> str:
    failed = [stage.stage for stage in preflight.stages if stage.result in ("failed", "stood still")]
    model = preflight.model
    of = (
        f" of a clone of {model['name']} with {format_count(model['num_params'])} of "
        f"{format_count(model['real_num_params'])} parameters"
        if model
        else ""
    )
    ran = f"{plural(preflight.world_size, 'CPU rank')}{of} in {preflight.seconds:.0f} s"
    if preflight.signal_number:
        return f"preflight: stopped by {signal.Signals(preflight.signal_number).name}"
    if failed:
        return f"preflight: {colored(f'failed: {format_names(failed)}', 'red')} ({ran})"
    return f"preflight: {colored('passed', 'green')} ({ran})"
