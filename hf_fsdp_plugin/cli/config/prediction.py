"""The model of the wizard, the settings that the planner recommends for it, and the memory of the chosen ones."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from hf_fsdp_plugin.cli.check_output import load_model
from hf_fsdp_plugin.cli.config.question import ModelFacts, State
from hf_fsdp_plugin.cli.config.questions import USUAL_MIN_NUM_PARAMS
from hf_fsdp_plugin.cli.config_text import stock_limits
from hf_fsdp_plugin.problems import SpecError
from hf_fsdp_plugin.spec.fsdp_spec import FsdpSpec
from hf_fsdp_plugin.text import format_memory, parse_bytes

if TYPE_CHECKING:
    from torch import nn

    from hf_fsdp_plugin.estimate.planner.advice import Advice
    from hf_fsdp_plugin.estimate.results import MemoryEstimate

T = TypeVar("T")


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
    from hf_fsdp_plugin.cli.plan.advise import rows_table

    advice, failure = _attempt(lambda: advice_of(state, parse_bytes(state.answers["gpu_memory"]) or 0))
    if advice is None:
        return f"No prediction: {failure}", {}
    limit = format_memory(advice.limit)
    text = f"Predicted per GPU of {format_memory(advice.gpu_memory)}, of which {limit} may be used:\n\n"
    if not advice.fitting:
        return text + " ".join(["Nothing fits.", *advice.remedies]), {}
    limits = {id(row): " ".join(stock_limits(row.settings, state.version, gpus=state.gpus)) for row in advice.fitting}
    best = next((row for row in advice.fitting if not limits[id(row)]), None)  # stock Accelerate runs it, too
    text += f"{rows_table(advice.fitting, best, width)}\n\n"
    of_fastest = limits[id(advice.fitting[0])]
    if best is None:
        return f"{text}Nothing that fits runs with stock Accelerate. {of_fastest}", {}
    basis = "the fastest that fits" if best.time is not None else "it fits, with least recomputation and communication"
    settings = {name: value for name, value in best.settings.items() if name != "fsdp.version"}
    answers = {"micro_batch": best.choice.micro_batch, "sync_each_batch": best.choice.sync_each_batch}
    return f"{text}Recommended (»): {basis}. {of_fastest}".rstrip(), settings | answers


def predict_memory(state: State, spec: FsdpSpec) -> tuple[MemoryEstimate | None, str]:
    """Return the predicted memory of the chosen settings, and its text; ``None`` without a model or a prediction."""
    model, size = state.model, parse_bytes(state.answers.get("gpu_memory", ""))
    memory, _ = _attempt(lambda: _estimate(state, model.model, spec)) if model is not None else (None, "")
    if memory is None:
        return None, ""
    of = f" of {format_memory(size)}" if size else ""
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

    answers, model = state.answers, state.model
    assert model is not None, "the caller checks that there is a model"
    wrap: dict[str, Any] = {"wrap.policy": "transformer"}  # what the wizard offers as default
    if not model.layers:
        wrap = {"wrap.policy": "size", "wrap.min_num_params": USUAL_MIN_NUM_PARAMS}
    elif not model.declares_layers:
        wrap["wrap.classes"] = list(model.layers)
    return advise(
        model.model,
        Workload(micro_batch=1, seq_len=int(answers["seq_len"]), optimizer=answers["optimizer"]),
        global_batch=int(answers["global_batch"]),
        gpu_memory=gpu_memory,
        num_machines=state.num_machines,
        gpus_per_machine=state.gpus,
        machine=state.named_machine(),
        version=1 if state.version == 1 else 2,
        precision="auto" if answers["precision"] == "no" else answers["precision"],
        wrap=wrap,
    )


def _estimate(state: State, model: nn.Module, spec: FsdpSpec) -> MemoryEstimate:
    from hf_fsdp_plugin.estimate.memory.peak import estimate_memory
    from hf_fsdp_plugin.estimate.workload import Workload
    from hf_fsdp_plugin.plan.resolve import resolve

    answers = state.answers
    plan = resolve(spec, model, world_size=state.world_size, device_type="cpu" if state.cpu else "cuda")
    workload = Workload(
        micro_batch=int(answers["micro_batch"]),
        seq_len=int(answers["seq_len"]),
        accumulation=state.accumulation,
        sync_each_batch=bool(answers.get("sync_each_batch", False)),
        optimizer=answers["optimizer"],
    )
    return estimate_memory(plan, model, workload)
