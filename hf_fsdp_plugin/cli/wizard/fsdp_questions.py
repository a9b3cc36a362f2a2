"""The questions on FSDP: what is sharded, how the model is divided into units, and what is stored where."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from hf_fsdp_plugin.cli.wizard.question import YES_NO, Choice, Default, Question, State, whole_number
from hf_fsdp_plugin.spec.values import InvalidValue, is_class_name, parse_value
from hf_fsdp_plugin.strategies import STRATEGIES
from hf_fsdp_plugin.text import format_names
from hf_fsdp_plugin.vocabulary import BY_NAME

_STRATEGIES: Final = {
    "full_shard": "shards parameters, gradients and optimizer state (ZeRO-3): least memory",
    "shard_grad_op": "keeps gathered parameters until backward (ZeRO-2): faster, more memory",
    "no_shard": "every rank has the whole model (DDP): fastest if it fits",
    "hybrid_shard": "full_shard within a group of ranks, which are replicated",
    "hybrid_shard_zero2": "shard_grad_op within a group of ranks, which are replicated",
}
USUAL_MIN_NUM_PARAMS = 100_000_000
"""The default of ``accelerate config``."""


def _strategy_choices(state: State) -> Sequence[Choice]:
    return tuple(
        Choice(value=name, label=name, about=_STRATEGIES[name])
        for name in STRATEGIES
        if not STRATEGIES[name].hybrid or _largest_group(state.world_size) > 1
    )


def is_hybrid(state: State) -> bool:
    return bool(state.answers.get("strategy")) and STRATEGIES[state.answers["strategy"]].hybrid


def _group_size(state: State) -> Default:
    if state.version == 1 and state.gpus > 1:
        reason = "the ranks of a machine, the only size that stock Accelerate supports"
        more = "; on one machine this is the same as without groups" if state.num_machines == 1 else ""
        return Default(value=state.gpus, reason=reason + more)
    if state.num_machines > 1 and state.gpus > 1:
        return Default(value=state.gpus, reason="one group per machine, so that all-gathers stay in the machine")
    size = _largest_group(state.world_size)
    return Default(value=size, reason=f"{state.world_size // size} groups")


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
        return Default(value="transformer", reason="layers are gathered one at a time")
    if state.model.layers:
        return Default(value="transformer", reason=f"one unit per layer: {state.model.layers_text}")
    return Default(value="size", reason=f"{state.model.class_name} has no repeated layer class")


def _classes(state: State) -> Default:
    if state.model is None or state.model.declares_layers:
        named = f": {state.model.layers_text}" if state.model is not None else ""
        return Default(value="", reason=f"the classes that the model declares{named}")
    return Default(value=",".join(state.model.layers), reason="repeated layers; the model declares no classes")


def _parse_classes(text: str, state: State) -> str:
    if not text:
        if state.model is not None and not state.model.declares_layers:
            raise ValueError(f"{state.model.class_name} declares no layer classes. Name one.")
        return ""
    try:
        names = parse_value(BY_NAME["wrap.classes"], text)
    except InvalidValue as error:
        raise ValueError(f"{text[:80]!r} is not valid; expected {error.expected}.") from None
    for name in names:
        if not is_class_name(name):
            raise ValueError(f"{name[:80]!r} is not a class name.")
        if state.model is not None and name not in state.model.classes:
            raise ValueError(
                f"{state.model.class_name} has no {name}. It has {format_names(list(state.model.classes), 6)}."
            )
    return ",".join(names)


def _parse_min_num_params(text: str, state: State) -> int:
    try:
        count = int(parse_value(BY_NAME["wrap.min_num_params"], text))
    except InvalidValue as error:
        raise ValueError(f"{text[:40]!r} is not valid; expected {error.expected}.") from None
    if count < 1:
        raise ValueError("the threshold must be above 0.")
    return count


def _checkpointing(state: State) -> Default:
    return Default(value="none", reason="no recomputation; choose full if memory is short")


QUESTIONS = (
    Question(
        name="strategy",
        text="Sharding strategy",
        help="sharding strategy",
        setting="sharding.strategy",
        default=lambda state: Default(value="full_shard", reason="least memory; needs one more all-gather per unit"),
        choices=_strategy_choices,
    ),
    Question(
        name="group_size",
        text="Ranks that share one copy of the model",
        help="for hybrid strategies: ranks that share one copy of the model",
        setting="mesh.shard",
        default=_group_size,
        parse=_parse_group_size,
        asked=is_hybrid,
    ),
    Question(
        name="wrap_policy",
        text="Units of the model (wrap policy)",
        help="how the model is divided into units",
        setting="wrap.policy",
        default=_wrap_policy,
        choices=lambda state: (
            Choice(value="transformer", label="transformer", about="one unit per layer, by class name"),
            Choice(value="size", label="size", about="units of at least a number of parameters"),
            Choice(value="none", label="none", about="one unit: the whole model is gathered at once"),
        ),
    ),
    Question(
        name="wrap_classes",
        text="Layer classes, separated by commas (empty for those that the model declares)",
        help="layer classes that become units, separated by commas",
        setting="wrap.classes",
        default=_classes,
        parse=_parse_classes,
        asked=lambda state: state.answers["wrap_policy"] == "transformer",
        about="each module of these classes is one unit",
    ),
    Question(
        name="min_num_params",
        text="Parameters of the smallest unit",
        help="for the wrap policy size: parameters of the smallest unit",
        setting="wrap.min_num_params",
        default=lambda state: Default(value=USUAL_MIN_NUM_PARAMS, reason="the default of accelerate config"),
        parse=_parse_min_num_params,
        asked=lambda state: state.answers["wrap_policy"] == "size",
        about="parameters of the smallest unit",
    ),
    Question(
        name="offload",
        text="Offload parameters, gradients and optimizer state to the CPU",
        help="offload parameters, gradients and optimizer state to the CPU: yes or no",
        setting="offload.params",
        default=lambda state: Default(value=False, reason="faster; the optimizer would run on the CPU"),
        choices=lambda state: YES_NO,
        about="frees GPU memory; the optimizer runs on the CPU, which is slow",
    ),
    Question(
        name="checkpointing",
        text="Activation checkpointing",
        help="activation checkpointing: none, full or selective",
        setting="activation.checkpointing",
        default=_checkpointing,
        choices=lambda state: (
            Choice(value="none", label="none", about="keeps all activations: fastest"),
            Choice(
                value="full", label="full", about="recomputes each unit in backward: about a third more computation"
            ),
            Choice(value="selective", label="selective", about="recomputes all but attention and half of the matmuls"),
        ),
    ),
    Question(
        name="activation_offload",
        text="Offload checkpointed activations to the CPU",
        help="offload checkpointed activations to the CPU: yes or no",
        setting="activation.offload",
        default=lambda state: Default(value=False, reason="the inputs of the units stay on the GPU"),
        choices=lambda state: YES_NO,
        asked=lambda state: state.answers["checkpointing"] != "none",
        about="for long sequences: the inputs of the units are kept in CPU memory",
    ),
    Question(
        name="state_dict",
        text="Content of checkpoints (state dict type)",
        help="content of checkpoints: sharded, full or local",
        setting="checkpoint.state_dict",
        default=lambda state: Default(
            value="sharded", reason="every rank writes its part; resumes on any number of GPUs"
        ),
        choices=lambda state: (
            Choice(value="sharded", label="sharded", about="every rank writes its part: fast, for any number of GPUs"),
            Choice(
                value="full", label="full", about="rank 0 gathers and writes the whole model: slow for large models"
            ),
            Choice(value="local", label="local", about="every rank writes one file, without communication"),
        ),
    ),
    Question(
        name="ram_efficient_loading",
        text="RAM-efficient loading",
        help="load the weights once per machine: yes or no",
        setting="loading.ram_efficient",
        default=lambda state: Default(value=True, reason="a machine holds the weights once, not once per GPU"),
        choices=lambda state: YES_NO,
        about="each rank loads all weights",
    ),
    Question(
        name="details",
        text="Review the remaining settings (prefetching, asynchronous checkpoints, ...)",
        help="ask for the remaining settings too: yes or no",
        default=lambda state: Default(value=False, reason="their defaults fit most runs"),
        choices=lambda state: YES_NO,
    ),
)
