"""The model of the wizard, what its strategies need, and the settings that are recommended."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from hf_fsdp_plugin.cli.model_plan import load_model
from hf_fsdp_plugin.cli.wizard.fsdp_questions import USUAL_MIN_NUM_PARAMS
from hf_fsdp_plugin.cli.wizard.question import ModelFacts, State
from hf_fsdp_plugin.cli.wizard.settings import stock_limits
from hf_fsdp_plugin.problems import SpecError
from hf_fsdp_plugin.spec.load import load_spec
from hf_fsdp_plugin.strategies import STRATEGIES
from hf_fsdp_plugin.text import fit_table, format_bytes, format_table, parse_bytes, wrap_words

if TYPE_CHECKING:
    from hf_fsdp_plugin.estimate.planner.advice import Advice, AdviceRow
    from hf_fsdp_plugin.estimate.results import MemoryEstimate
    from hf_fsdp_plugin.estimate.workload import Workload
    from hf_fsdp_plugin.plan.fsdp_plan import FsdpPlan

MAX_ROWS: Final = 8


def read_model(path_or_id: str) -> ModelFacts:
    """Return the facts of a model. Raises ``SpecError`` (FSDP-E709) if it does not exist or cannot be built."""
    from hf_fsdp_plugin.plan.modules import ModuleTree, no_split_classes

    model, problems = load_model(path_or_id)
    if model is None:
        raise SpecError(problems)
    tree = ModuleTree(model)
    classes = dict(tree.class_counts())
    declared = tuple(name for name in no_split_classes(model) if name in classes)
    config = getattr(model, "config", None)
    get_text_config = getattr(config, "get_text_config", None)
    text_config = get_text_config() if get_text_config is not None else config
    longest = getattr(text_config, "max_position_embeddings", None)
    return ModelFacts(
        name=path_or_id,
        model=model,
        class_name=type(model).__name__,
        num_params=sum(parameter.numel() for parameter in model.parameters()),
        classes=classes,
        layers=declared or tree.repeated_classes(),
        declares_layers=bool(declared),
        max_seq_len=longest if isinstance(longest, int) else 0,
    )


def predict_strategies(state: State, width: int | None) -> tuple[str, Mapping[str, Any]]:
    """Return the planner's table and the recommended answers; without the memory of a GPU, a table of strategies.

    Raises:
        SpecError: the model cannot be planned, or has other inputs than a batch of text or images.
    """
    limit = _memory_of_gpu(state)
    if limit is None:
        return _strategies_text(state, width), {}
    advice = advice_of(state, limit)
    rows = (row for row in advice.fitting if not any(stock_limits(row.settings, state.version, gpus=state.gpus)))
    best = next(rows, None)  # that stock Accelerate runs, too
    return _advice_text(advice, best, state, width), _answers_of(best) if best is not None else {}


def predict_settings(state: State, settings: Mapping[str, Any]) -> MemoryEstimate:
    """Return the predicted memory of the chosen settings. Raises ``SpecError`` as :func:`predict_strategies` does."""
    from hf_fsdp_plugin.estimate.memory import estimate_memory

    return estimate_memory(_plan(state, settings), _model(state).model, _workload(state))


def memory_text(memory: MemoryEstimate, state: State) -> str:
    """Return the peak in one line: ``31.2 GiB of 74.5 GiB per GPU, in the backward of model.layers.3``."""
    limit = _memory_of_gpu(state)
    of = f" of {_size(limit)}" if limit is not None else ""
    return f"{_size(memory.needed_bytes)}{of} per GPU, in the {memory.peak.where}"


def _model(state: State) -> ModelFacts:
    assert state.model is not None, "the caller checks that there is a model"
    return state.model


def _memory_of_gpu(state: State) -> int | None:
    """Return the bytes of a GPU; ``None`` if they are unknown."""
    return parse_bytes(state.answers["gpu_memory"]) if state.answers.get("gpu_memory") else None


def advice_of(state: State, gpu_memory: int) -> Advice:
    """Return the planner's answer. Raises ``SpecError`` if the model cannot be planned."""
    from hf_fsdp_plugin.estimate.planner import advise

    precision = state.answers["precision"]
    return advise(
        _model(state).model,
        seq_len=int(state.answers["seq_len"]),
        global_batch=int(state.answers["global_batch"]),
        gpu_memory=gpu_memory,
        num_machines=state.num_machines,
        gpus_per_machine=state.gpus,
        machine=state.named_machine(),
        version=1 if state.version == 1 else 2,
        precision="auto" if precision == "no" else precision,
        wrap=_wrap(state),
        optimizer=state.answers["optimizer"],
    )


