"""The questions of ``hf-fsdp config``: what is computed for them, and what the answers mean: settings and comments.

Their texts are in ``questions.yaml``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import yaml

from hf_fsdp_plugin.spec.value_parsers import InvalidValue, is_class_name, parse_value
from hf_fsdp_plugin.strategies import STRATEGIES
from hf_fsdp_plugin.text import format_memory, format_names
from hf_fsdp_plugin.tools.common import SIZE_SPELLINGS, nearest_multiples, parse_bytes
from hf_fsdp_plugin.tools.config.conversation import USUAL_MIN_NUM_PARAMS, Default, Question, State
from hf_fsdp_plugin.vocabulary import BY_NAME as ROWS_BY_NAME

_FSDP1: Final = {"prefetch.backward": "pre", "params.use_orig": True}
"""Settings that are written for FSDP1, because stock Accelerate has other defaults, and their values."""
USUAL_GPUS: Final = 8
USUAL_SEQ_LEN: Final = 4096
MAX_BATCH: Final = 1 << 24
"""Largest batch, and longest sequence, that an answer may give."""
MAX_RANKS: Final = 1 << 20


def _parse_setting(name: str, text: str) -> Any:
    """Return the value of a setting that a text means. Raises ``ValueError`` with what is expected."""
    try:
        return parse_value(ROWS_BY_NAME[name], text)
    except InvalidValue as error:
        raise ValueError(f"{text[:80]!r} is not valid; expected {error.expected}.") from None


def _integer(minimum: int, maximum: int | Callable[[State], int]) -> Callable[[str, State], int]:
    """Return the parser of a whole number, which may have thousands separators."""

    def parse(text: str, state: State) -> int:
        largest = maximum(state) if callable(maximum) else maximum
        digits = text.replace(",", "").replace("_", "")
        shown = text if len(text) <= 40 else f"{text[:37]}..."
        if not (digits.isdecimal() and digits.isascii()):
            raise ValueError(f"{shown!r} is not a whole number.")
        if len(digits) > 20 or not minimum <= int(digits) <= largest:
            raise ValueError(f"{shown} is not between {minimum:,} and {largest:,}.")
        return int(digits)

    return parse


_parse_size = _integer(1, MAX_BATCH)


def _gpus(state: State) -> Default:
    launch, found = state.existing.launch, state.machine()
    if launch.num_processes != "auto":
        return Default(max(1, launch.num_processes // launch.num_machines), f"as in {state.path}")
    if state.cpu:
        return Default(2, "the smallest number of CPU ranks for which FSDP shards")
    if found.count:
        return Default(found.count, f"found on this machine: {f'{found.name}, ' if found.name else ''}{found.kind}")
    return Default(USUAL_GPUS, "torch finds no GPU here; machines for training usually have 8")


def _gpu_memory(state: State) -> Default:
    found = state.machine()
    if found.memory_bytes:
        return Default(format_memory(found.memory_bytes), f"of the {found.name} found here")
    return Default("", "torch finds no GPU here; without a size, nothing is compared with it")


def _parse_memory(text: str, state: State) -> str:
    if text and parse_bytes(text) is None:
        raise ValueError(f"{text[:40]!r} is not a size of memory. Write {SIZE_SPELLINGS}.")
    return text


def _seq_len(state: State) -> Default:
    longest = state.model.max_seq_len if state.model is not None else 0
    if 0 < longest <= USUAL_SEQ_LEN:
        return Default(longest, "the longest sequence of this model")
    return Default(USUAL_SEQ_LEN, "a usual length; activations grow with it")


def _parse_seq_len(text: str, state: State) -> int:
    seq_len = _parse_size(text, state)
    longest = state.model.max_seq_len if state.model is not None else 0
    if longest and seq_len > longest:
        raise ValueError(f"{seq_len:,} is longer than {longest:,}, the longest sequence of the model.")
    return seq_len


def _global_batch(state: State) -> Default:
    return Default(state.world_size, "one sample per rank; use the batch size of your recipe")


def _parse_global_batch(text: str, state: State) -> int:
    batch = _parse_size(text, state)
    if batch % state.world_size:
        near = nearest_multiples(batch, state.world_size)
        raise ValueError(f"{batch:,} is not divisible by the {state.world_size:,} ranks. Nearest: {near}.")
    return batch


def _parse_micro_batch(text: str, state: State) -> int:
    micro_batch = _parse_size(text, state)
    if state.samples_of_rank % micro_batch:
        raise ValueError(f"{micro_batch:,} does not divide {state.samples_of_rank:,}, the samples of a rank and step.")
    return micro_batch


def _parse_context_size(text: str, state: State) -> int:
    size = _integer(1, state.gpus)(text, state)
    if state.gpus % size:
        raise ValueError(f"{size} does not divide the {state.gpus} GPUs of a machine.")
    if size > 1 and int(state.answers["seq_len"]) % (2 * size):
        raise ValueError(f"the sequence length is not divisible by {2 * size}, two parts for each of {size} ranks.")
    return size


def _needs_context(state: State) -> bool:
    """Whether the model fits only if ranks divide each sequence, or the file has such an axis."""
    wanted = max(state.recommended.get("mesh.context", 1), state.existing.mesh.context)
    return state.version == 2 and state.model is not None and wanted > 1


def _is_strategy_possible(strategy: str, state: State) -> bool:
    """Whether the ranks can be divided into the groups of a hybrid strategy."""
    return not STRATEGIES[strategy].hybrid or (_largest_group(state.world_size) > 1 and state.context == 1)


def _largest_group(world_size: int) -> int:
    """Return the largest number of ranks of several equal groups; 1 if there are no such groups."""
    return next((world_size // n for n in range(2, math.isqrt(world_size) + 1) if world_size % n == 0), 1)


def _group_size(state: State) -> Default:
    if state.gpus > 1 and (state.num_machines > 1 or state.version == 1):
        stock = ", the only size that stock Accelerate supports under FSDP1" if state.version == 1 else ""
        return Default(state.gpus, f"one group per machine{stock}")
    size = _largest_group(state.world_size)
    return Default(size, f"{state.world_size // size} groups")


def _parse_group_size(text: str, state: State) -> int:
    size = _integer(2, state.world_size)(text, state)
    if state.world_size % size:
        divisors = [n for n in range(2, min(state.world_size, 1 << 12) + 1) if state.world_size % n == 0]
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
    names = _parse_setting("wrap.classes", text) if text else ()
    for name in names:
        if not is_class_name(name):
            raise ValueError(f"{name[:80]!r} is not a class name.")
        if model is not None and name not in model.classes:
            raise ValueError(f"{model.class_name} has no {name}. It has {format_names(list(model.classes), 6)}.")
    return ",".join(names)


def _parse_min_num_params(text: str, state: State) -> int:
    count = int(_parse_setting("wrap.min_num_params", text))
    if count < 1:
        raise ValueError("the threshold must be above 0.")
    return count


def _has_model(state: State) -> bool:
    return state.model is not None


def _has_policy(policy: str) -> Callable[[State], bool]:
    return lambda state: state.answers["wrap_policy"] == policy


def _has_machines(state: State) -> bool:
    return state.num_machines > 1


def _may_offload_state(state: State) -> bool:
    """Whether the optimizer state may be in CPU memory alone: if it is so in the existing file, or is recommended."""
    is_found = state.existing.offload.optimizer or bool(state.recommended.get("offload.optimizer"))
    return is_found and not state.answers["offload"]


_FUNCTIONS: Final[Mapping[str, Mapping[str, Any]]] = {
    "num_machines": {"parse": _integer(1, MAX_RANKS)},
    "gpus": {"default": _gpus, "parse": _integer(1, lambda state: MAX_RANKS // state.num_machines)},
    "gpu_memory": {"default": _gpu_memory, "parse": _parse_memory, "asked": _has_model},
    "machine_rank": {"parse": _integer(0, lambda state: state.num_machines - 1), "asked": _has_machines},
    "main_process_ip": {
        "parse": lambda text, state: _parse_setting("launch.main_process_ip", text) if text else "",
        "asked": _has_machines,
    },
    "main_process_port": {"parse": _integer(1, 65535), "asked": _has_machines},
    "seq_len": {"default": _seq_len, "parse": _parse_seq_len, "asked": _has_model},
    "optimizer": {"asked": _has_model},
    "global_batch": {"default": _global_batch, "parse": _parse_global_batch},
    "context_size": {"parse": _parse_context_size, "asked": _needs_context},
    "micro_batch": {"parse": _parse_micro_batch},
    "sync_each_batch": {"asked": lambda state: _has_model(state) and state.accumulation > 1},
    "strategy": {"offered": _is_strategy_possible},
    "group_size": {"default": _group_size, "parse": _parse_group_size, "asked": lambda state: state.is_hybrid},
    "wrap_policy": {"default": _wrap_policy},
    "wrap_classes": {"default": _classes, "parse": _parse_classes, "asked": _has_policy("transformer")},
    "min_num_params": {
        "default": USUAL_MIN_NUM_PARAMS, "parse": _parse_min_num_params, "asked": _has_policy("size"),
    },
    "offload_optimizer": {"asked": _may_offload_state},
    "activation_offload": {"asked": lambda state: state.answers["checkpointing"] != "none"},
}  # fmt: skip
"""Name of a question -> the fields that the table in ``questions.yaml`` cannot contain."""
_TABLE: Final = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
QUESTIONS: Final = tuple(Question(**row, **_FUNCTIONS.get(row["name"], {})) for row in _TABLE)
BY_NAME: Final[Mapping[str, Question]] = {question.name: question for question in QUESTIONS}
BY_SETTING: Final[Mapping[str, Question]] = {question.setting: question for question in QUESTIONS if question.setting}


def settings_of(state: State) -> dict[str, Any]:
    """Return the settings that the answers mean, by canonical name, in the order of a new file."""
    answers = state.answers
    found: dict[str, Any] = {"launch.distributed_type": "FSDP", "launch.num_processes": state.world_size}
    if state.cpu:
        found["launch.use_cpu"] = True
    for name, question in BY_SETTING.items():
        if question.name in answers and not (answers[question.name] == "" and name != "wrap.classes"):
            found[name] = answers[question.name]
    if state.version == 1:
        written = _FSDP1 if answers["ram_efficient_loading"] else {**_FSDP1, "loading.sync_module_states": True}
        given = {name: state.existing.get(name) for name in written if state.existing.asked(name)}
        found |= {**written, **given}
    if "wrap.classes" in found:
        found["wrap.classes"] = tuple(word for word in found["wrap.classes"].split(",") if word)
    if state.context > 1:
        found["mesh.shard"] = state.world_size // state.context  # stock Accelerate computes no size
    elif not state.existing.asked("mesh.context"):
        found.pop("mesh.context", None)
    if state.is_hybrid:
        found["mesh.replicate"] = state.world_size // found["mesh.shard"]
        if state.version == 1 and found["mesh.shard"] == state.gpus:
            # FSDP1 shards within a machine by default, and stock Accelerate refuses a mesh with it.
            del found["mesh.shard"], found["mesh.replicate"]
    return found


def fixed_settings(state: State) -> dict[str, Any]:
    """Return the settings of a new file that no question sets."""
    found = {"launch.compute_environment": "LOCAL_MACHINE", "launch.machine_rank": 0, "launch.use_cpu": state.cpu}
    return found if state.num_machines == 1 else {**found, "launch.rdzv_backend": "static", "launch.same_network": True}


def unused_settings(state: State, settings: Mapping[str, Any]) -> set[str]:
    """Return the settings that the answers leave without a meaning, whose keys are removed from an existing file."""
    unused = {name for name in BY_SETTING if not name.startswith(("launch.", "mesh."))}
    unused.add("loading.sync_module_states")
    if state.version == 2:
        unused |= {"params.use_orig", "prefetch.limit_all_gathers"}
    if not (state.answers["offload"] or state.answers.get("offload_optimizer")):
        unused.add("offload.pin_memory")
    if state.existing.launch.machine_rank >= state.num_machines:
        unused.add("launch.machine_rank")
    mesh = state.existing.mesh
    is_plain = STRATEGIES[settings["sharding.strategy"]].is_sharded and not state.is_hybrid
    if not (is_plain and mesh.shard in ("auto", state.world_size) and mesh.replicate in ("auto", 1)):
        unused |= {"mesh.shard", "mesh.replicate"}  # other sizes do not fit the strategy
    return unused - set(settings)


def comments_of(state: State) -> dict[str, str]:
    """Return why the settings have their values, by canonical name."""
    answered = {name: question for name, question in BY_SETTING.items() if question.name in state.answers}
    comments = {name: question.comment(state.answers[question.name], state) for name, question in answered.items()}
    if state.num_machines > 1:
        comments["launch.num_processes"] = f"{state.num_machines} machines × {state.gpus} GPUs"
    shard = "ranks with other samples" if state.context > 1 else "ranks that share one copy of the model"
    return {**comments, "mesh.shard": shard, "mesh.replicate": "copies of the model"}
