"""The questions of ``hf-fsdp config``, as a table, and what the answers mean: settings and comments."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final

from hf_fsdp_plugin.cli.config.conversation import USUAL_MIN_NUM_PARAMS, Default, Question, State
from hf_fsdp_plugin.spec.values import InvalidValue, is_class_name, parse_value
from hf_fsdp_plugin.strategies import STRATEGIES
from hf_fsdp_plugin.text import SIZE_SPELLINGS, format_memory, format_names, nearest_multiples, parse_bytes
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


_STRATEGIES: Final = {
    "full_shard": "shards parameters, gradients and optimizer state (ZeRO-3): least memory",
    "shard_grad_op": "keeps gathered parameters until backward (ZeRO-2): faster, more memory",
    "no_shard": "every rank has the whole model (DDP): fastest if it fits",
    "hybrid_shard": "full_shard within a group of ranks, which are replicated",
    "hybrid_shard_zero2": "shard_grad_op within a group of ranks, which are replicated",
}


def _strategy_choices(state: State) -> Mapping[Any, str]:
    has_groups = _largest_group(state.world_size) > 1 and state.context == 1
    return {name: about for name, about in _STRATEGIES.items() if has_groups or not STRATEGIES[name].hybrid}


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


def _has_machines(state: State) -> bool:
    return state.num_machines > 1


QUESTIONS: Final = (
    Question(name="model", text="Model (folder, config.json or hub id; empty for none)",
        default="", reason="without a model, no memory is predicted"),
    Question(name="num_machines", text="Number of machines", setting="launch.num_machines",
        default=1, reason="one machine needs no address and no port", parse=_integer(1, MAX_RANKS)),
    Question(name="gpus", text="GPUs of each machine", default=_gpus,
        parse=_integer(1, lambda state: MAX_RANKS // state.num_machines)),
    Question(name="gpu_memory", text="Memory of a GPU, such as 80GB (empty if unknown)",
        default=_gpu_memory, parse=_parse_memory, asked=_has_model),
    Question(name="machine_rank", text="Rank of this machine, from 0", setting="launch.machine_rank",
        default=0, reason="the other machines use the same file with --machine_rank", asked=_has_machines,
        parse=_integer(0, lambda state: state.num_machines - 1)),
    Question(name="main_process_ip", text="Address of machine 0 (empty to pass it as --main_process_ip)",
        setting="launch.main_process_ip", default="", reason="not in the file", asked=_has_machines,
        parse=lambda text, state: _parse_setting("launch.main_process_ip", text) if text else "",
        about="all machines connect to this address"),
    Question(name="main_process_port", text="Free port on machine 0", setting="launch.main_process_port",
        default=29500, reason="the default port of torchrun", asked=_has_machines,
        parse=_integer(1, 65535), about="must be free on machine 0"),
    Question(name="precision", text="Precision", setting="launch.mixed_precision",
        default="bf16", reason="half the memory of fp32 for activations; no loss scaling",
        choices={"bf16": "compute in bf16, update in fp32; for A100, H100 and newer GPUs",
                 "fp16": "compute in fp16 with loss scaling; for V100 and T4",
                 "no": "compute in the dtype of the model"}),
    Question(name="seq_len", text="Sequence length in tokens",
        default=_seq_len, parse=_parse_seq_len, asked=_has_model),
    Question(name="optimizer", text="Optimizer", asked=_has_model,
        default="adamw", reason="the Trainer's default: 8 bytes of state per parameter",
        choices={"adamw": "two fp32 values per parameter",
                 "sgd": "no state without momentum",
                 "adafactor": "rows and columns of the second moment",
                 "adamw_8bit": "two 8-bit values per parameter (bitsandbytes)",
                 "muon": "one value per parameter of a matrix"}),
    Question(name="global_batch", text="Samples of all ranks per optimizer step", parse=_parse_global_batch,
        default=lambda state: Default(state.world_size, "one sample per rank; use the batch size of your recipe")),
    Question(name="fsdp_version", text="FSDP version", setting="fsdp.version",
        default=2, reason="the version that PyTorch develops",
        choices={1: "FullyShardedDataParallel: flat parameters; deprecated by Transformers",
                 2: "fully_shard: one DTensor per parameter"}),
    Question(name="context_size", text="Ranks that divide each sequence (context parallelism)", setting="mesh.context",
        default=1, reason="each rank has whole sequences", asked=_needs_context, parse=_parse_context_size,
        about="each rank has a part of each sequence, for which the others send keys and values"),
    Question(name="micro_batch", text="Samples of a rank per forward pass", parse=_parse_micro_batch,
        default=1, reason="needs least memory; the rest of the batch is accumulated"),
    Question(name="sync_each_batch", text="Reduce gradients after every micro-batch (sync_each_batch)",
        default=False, reason="less communication; gradients are kept unsharded meanwhile",
        asked=lambda state: _has_model(state) and state.accumulation > 1),
    Question(name="strategy", text="Sharding strategy", setting="sharding.strategy", choices=_strategy_choices,
        default="full_shard", reason="least memory; needs one more all-gather per unit"),
    Question(name="group_size", text="Ranks that share one copy of the model", setting="mesh.shard",
        default=_group_size, parse=_parse_group_size, asked=lambda state: state.is_hybrid),
    Question(name="wrap_policy", text="Units of the model (wrap policy)", setting="wrap.policy", default=_wrap_policy,
        choices={"transformer": "one unit per layer, by class name",
                 "size": "units of at least a number of parameters",
                 "none": "one unit: the whole model is gathered at once"}),
    Question(name="wrap_classes", setting="wrap.classes",
        text="Layer classes, separated by commas (empty for those that the model declares)",
        default=_classes, parse=_parse_classes, about="each module of these classes is one unit",
        asked=lambda state: state.answers["wrap_policy"] == "transformer"),
    Question(name="min_num_params", text="Parameters of the smallest unit", setting="wrap.min_num_params",
        default=USUAL_MIN_NUM_PARAMS, reason="the default of accelerate config", parse=_parse_min_num_params,
        asked=lambda state: state.answers["wrap_policy"] == "size", about="parameters of the smallest unit"),
    Question(name="offload", text="Offload parameters, gradients and optimizer state to the CPU",
        setting="offload.params", default=False, reason="faster; the optimizer would run on the CPU",
        about="frees GPU memory; the optimizer runs on the CPU, which is slow"),
    Question(name="checkpointing", text="Activation checkpointing", setting="activation.checkpointing",
        default="none", reason="no recomputation; choose full if memory is short",
        choices={"none": "keeps all activations: fastest",
                 "full": "recomputes each unit in backward: about a third more computation",
                 "selective": "recomputes all but attention and half of the matmuls"}),
    Question(name="activation_offload", text="Offload checkpointed activations to the CPU",
        setting="activation.offload", default=False, reason="the inputs of the units stay on the GPU",
        asked=lambda state: state.answers["checkpointing"] != "none",
        about="for long sequences: the inputs of the units are kept in CPU memory"),
    Question(name="state_dict", text="Content of checkpoints (state dict type)", setting="checkpoint.state_dict",
        default="sharded", reason="every rank writes its part; resumes on any number of GPUs",
        choices={"sharded": "every rank writes its part: fast, for any number of GPUs",
                 "full": "rank 0 gathers and writes the whole model: slow for large models",
                 "local": "the same files as sharded, for configs that name it"}),
    Question(name="ram_efficient_loading", text="RAM-efficient loading", setting="loading.ram_efficient",
        default=True, reason="a machine holds the weights once, not once per GPU", about="each rank loads all weights"),
)  # fmt: skip
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
    if not state.answers["offload"]:
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
