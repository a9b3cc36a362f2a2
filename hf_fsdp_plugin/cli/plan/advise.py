"""``hf-fsdp plan --advise``: the planner's table, why the rest is rejected, and the config of the best row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from hf_fsdp_plugin.cli.output import colored, text_width
from hf_fsdp_plugin.launcher.world import DEFAULT_PORT
from hf_fsdp_plugin.strategies import STRATEGIES
from hf_fsdp_plugin.text import fit_table, format_bytes, plural, truncate_lines, wrap_words

if TYPE_CHECKING:
    from hf_fsdp_plugin.estimate.machines import Machine
    from hf_fsdp_plugin.estimate.planner.advice import Advice, AdviceRow
    from hf_fsdp_plugin.spec.fsdp_spec import FsdpSpec

_ROWS: Final = 10
_RANKS_PER_MACHINE: Final = 8
"""Ranks of a machine that neither the config nor ``--machine`` describes."""
_SYNC: Final = '--accelerator_config \'{"gradient_accumulation_kwargs": {"sync_each_batch": true}}\''


@dataclass(frozen=True, slots=True)
class Launched:
    """The ranks and the machines on which they run."""

    world_size: int
    num_machines: int

    @property
    def ranks_per_machine(self) -> int:
        return self.world_size // self.num_machines


def advice_text(advice: Advice, spec: FsdpSpec, launched: Launched, tree: str) -> str:
    """Return the text: the best settings, a table, the rejected settings, and the config.

    Args:
        spec: the launch settings and the wrap policy of the config.
        launched: the ranks and machines that were asked for.
        tree: how the best settings compare with the rule of thumb.
    """
    width = text_width()
    lines = [*wrap_words(_answer(advice), width, ""), ""]
    if advice.fitting:
        head = ("settings", "micro-batches", "memory", "tokens/s", "")
        table = [head, *(_cells(row) for row in advice.fitting[:_ROWS])]
        lines += [fit_table(table, width)]
        rest = len(advice.fitting) - _ROWS
        lines += [f"… and {rest} more that fit"] if rest > 0 else []
        lines += [""]
    if advice.rejected:
        rows = (f"  {_settings(row)}, {_batches(row)}: {row.reason}" for row in advice.rejected)
        lines += ["rejected, the closest first", *truncate_lines(rows, _ROWS), ""]
    lines += wrap_words(tree, width, "")
    chosen = written_row(advice)
    if chosen is not None:
        lines += ["", *_config_lines(advice, chosen, spec, launched)]
    return "\n".join(lines)


def advice_json(advice: Advice, spec: FsdpSpec, launched: Launched, tree: str) -> dict[str, Any]:
    """Return the object of ``plan --advise --json``."""
    chosen = written_row(advice)
    return {
        "ok": advice.best is not None,
        "gpu_memory_bytes": advice.gpu_memory,
        "limit_bytes": advice.limit,
        "best": 0 if advice.best is not None else None,
        "rows": [_row_json(row) for row in advice.rows],
        "remedies": list(advice.remedies),
        "decision_tree": tree,
        "config": config_text(chosen, spec, launched) if chosen is not None else None,
        "arguments": list(_arguments(chosen)) if chosen is not None else [],
    }


def written_row(advice: Advice) -> AdviceRow | None:
    """Return the first row that fits and that stock ``accelerate launch`` runs too; else the best row."""
    from hf_fsdp_plugin.cli.wizard.settings import stock_limits

    stock = (row for row in advice.fitting if not any(stock_limits(row.settings, row.settings["fsdp.version"])))
    return next(stock, advice.best)


def launched_of(spec: FsdpSpec, world_size: int, machine: Machine | None) -> Launched:
    """Return the machines for a number of ranks: those of the config, else as few equal ones as hold the ranks."""
    launch, limit = spec.launch, max(_RANKS_PER_MACHINE, machine.ranks_per_machine if machine is not None else 0)
    if spec.asked("launch.num_machines"):
        given = world_size if launch.num_processes == "auto" else launch.num_processes
        if given == world_size and world_size % launch.num_machines == 0:
            return Launched(world_size, launch.num_machines)
        limit = max(1, given // launch.num_machines)
    fewest = -(-world_size // limit)
    return Launched(world_size, next(n for n in range(fewest, world_size + 1) if world_size % n == 0))


def config_text(row: AdviceRow, spec: FsdpSpec, launched: Launched) -> str:
    """Return the Accelerate YAML of a row."""
    lines = [
        "compute_environment: LOCAL_MACHINE",
        "distributed_type: FSDP",
        *_launch_lines(spec, launched),
        f"mixed_precision: {_precision(spec)}",
        "fsdp_config:",
        *(f"  {key}: {_text(value)}" for key, value in _fsdp_keys(row.settings, spec)),
    ]
    if "mesh.shard" in row.settings:
        sizes = {"replicate": row.settings["mesh.replicate"], "shard": row.settings["mesh.shard"]}
        lines += ["parallelism_config:", *(f"  parallelism_config_dp_{axis}_size: {n}" for axis, n in sizes.items())]
    return "\n".join(lines) + "\n"


def _launch_lines(spec: FsdpSpec, launched: Launched) -> Iterator[str]:
    launch, num_machines = spec.launch, launched.num_machines
    yield f"num_machines: {num_machines}"
    yield f"num_processes: {launched.world_size}"
    if num_machines == 1:
        yield "machine_rank: 0"
    else:
        others = "machine: 1" if num_machines == 2 else f"machines: 1 to {num_machines - 1}"
        yield f"machine_rank: 0  # on the other {others}"
        address = launch.main_process_ip or "ADDRESS  # of the machine with machine_rank 0"
        yield f"main_process_ip: {address}"
        yield f"main_process_port: {launch.main_process_port or DEFAULT_PORT}"
    if launch.use_cpu:
        yield "use_cpu: true"


def _fsdp_keys(settings: Mapping[str, Any], spec: FsdpSpec) -> Iterator[tuple[str, Any]]:
    strategy = STRATEGIES[settings["sharding.strategy"]]
    yield "fsdp_version", settings["fsdp.version"]
    if settings["fsdp.version"] == 2 and strategy.is_sharded:
        yield "fsdp_reshard_after_forward", strategy.reshards_after_forward
    else:
        yield "fsdp_sharding_strategy", strategy.name.upper()
    yield from _wrap_keys(settings, spec)
    checkpointing = settings["activation.checkpointing"]
    yield "fsdp_activation_checkpointing", {"none": False, "full": True}.get(checkpointing, checkpointing)
    if settings["activation.offload"]:
        yield "fsdp_activation_checkpointing_offload", True
    yield "fsdp_offload_params", settings["offload.params"]
    yield "fsdp_state_dict_type", "SHARDED_STATE_DICT"


def _wrap_keys(settings: Mapping[str, Any], spec: FsdpSpec) -> Iterator[tuple[str, Any]]:
    """Yield the keys of the row's units, else those of the config."""
    policy = settings.get("wrap.policy", spec.wrap.policy)
    if policy == "none" and "wrap.policy" in settings:
        yield "fsdp_auto_wrap_policy", "NO_WRAP"
    elif policy == "size":
        yield "fsdp_auto_wrap_policy", "SIZE_BASED_WRAP"
        yield "fsdp_min_num_params", settings.get("wrap.min_num_params", spec.wrap.min_num_params)
    else:
        yield "fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP"
        if classes := settings.get("wrap.classes", spec.wrap.classes):
            yield "fsdp_transformer_layer_cls_to_wrap", ",".join(classes)