def _answers_of(row: AdviceRow) -> dict[str, Any]:
    """Return the settings of a row, and its answers to questions that are not settings."""
    choice = row.choice
    settings = {name: value for name, value in row.settings.items() if name != "fsdp.version"}
    return {**settings, "micro_batch": choice.micro_batch, "sync_each_batch": choice.sync_each_batch}


def _wrap(state: State) -> dict[str, Any]:
    """Return the settings of the wrap policy that the wizard offers as default."""
    model = _model(state)
    if model.declares_layers:
        return {"wrap.policy": "transformer"}
    if model.layers:
        return {"wrap.policy": "transformer", "wrap.classes": list(model.layers)}
    return {"wrap.policy": "size", "wrap.min_num_params": USUAL_MIN_NUM_PARAMS}


def _plan(state: State, settings: Mapping[str, Any]) -> FsdpPlan:
    from hf_fsdp_plugin.plan.resolve import resolve

    general: dict[str, Any] = {
        "launch.distributed_type": "FSDP",
        "launch.num_processes": state.world_size,
        "launch.num_machines": state.num_machines,
        "launch.mixed_precision": state.answers["precision"],
        "fsdp.version": state.version,
    }
    chosen = {name: value for name, value in (general | dict(settings)).items() if value not in ("", ())}
    chosen = {name: list(value) if isinstance(value, tuple) else value for name, value in chosen.items()}
    spec = load_spec(overrides=chosen, environ={})
    device_type = "cpu" if state.cpu else "cuda"
    return resolve(spec, _model(state).model, world_size=state.world_size, device_type=device_type)


def _workload(state: State) -> Workload:
    from hf_fsdp_plugin.estimate.workload import Workload

    answers = state.answers
    return Workload(
        micro_batch=int(answers.get("micro_batch", 1)),
        seq_len=int(answers["seq_len"]),
        accumulation=state.accumulation,
        sync_each_batch=bool(answers.get("sync_each_batch", False)),
        optimizer=answers["optimizer"],
    )


def _strategies_text(state: State, width: int | None) -> str:
    """Return the table of each strategy with and without checkpointing, for GPUs whose memory is unknown."""
    from hf_fsdp_plugin.estimate.communication import estimate_communication
    from hf_fsdp_plugin.estimate.memory import estimate_memory

    model, workload = _model(state).model, _workload(state)
    lines: list[Sequence[str]] = [("strategy", "checkpointing", "memory", "collectives")]
    for checkpointing in ("none", "full"):
        for strategy in STRATEGIES.values():
            if strategy.hybrid and state.num_machines == 1:
                continue
            settings = {"sharding.strategy": strategy.name, "activation.checkpointing": checkpointing}
            plan = _plan(state, settings | _wrap(state))
            needed = estimate_memory(plan, model, workload).needed_bytes
            collectives = estimate_communication(plan, model, workload).collectives
            sent = sum(each.bytes * each.calls for each in collectives)
            lines.append((strategy.name, checkpointing, _size(needed), format_bytes(sent)))
    title = "Predicted per GPU with one sample per forward pass: memory at the peak, and bytes of collectives per step:"
    end = "The memory of a GPU is unknown, so nothing is recommended."
    return f"{title}\n\n{_table(lines, (2, 3), width)}\n\n{end}"


