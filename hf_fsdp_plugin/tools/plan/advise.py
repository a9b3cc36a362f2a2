"""``hf-fsdp plan --advise``: the planner's table, why the rest is rejected, and the config of the best row."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from hf_fsdp_plugin.cli.output import OK, PROBLEMS, colored, print_result, text_width
from hf_fsdp_plugin.launcher.world import DEFAULT_PORT
from hf_fsdp_plugin.problems import Origin, Problem, SpecError
from hf_fsdp_plugin.strategies import STRATEGIES
from hf_fsdp_plugin.text import format_memory, format_table, plural, truncate_lines, wrap_words
from hf_fsdp_plugin.tools.config.text import new_text, script_arguments, setting_lines, stock_limits
from hf_fsdp_plugin.tools.pages import write_page
from hf_fsdp_plugin.tools.plan.estimate.machines import RANKS_PER_MACHINE, Machine
from hf_fsdp_plugin.tools.plan.output import Planned

if TYPE_CHECKING:
    from hf_fsdp_plugin.spec.fsdp_spec import FsdpSpec
    from hf_fsdp_plugin.tools.plan.estimate.planner import Advice, AdviceRow

_ROWS: Final = 10


def print_advice(args: argparse.Namespace, planned: Planned) -> int:
    """Print the planner's answer. Returns 1 if nothing fits.

    Raises:
        SpecError: the memory of a device is unknown (FSDP-E726).
    """
    from hf_fsdp_plugin.tools.plan.estimate.planner import advise

    plan, workload, spec = planned.plan, planned.workload, planned.plan.spec
    if planned.gpu_memory is None:
        origin = Origin(source="command line", spelling="--advise", text=None)
        message = "--advise needs the memory of a device."
        fix = "Pass --gpu-memory 80GB, or --machine with a known machine."
        raise SpecError([Problem(code="FSDP-E726", message=message, fix=fix, origin=origin)])
    num_machines = num_machines_of(spec, plan.world_size, planned.machine)
    advice = advise(
        planned.model,
        workload,
        global_batch=workload.micro_batch * workload.accumulation * plan.world_size,
        gpu_memory=planned.gpu_memory,
        num_machines=num_machines,
        gpus_per_machine=plan.world_size // num_machines,
        machine=planned.machine,
        version=plan.version,
        precision=spec.precision.param,
        wrap={name: value for name, value, _ in spec.settings() if name.startswith("wrap.") and spec.asked(name)},
    )
    # The first row that stock Accelerate runs too, else the best one.
    chosen = next((row for row in advice.fitting if not _stock_limits(row)), advice.best)
    config, arguments = "", list[str]()
    if chosen is not None:
        choice, config = chosen.choice, config_text(chosen, spec)
        arguments = script_arguments(choice.micro_batch, choice.accumulation, choice.sync_each_batch)
    lines = _answer_lines(advice, chosen)
    if args.html is not None:
        from hf_fsdp_plugin.tools.plan.page import advice_page

        shown_rows = [*advice.fitting[:_ROWS], *advice.rejected[:_ROWS], *([chosen] if chosen is not None else [])]
        names = {id(row): (_settings(row), _batches(row)) for row in shown_rows}
        title = f"Settings for {plan.model_class} on {plural(plan.world_size, 'rank')}"
        page = advice_page(title, _answer(advice), advice, chosen, names, config)
        lines += [*write_page(Path(args.html), page), ""]
    lines += [*(f"# {argument}" for argument in arguments), config.rstrip()]
    shown = {
        "ok": advice.best is not None,
        "gpu_memory_bytes": advice.gpu_memory,
        "limit_bytes": advice.limit,
        "best": 0 if advice.best is not None else None,
        "rows": [_row_json(row) for row in advice.rows],
        "remedies": list(advice.remedies),
        "config": config or None,
        "arguments": arguments,
    }
    print_result(args, shown, "\n".join(lines).rstrip())
    return OK if advice.best is not None else PROBLEMS


def _answer_lines(advice: Advice, chosen: AdviceRow | None) -> list[str]:
    """Return the best settings, a table, the rejected settings, and why the chosen row is not the best one."""
    width = text_width()
    first, *rest = wrap_words(_answer(advice), width, "")
    start = "Nothing fits" if advice.best is None else "Best"
    lines = [colored(start, "red" if advice.best is None else "green") + first.removeprefix(start), *rest, ""]
    if advice.fitting:
        lines += [rows_table(advice.fitting, chosen, width), ""]
    if advice.rejected:
        rows = (f"  {_settings(row)}, {_batches(row)}: {row.reason}" for row in advice.rejected)
        lines += ["rejected, the closest first", *truncate_lines(rows, _ROWS), ""]
    if chosen is not advice.best:
        limits = " ".join(_stock_limits(advice.rows[0]))
        text = f"The config is that of the best row that stock Accelerate runs too (»). {limits}"
        lines += wrap_words(text, width, "")
    return lines


def rows_table(rows: Sequence[AdviceRow], chosen: AdviceRow | None, width: int | None) -> str:
    """Return the table of the first rows, and of the chosen one, which is marked."""
    has_speed = any(row.tokens_per_second for row in rows)
    table = [("", "settings", "micro-batches", "memory", *(["tokens/s"] if has_speed else []), "")]
    for number, row in enumerate(rows):
        if number < _ROWS or row is chosen:
            mark, batches = "»" if row is chosen else "", f"{row.choice.accumulation} of {row.choice.micro_batch}"
            speed = [f"{row.tokens_per_second or 0:,.0f}"] if has_speed else []
            table.append((mark, _settings(row), batches, format_memory(row.memory.needed_bytes), *speed, row.reason))
    rest = len(rows) + 1 - len(table)
    return format_table(table, width=width) + (f"\n… and {rest} more that fit" if rest else "")


def _stock_limits(row: AdviceRow) -> list[str]:
    return list(stock_limits(row.settings, row.settings["fsdp.version"]))


def num_machines_of(spec: FsdpSpec, world_size: int, machine: Machine | None) -> int:
    """Return the number of machines: the number in the config, else the fewest equal machines that hold the ranks."""
    launch, limit = spec.launch, max(RANKS_PER_MACHINE, machine.ranks_per_machine if machine is not None else 0)
    if spec.asked("launch.num_machines"):
        given = world_size if launch.num_processes == "auto" else launch.num_processes
        if given == world_size and world_size % launch.num_machines == 0:
            return launch.num_machines
        limit = max(1, given // launch.num_machines)
    fewest = -(-world_size // limit)
    return next(number for number in range(fewest, world_size + 1) if world_size % number == 0)


def config_text(row: AdviceRow, spec: FsdpSpec) -> str:
    """Return the Accelerate YAML of a row, with the address and the wrap policy of `spec`."""
    launch, wrap, comments = spec.launch, spec.wrap, {}
    num_machines = row.plan.spec.launch.num_machines
    precision = spec.precision.param
    settings: dict[str, Any] = {
        "launch.compute_environment": "LOCAL_MACHINE",
        "launch.distributed_type": "FSDP",
        "launch.num_machines": num_machines,
        "launch.num_processes": row.plan.world_size,
        "launch.machine_rank": 0,
        "launch.mixed_precision": precision if precision in ("bf16", "fp16") else "no",
    }
    if num_machines > 1:
        others = "machine: 1" if num_machines == 2 else f"machines: 1 to {num_machines - 1}"
        comments["launch.machine_rank"] = f"on the other {others}"
        comments["launch.main_process_ip"] = "of the machine with machine_rank 0"
        settings["launch.main_process_ip"] = launch.main_process_ip or "ADDRESS"
        settings["launch.main_process_port"] = launch.main_process_port or DEFAULT_PORT
    if launch.use_cpu:
        settings["launch.use_cpu"] = True
    policy = wrap.policy if spec.asked("wrap.policy") else "transformer"
    settings |= {**row.settings, "wrap.policy": policy, "checkpoint.state_dict": "sharded"}
    if policy == "size":
        settings["wrap.min_num_params"] = wrap.min_num_params
    elif policy == "transformer":
        settings["wrap.classes"] = wrap.classes
    for name in ("activation.offload", "offload.optimizer"):
        if not settings[name]:
            del settings[name]  # the default
    return new_text(setting_lines(settings, settings["fsdp.version"], comments))


def _answer(advice: Advice) -> str:
    best = advice.best
    limit, memory = format_memory(advice.limit), format_memory(advice.gpu_memory)
    if best is None:
        change = " ".join(advice.remedies) or "No number of machines up to 64 times as many would change that."
        return f"Nothing fits into {limit} ({memory} without headroom). {change}"
    speed = f", {best.tokens_per_second:,.0f} tokens/s" if best.tokens_per_second else ""
    peak = format_memory(best.memory.needed_bytes)
    return f"Best: {_settings(best)}, {_batches(best)}: {peak} of {limit} ({memory} without " + (
        f"headroom) per GPU{speed}."
    )


def _settings(row: AdviceRow) -> str:
    choice = row.choice
    mesh = f" {choice.replicate}×{choice.shard}" if STRATEGIES[choice.strategy].hybrid else ""
    parts = [f"{choice.strategy}{mesh}"]
    parts += [f"{axis} axis of {size}" for axis, size in choice.axes.items() if size > 1]
    parts += [f"{choice.checkpointing} checkpointing" if choice.checkpointing != "none" else "no checkpointing"]
    parts += ["offload of activations"] if choice.offload_activations else []
    parts += ["offload of the optimizer state"] if choice.offload_optimizer else []
    parts += ["offload of parameters"] if choice.offload_params else []
    parts += ["sync each batch"] if choice.sync_each_batch else []
    return ", ".join(parts)


def _batches(row: AdviceRow) -> str:
    number = plural(row.choice.accumulation, "micro-batch", "micro-batches")
    return f"{number} of {row.choice.micro_batch}"


def _row_json(row: AdviceRow) -> dict[str, Any]:
    return {
        "settings": dict(row.settings),
        "micro_batch": row.choice.micro_batch,
        "accumulation": row.choice.accumulation,
        "sync_each_batch": row.choice.sync_each_batch,
        "fits": row.fits,
        "peak_bytes": row.memory.peak.bytes,
        "needed_bytes": row.memory.needed_bytes,
        "peak_at": row.memory.peak.where,
        "host_bytes": row.memory.host_bytes,
        "step_seconds": row.time.step_seconds if row.time is not None else None,
        "tokens_per_second": row.tokens_per_second,
        "reason": row.reason,
    }