def _precision(spec: FsdpSpec) -> str:
    return {"bf16": "bf16", "fp16": "fp16"}.get(spec.precision.param, "no")


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _arguments(row: AdviceRow) -> Iterator[str]:
    """Yield the arguments of a script with TrainingArguments that the config does not contain."""
    yield f"--per_device_train_batch_size {row.choice.micro_batch}"
    yield f"--gradient_accumulation_steps {row.choice.accumulation}"
    if row.choice.sync_each_batch:
        yield _SYNC


def _config_lines(advice: Advice, row: AdviceRow, spec: FsdpSpec, launched: Launched) -> Iterator[str]:
    from hf_fsdp_plugin.cli.wizard.settings import stock_limits

    if advice.best is not None and row is not advice.best:
        limits = " ".join(stock_limits(advice.best.settings, advice.best.settings["fsdp.version"]))
        yield from wrap_words(
            f"The config is that of the best row that stock Accelerate runs too. {limits}", text_width()
        )
    yield from (f"# {argument}" for argument in _arguments(row))
    yield config_text(row, spec, launched).rstrip()


def _answer(advice: Advice) -> str:
    best = advice.best
    limit, memory = format_bytes(advice.limit, binary=True), format_bytes(advice.gpu_memory, binary=True)
    if best is None:
        change = " ".join(advice.remedies) or "No number of machines up to 64 times as many would change that."
        return f"{colored('Nothing fits', 'red')} into {limit} ({memory} without headroom). {change}"
    speed = f", {best.tokens_per_second:,.0f} tokens/s" if best.tokens_per_second else ""
    peak = format_bytes(best.needed_bytes, binary=True)
    return f"{colored('Best', 'green')}: {_settings(best)}, {_batches(best)}: {peak} of {limit} ({memory} without " + (
        f"headroom) per GPU{speed}."
    )


def _settings(row: AdviceRow) -> str:
    choice, sharding = row.choice, row.choice.sharding
    is_hybrid = STRATEGIES[sharding.strategy].hybrid
    parts = [f"{sharding.strategy} {sharding.replicate}×{sharding.shard}" if is_hybrid else sharding.strategy]
    parts += [f"{choice.checkpointing} checkpointing"] if choice.checkpointing != "none" else ["no checkpointing"]
    parts += ["offload of activations"] if choice.offload_activations else []
    parts += ["offload of parameters"] if choice.offload_params else []
    parts += [choice.units.label] if choice.units.label else []
    parts += ["sync each batch"] if choice.sync_each_batch else []
    return ", ".join(parts)


def _batches(row: AdviceRow) -> str:
    number = plural(row.choice.accumulation, "micro-batch", "micro-batches")
    return f"{number} of {row.choice.micro_batch}"


def _cells(row: AdviceRow) -> tuple[str, ...]:
    speed = f"{row.tokens_per_second:,.0f}" if row.tokens_per_second else "–"
    batches = f"{row.choice.accumulation} of {row.choice.micro_batch}"
    return _settings(row), batches, format_bytes(row.needed_bytes, binary=True), speed, row.reason


def _row_json(row: AdviceRow) -> dict[str, Any]:
    return {
        "settings": dict(row.settings),
        "micro_batch": row.choice.micro_batch,
        "accumulation": row.choice.accumulation,
        "sync_each_batch": row.choice.sync_each_batch,
        "fits": row.fits,
        "peak_bytes": row.peak_bytes,
        "needed_bytes": row.needed_bytes,
        "peak_at": row.memory.peak.where,
        "host_bytes": row.memory.host_bytes,
        "step_seconds": row.time.step_seconds if row.time is not None else None,
        "tokens_per_second": row.tokens_per_second,
        "reason": row.reason,
    }