def _advice_text(advice: Advice, best: AdviceRow | None, state: State, width: int | None) -> str:
    """Return the planner's table: the best row of each strategy and checkpointing, and what does not fit."""
    timed = any(row.tokens_per_second for row in advice.fitting)
    head = ("", "strategy", "checkpointing", "batch", "memory", *(("tokens/s", "") if timed else ("collectives",)))
    lines: list[Sequence[str]] = [head]
    for row in _shown(advice.fitting, best):
        speed = (f"{row.tokens_per_second or 0:,.0f}", row.reason) if timed else (format_bytes(row.communicated),)
        batch = f"{row.choice.micro_batch}{'*' if row.choice.sync_each_batch else ''}"
        lines.append(
            ("»" if row is best else "", _strategy(row), _checkpointing(row), batch, _size(row.needed_bytes), *speed)
        )
    parts = [f"Predicted per GPU of {_size(advice.gpu_memory)}, of which {_size(advice.limit)} may be used:"]
    if advice.fitting:
        parts.append(_table(lines, (3, 4, 5), width))
    if any("*" in line[3] for line in lines[1:]):
        parts.append("* gradients are reduced after every micro-batch, not only the last (sync_each_batch)")
    if rejected := _rejected(advice):
        parts.append("\n".join(part for line in rejected for part in wrap_words(line, width)))
    parts.append(_conclusion(advice, best, state))
    return "\n\n".join(parts)


def _table(lines: Sequence[Sequence[str]], right: Collection[int], width: int | None) -> str:
    """Align the columns. On a narrow terminal, leave out the last column, then shorten the longest cells."""
    for columns in (lines, [line[:-1] for line in lines]):
        table = format_table(columns, right=[number for number in right if number < len(columns[0])])
        if width is None or max(map(len, table.splitlines())) <= width:
            return table
    return fit_table([line[:-1] for line in lines], width)


def _shown(rows: Iterable[AdviceRow], best: AdviceRow | None) -> list[AdviceRow]:
    """Return the first row of each combination of strategy and checkpointing, and the recommended one."""
    first: dict[Any, AdviceRow] = {}
    for row in rows:
        first.setdefault((_strategy(row), _checkpointing(row)), row)
    shown = list(first.values())[:MAX_ROWS]
    return shown if best is None or best in shown else [*shown[: MAX_ROWS - 1], best]


def _rejected(advice: Advice) -> list[str]:
    """Return a line for each strategy of which no combination fits: the one that needs least."""
    fitting = {row.settings["sharding.strategy"] for row in advice.fitting}
    least: dict[str, AdviceRow] = {}
    for row in advice.rejected:
        name = str(row.settings["sharding.strategy"])
        if name not in fitting and (name not in least or row.needed_bytes < least[name].needed_bytes):
            least[name] = row
    return [f"{name} does not fit: {least[name].reason}" for name in STRATEGIES if name in least]


def _conclusion(advice: Advice, best: AdviceRow | None, state: State) -> str:
    if best is None and not advice.fitting:
        return " ".join(["Nothing fits.", *advice.remedies])
    fastest = advice.fitting[0]
    limits = " ".join(stock_limits(fastest.settings, state.version, gpus=state.gpus))
    if best is None:
        return f"Nothing that fits runs with stock Accelerate. {limits}"
    basis = "the fastest that fits" if best.time is not None else "it fits, with least recomputation and communication"
    return f"Recommended (»): {basis}." + (f" {limits}" if best is not fastest else "")


def _strategy(row: AdviceRow) -> str:
    sharding = row.choice.sharding
    mesh = f" {sharding.replicate}×{sharding.shard}" if STRATEGIES[sharding.strategy].hybrid else ""
    offload = ", offload" if row.choice.offload_params else ""
    return f"{sharding.strategy}{mesh}{offload}"


def _checkpointing(row: AdviceRow) -> str:
    return f"{row.choice.checkpointing}{', offload' if row.choice.offload_activations else ''}"


def _size(num_bytes: int) -> str:
    return format_bytes(num_bytes, binary=True)
