"""The model of the wizard, the settings that the planner recommends for it, and the memory of the chosen ones."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar

from hf_fsdp_plugin.cli.config.question import ModelFacts, State
from hf_fsdp_plugin.cli.config.questions import USUAL_MIN_NUM_PARAMS
from hf_fsdp_plugin.cli.config.settings import stock_limits
from hf_fsdp_plugin.cli.model_plan import load_model
from hf_fsdp_plugin.problems import SpecError
from hf_fsdp_plugin.spec.fsdp_spec import FsdpSpec
from hf_fsdp_plugin.strategies import STRATEGIES
from hf_fsdp_plugin.text import fit_table, format_memory, parse_bytes

if TYPE_CHECKING:
    from hf_fsdp_plugin.estimate.planner.advice import Advice, AdviceRow
    from hf_fsdp_plugin.estimate.results import MemoryEstimate

T = TypeVar("T")
_MAX_ROWS: Final = 8


def read_model(path_or_id: str) -> ModelFacts:
    """Return the facts of a model. Raises ``SpecError`` (FSDP-E709) if it does not exist or cannot be built."""
    from hf_fsdp_plugin.plan.modules import ModuleTree, no_split_classes

    model, problems = load_model(path_or_id)
    if model is None:
        raise SpecError(problems)
    tree = ModuleTree(model)
    classes = dict(tree.class_counts())
    declared = tuple(name for name in no_split_classes(model) if name in classes)
    config: Any = getattr(model, "config", None)
    text_config = config.get_text_config() if hasattr(config, "get_text_config") else config
    longest = getattr(text_config, "max_position_embeddings", None)
    return ModelFacts(
        model=model,
        classes=classes,
        layers=declared or tree.repeated_classes(),
        declares_layers=bool(declared),
        max_seq_len=longest if isinstance(longest, int) else 0,
    )


def recommend(state: State, width: int | None) -> tuple[str, Mapping[str, Any]]:
    """Return the planner's table for the memory of a GPU, and the recommended answers; none without a prediction."""
    advice, failure = _attempt(lambda: advice_of(state, _memory_of_gpu(state)))
    if advice is None:
        return f"No prediction: {failure}", {}
    fitting = advice.fitting
    best = next((row for row in fitting if not any(_limits(row, state))), None)  # stock Accelerate runs it, too
    text = (
        f"Predicted per GPU of {format_memory(advice.gpu_memory)}, of which {format_memory(advice.limit)} may be used:"
    )
    if fitting:
        text += f"\n\n{_table(fitting, best, width)}"
    return f"{text}\n\n{_conclusion(advice, best, state)}", _answers_of(best) if best is not None else {}


def predict_memory(state: State, spec: FsdpSpec) -> tuple[MemoryEstimate | None, str]:
    """Return the predicted memory of the chosen settings, and its text; ``None`` without a model or a prediction."""
    memory, _ = _attempt(lambda: _estimate(state, spec)) if state.model is not None else (None, "")
    if memory is None:
        return None, ""
    of = f" of {format_memory(_memory_of_gpu(state))}" if state.answers["gpu_memory"] else ""
    return memory, f"{format_memory(memory.needed_bytes)}{of} per GPU, in the {memory.peak.where}"


def _attempt(predict: Callable[[], T]) -> tuple[T | None, str]:
    """Return a prediction, or ``None`` and the reason why there is none: the config can be written without it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return predict(), ""
        except SpecError as error:
            return None, " ".join(problem.message for problem in error.problems)
        except Exception as error:  # the model's own code runs on the meta device, and may raise anything
            return None, f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def advice_of(state: State, gpu_memory: int) -> Advice:
    """Return the planner's answer. Raises ``SpecError`` if the model cannot be planned."""
    from hf_fsdp_plugin.estimate.workload import Workload

    from hf_fsdp_plugin.estimate.planner.search import advise

    precision = state.answers["precision"]
    return advise(
        _model(state).model,
        Workload(micro_batch=1, seq_len=int(state.answers["seq_len"]), optimizer=state.answers["optimizer"]),
        global_batch=int(state.answers["global_batch"]),
        gpu_memory=gpu_memory,
        num_machines=state.num_machines,
        gpus_per_machine=state.gpus,
        machine=state.named_machine(),
        version=1 if state.version == 1 else 2,
        precision="auto" if precision == "no" else precision,
        wrap=_wrap(state),
    )


