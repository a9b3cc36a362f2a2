"""The questions on FSDP, those that are asked only after ``details``, and the list of all questions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from hf_fsdp_plugin.cli.wizard.question import Choice, Default, Question, State, parse_setting, whole_number
from hf_fsdp_plugin.cli.wizard.run_questions import RUN_QUESTIONS
from hf_fsdp_plugin.spec.values import is_class_name
from hf_fsdp_plugin.strategies import STRATEGIES
from hf_fsdp_plugin.text import format_names

USUAL_MIN_NUM_PARAMS: Final = 100_000_000
"""The default of ``accelerate config``."""
_STRATEGIES: Final = {
    "full_shard": "shards parameters, gradients and optimizer state (ZeRO-3): least memory",
    "shard_grad_op": "keeps gathered parameters until backward (ZeRO-2): faster, more memory",
    "no_shard": "every rank has the whole model (DDP): fastest if it fits",
    "hybrid_shard": "full_shard within a group of ranks, which are replicated",
    "hybrid_shard_zero2": "shard_grad_op within a group of ranks, which are replicated",
}


def _strategy_choices(state: State) -> tuple[Choice, ...]:
    has_groups = _largest_group(state.world_size) > 1
    return tuple(Choice(name, _STRATEGIES[name]) for name, row in STRATEGIES.items() if has_groups or not row.hybrid)


def is_hybrid(state: State) -> bool:
    """Return whether the strategy has groups of ranks."""
    return bool(state.answers.get("strategy")) and STRATEGIES[state.answers["strategy"]].hybrid


def _group_size(state: State) -> Default:
    if state.version == 1 and state.gpus > 1:
        reason = "the ranks of a machine, the only size that stock Accelerate supports"
        more = "; on one machine this is the same as without groups" if state.num_machines == 1 else ""
        return Default(state.gpus, reason + more)
    if state.num_machines > 1 and state.gpus > 1:
        return Default(state.gpus, "one group per machine, so that all-gathers stay in the machine")
    size = _largest_group(state.world_size)
    return Default(size, f"{state.world_size // size} groups")


def _largest_group(world_size: int) -> int:
    """Return the largest number of ranks of several equal groups; 1 if there are no such groups."""
    return next((world_size // n for n in range(2, math.isqrt(world_size) + 1) if world_size % n == 0), 1)


def _parse_group_size(text: str, state: State) -> int:
    size = whole_number(text, minimum=2, maximum=state.world_size)
    if state.world_size % size:
        divisors = [str(n) for n in range(2, min(state.world_size, 1 << 12) + 1) if state.world_size % n == 0]
        raise ValueError(f"{size} does not divide the {state.world_size:,} ranks. Use {format_names(divisors, 8)}.")
    return size


def _wrap_policy(state: State) -> Default:
    if state.model is None:
        return Default("transformer", "layers are gathered one at a time")
    if state.model.layers:
        return Default("transformer", f"one unit per layer: {state.model.layers_text}")
    return Default("size", f"{state.model.class_name} has no repeated layer class")


def _classes(state: State) -> Default:
    if state.model is None or state.model.declares_layers:
        named = f": {state.model.layers_text}" if state.model is not None else ""
        return Default("", f"the classes that the model declares{named}")
    return Default(",".join(state.model.layers), "repeated layers; the model declares no classes")


def _parse_classes(text: str, state: State) -> str:
    model = state.model
    if not text and model is not None and not model.declares_layers:
        raise ValueError(f"{model.class_name} declares no layer classes. Name one.")
    names = parse_setting("wrap.classes", text) if text else ()
    for name in names:
        if not is_class_name(name):
            raise ValueError(f"{name[:80]!r} is not a class name.")
        if model is not None and name not in model.classes:
            raise ValueError(f"{model.class_name} has no {name}. It has {format_names(list(model.classes), 6)}.")
    return ",".join(names)


def _parse_min_num_params(text: str, state: State) -> int:
    count = int(parse_setting("wrap.min_num_params", text))
    if count < 1:
        raise ValueError("the threshold must be above 0.")
    return count


def _backward_prefetch(state: State) -> Default:
    reason = "the next unit is gathered while gradients are computed"
    return Default("pre", reason if state.version == 1 else f"{reason}, as FSDP2 always does by default")


def _is_fsdp1(state: State) -> bool:
    return state.version == 1


_FSDP: Final = (
    Question(
        name="strategy",
        text="Sharding strategy",
        setting="sharding.strategy",
        default=Default("full_shard", "least memory; needs one more all-gather per unit"),
        choices=_strategy_choices,
    ),
    Question(
        name="group_size",
        text="Ranks that share one copy of the model",
        setting="mesh.shard",
        default=_group_size,
        parse=_parse_group_size,
        asked=is_hybrid,
    ),
    Question(
        name="wrap_policy",
        text="Units of the model (wrap policy)",
        setting="wrap.policy",
        default=_wrap_policy,
        choices=(
            Choice("transformer", "one unit per layer, by class name"),
            Choice("size", "units of at least a number of parameters"),
            Choice("none", "one unit: the whole model is gathered at once"),
        ),
    ),
    Question(
        name="wrap_classes",
        text="Layer classes, separated by commas (empty for those that the model declares)",
        setting="wrap.classes",
        default=_classes,
        parse=_parse_classes,
        asked=lambda state: state.answers["wrap_policy"] == "transformer",
        about="each module of these classes is one unit",
    ),
    Question(
        name="min_num_params",
        text="Parameters of the smallest unit",
        setting="wrap.min_num_params",
        default=Default(USUAL_MIN_NUM_PARAMS, "the default of accelerate config"),
        parse=_parse_min_num_params,
        asked=lambda state: state.answers["wrap_policy"] == "size",
        about="parameters of the smallest unit",
    ),
    Question(
        name="offload",
        text="Offload parameters, gradients and optimizer state to the CPU",
        setting="offload.params",
        default=Default(value=False, reason="faster; the optimizer would run on the CPU"),
        about="frees GPU memory; the optimizer runs on the CPU, which is slow",
    ),
    Question(
        name="checkpointing",
        text="Activation checkpointing",
        setting="activation.checkpointing",
        default=Default("none", "no recomputation; choose full if memory is short"),
        choices=(
            Choice("none", "keeps all activations: fastest"),
            Choice("full", "recomputes each unit in backward: about a third more computation"),
            Choice("selective", "recomputes all but attention and half of the matmuls"),
        ),
    ),
    Question(
        name="activation_offload",
        text="Offload checkpointed activations to the CPU",
        setting="activation.offload",
        default=Default(value=False, reason="the inputs of the units stay on the GPU"),
        asked=lambda state: state.answers["checkpointing"] != "none",
        about="for long sequences: the inputs of the units are kept in CPU memory",
    ),
    Question(
        name="state_dict",
        text="Content of checkpoints (state dict type)",
        setting="checkpoint.state_dict",
        default=Default("sharded", "every rank writes its part; resumes on any number of GPUs"),
        choices=(
            Choice("sharded", "every rank writes its part: fast, for any number of GPUs"),
            Choice("full", "rank 0 gathers and writes the whole model: slow for large models"),
            Choice("local", "the same files as sharded, for configs that name it"),
        ),
    ),
    Question(
        name="ram_efficient_loading",
        text="RAM-efficient loading",
        setting="loading.ram_efficient",
        default=Default(value=True, reason="a machine holds the weights once, not once per GPU"),
        about="each rank loads all weights",
    ),
    Question(
        name="details",
        text="Review the remaining settings (prefetching, asynchronous checkpoints, ...)",
        default=Default(value=False, reason="their defaults fit most runs"),
    ),
)
DETAILS: Final = (
    Question(
        name="backward_prefetch",
        text="Backward prefetch",
        setting="prefetch.backward",
        default=_backward_prefetch,
        choices=(
            Choice("pre", "gathers the next unit while gradients are computed: fastest"),
            Choice("post", "gathers the next unit after the gradients: less memory"),
            Choice("none", "gathers a unit when it is needed: least memory"),
        ),
    ),
    Question(
        name="forward_prefetch",
        text="Forward prefetch",
        setting="prefetch.forward",
        default=Default(value=False, reason="helps only if the CPU is slower than the GPU"),
        about="the next unit is gathered during the forward of the current one",
    ),
    Question(
        name="limit_all_gathers",
        text="Limit the all-gathers in flight (FSDP1)",
        setting="prefetch.limit_all_gathers",
        default=Default(value=True, reason="at most two units are gathered at a time"),
        asked=_is_fsdp1,
        about="more memory: the CPU may start any number of all-gathers",
    ),
    Question(
        name="use_orig_params",
        text="Keep the original parameters (use_orig_params of FSDP1)",
        setting="params.use_orig",
        default=Default(value=True, reason="for frozen parameters, parameter groups and torch.compile"),
        asked=_is_fsdp1,
        about="the optimizer sees one flat parameter per unit",
    ),
    Question(
        name="sync_module_states",
        text="Broadcast the weights of rank 0 before sharding (FSDP1)",
        setting="loading.sync_module_states",
        default=Default(value=True, reason="all ranks begin with the weights of rank 0"),
        asked=lambda state: _is_fsdp1(state) and not state.answers["ram_efficient_loading"],
        about="every rank must load the same weights",
    ),
    Question(
        name="pin_memory",
        text="Pin the CPU memory of offloaded parameters",
        setting="offload.pin_memory",
        default=Default(value=True, reason="copies overlap with computation"),
        asked=lambda state: bool(state.answers["offload"]),
        about="for machines with little CPU memory",
    ),
    Question(
        name="async_save",
        text="Write checkpoints in the background",
        setting="checkpoint.asynchronous",
        default=Default(value=False, reason="needs a copy of the shards in CPU memory"),
        about="training pauses only for the copy to CPU memory",
    ),
)
QUESTIONS: Final = (*RUN_QUESTIONS, *_FSDP, *DETAILS)
BY_NAME: Final[Mapping[str, Question]] = {question.name: question for question in QUESTIONS}
BY_SETTING: Final[Mapping[str, Question]] = {question.setting: question for question in QUESTIONS if question.setting}