def _estimate(state: State, spec: FsdpSpec) -> MemoryEstimate:
    from hf_fsdp_plugin.estimate.memory.peak import estimate_memory
    from hf_fsdp_plugin.estimate.workload import Workload
    from hf_fsdp_plugin.plan.resolve import resolve

    answers, model = state.answers, _model(state).model
    plan = resolve(spec, model, world_size=state.world_size, device_type="cpu" if state.cpu else "cuda")
    workload = Workload(
        micro_batch=int(answers["micro_batch"]),
        seq_len=int(answers["seq_len"]),
        accumulation=state.accumulation,
        sync_each_batch=bool(answers.get("sync_each_batch", False)),
        optimizer=answers["optimizer"],
    )
    return estimate_memory(plan, model, workload)


def _model(state: State) -> ModelFacts:
    assert state.model is not None, "the caller checks that there is a model"
    return state.model


def _memory_of_gpu(state: State) -> int:
    return parse_bytes(state.answers["gpu_memory"]) or 0


def _wrap(state: State) -> dict[str, Any]:
    """Return the settings of the wrap policy that the wizard offers as default."""
    model = _model(state)
    if model.declares_layers:
        return {"wrap.policy": "transformer"}
    if model.layers:
        return {"wrap.policy": "transformer", "wrap.classes": list(model.layers)}
    return {"wrap.policy": "size", "wrap.min_num_params": USUAL_MIN_NUM_PARAMS}


def _answers_of(row: AdviceRow) -> dict[str, Any]:
    """Return the settings of a row, and its answers to questions that are not settings."""
    choice = row.choice
    settings = {name: value for name, value in row.settings.items() if name != "fsdp.version"}
    return {**settings, "micro_batch": choice.micro_batch, "sync_each_batch": choice.sync_each_batch}


def _limits(row: AdviceRow, state: State) -> list[str]:
    return list(stock_limits(row.settings, state.version, gpus=state.gpus))


def _table(rows: Sequence[AdviceRow], best: AdviceRow | None, width: int | None) -> str:
    """Return the first row of each combination of strategy and checkpointing, and the recommended one."""
    first: dict[str, AdviceRow] = {}
    for row in rows:
        first.setdefault(_strategy(row), row)
    shown = [row for row in first.values() if row is not best][:_MAX_ROWS]
    if best is not None:
        shown = sorted([*shown[: _MAX_ROWS - 1], best], key=rows.index)
    lines = [("", "strategy", "batch", "memory", "tokens/s")]
    for row in shown:
        speed = f"{row.tokens_per_second:,.0f}" if row.tokens_per_second else "–"
        mark = "»" if row is best else ""
        lines.append((mark, _strategy(row), str(row.choice.micro_batch), format_memory(row.needed_bytes), speed))
    has_speed = any(row.tokens_per_second for row in shown)
    return fit_table(lines if has_speed else [line[:-1] for line in lines], width)


def _strategy(row: AdviceRow) -> str:
    """Return the settings of a row: ``hybrid_shard 2×8, full checkpointing``."""
    sharding, choice = row.choice.sharding, row.choice
    mesh = f" {sharding.replicate}×{sharding.shard}" if STRATEGIES[sharding.strategy].hybrid else ""
    parts = [f"{sharding.strategy}{mesh}"]
    parts += [f"{choice.checkpointing} checkpointing"] if choice.checkpointing != "none" else []
    parts += ["offload of activations"] if choice.offload_activations else []
    parts += ["offload of parameters"] if choice.offload_params else []
    return ", ".join(parts)


def _conclusion(advice: Advice, best: AdviceRow | None, state: State) -> str:
    if not advice.fitting:
        return " ".join(["Nothing fits.", *advice.remedies])
    fastest = advice.fitting[0]
    limits = " ".join(_limits(fastest, state))
    if best is None:
        return f"Nothing that fits runs with stock Accelerate. {limits}"
    basis = "the fastest that fits" if best.time is not None else "it fits, with least recomputation and communication"
    return f"Recommended (»): {basis}." + (f" {limits}" if best is not fastest else "")
