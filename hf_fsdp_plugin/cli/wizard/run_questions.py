"""The questions on the run: model, machines, batch and precision."""

from __future__ import annotations

from typing import Final

from hf_fsdp_plugin.cli.wizard.question import YES_NO, Choice, Default, Question, State, parse_setting, whole_number
from hf_fsdp_plugin.problems import SpecError
from hf_fsdp_plugin.text import SIZE_SPELLINGS, format_bytes, parse_bytes

USUAL_GPUS: Final = 8
USUAL_SEQ_LEN: Final = 4096
MAX_BATCH: Final = 1 << 24
"""Also the longest sequence."""
_MACHINES: Final = {
    "A100-SXM4-40GB": "a100-40gb", "A100-SXM4-80GB": "a100-80gb", "H100 80GB HBM3": "h100-sxm",
    "H100 PCIe": "h100-pcie", "H200": "h200", "B200": "b200",
}  # fmt: skip
"""Part of the name of a device, as its driver gives it -> machine."""


def _machine(state: State) -> Default:
    found = state.machine().name
    known = next((machine for name, machine in _MACHINES.items() if name in found), "")
    return Default(known, f"of the {found} found here" if known else "without one, no times are predicted")


def _parse_machine(text: str, state: State) -> str:
    from hf_fsdp_plugin.estimate.machines import machine_named

    try:
        return text if text and machine_named(text).name else ""
    except SpecError as error:
        raise ValueError(" ".join(f"{problem.message} {problem.fix}" for problem in error.problems)) from None


def _gpus(state: State) -> Default:
    launch = state.existing.launch
    if launch.num_processes != "auto":
        return Default(max(1, launch.num_processes // launch.num_machines), f"as in {state.path}")
    if state.cpu:
        return Default(2, "the smallest number of CPU ranks for which FSDP shards")
    named = state.named_machine()
    if named is not None and named.ranks_per_machine:
        return Default(named.ranks_per_machine, f"of {named.name}")
    found = state.machine()
    if found.count:
        name = f"{found.name}, " if found.name else ""
        return Default(found.count, f"found on this machine: {name}{found.kind}")
    return Default(USUAL_GPUS, "torch finds no GPU here; machines for training usually have 8")


def _gpu_memory(state: State) -> Default:
    named = state.named_machine()
    if named is not None and named.memory_bytes:
        return Default(format_bytes(int(named.memory_bytes)), f"of {named.name}: {named.device}")
    found = state.machine()
    if found.memory_bytes:
        return Default(format_bytes(found.memory_bytes, binary=True), f"of the {found.name} found here")
    return Default("", "torch finds no GPU here; without a size, nothing is compared with it")


def _parse_memory(text: str, state: State) -> str:
    if text and parse_bytes(text) is None:
        raise ValueError(f"{text[:40]!r} is not a size of memory. Write {SIZE_SPELLINGS}.")
    return text


def _parse_address(text: str, state: State) -> str:
    return str(parse_setting("launch.main_process_ip", text)) if text else ""


def _longest(state: State) -> int:
    """Return the longest sequence of the model; 0 if it is unknown."""
    return state.model.max_seq_len if state.model is not None else 0


def _seq_len(state: State) -> Default:
    if 0 < _longest(state) <= USUAL_SEQ_LEN:
        return Default(_longest(state), "the longest sequence of this model")
    return Default(USUAL_SEQ_LEN, "a usual length; activations grow with it")


def _parse_seq_len(text: str, state: State) -> int:
    seq_len, longest = whole_number(text, maximum=MAX_BATCH), _longest(state)
    if longest and seq_len > longest:
        raise ValueError(f"{seq_len:,} is longer than {longest:,}, the longest sequence of the model.")
    return seq_len


def _parse_global_batch(text: str, state: State) -> int:
    batch = whole_number(text, maximum=MAX_BATCH)
    if batch % state.world_size:
        lower = batch - batch % state.world_size
        near = " or ".join(f"{size:,}" for size in (lower, lower + state.world_size) if size)
        raise ValueError(f"{batch:,} is not divisible by the {state.world_size:,} ranks. Nearest: {near}.")
    return batch


def _parse_micro_batch(text: str, state: State) -> int:
    micro_batch = whole_number(text, maximum=MAX_BATCH)
    per_rank = int(state.answers["global_batch"]) // state.world_size
    if per_rank % micro_batch:
        raise ValueError(f"{micro_batch:,} does not divide {per_rank:,}, the samples of a rank and step.")
    return micro_batch


def _recommendation(state: State) -> Default:
    if state.existing.asked("sharding.strategy"):
        return Default(value=False, reason=f"{state.path} already has these settings")
    return Default(value=True, reason="each can still be changed")


def _several_machines(state: State) -> bool:
    return state.num_machines > 1


def _has_model(state: State) -> bool:
    return state.model is not None


RUN_QUESTIONS: Final = (
    Question(
        name="model",
        text="Model (folder, config.json or hub id; empty for none)",
        default=Default("", "without a model, no memory is predicted"),
    ),
    Question(
        name="num_machines",
        text="Number of machines",
        setting="launch.num_machines",
        default=Default(1, "one machine needs no address and no port"),
        parse=lambda text, state: whole_number(text),
    ),
    Question(
        name="machine",
        text="Kind of machine, for predicted times (such as h100-sxm; empty for none)",
        default=_machine,
        parse=_parse_machine,
        asked=_has_model,
    ),
    Question(
        name="gpus",
        text="GPUs of each machine",
        default=_gpus,
        parse=lambda text, state: whole_number(text, maximum=(1 << 20) // state.num_machines),
    ),
    Question(
        name="gpu_memory",
        text="Memory of a GPU, such as 80GB (empty if unknown)",
        default=_gpu_memory,
        parse=_parse_memory,
        asked=_has_model,
    ),
    Question(
        name="machine_rank",
        text="Rank of this machine, from 0",
        setting="launch.machine_rank",
        default=Default(0, "the other machines use the same file with --machine_rank"),
        parse=lambda text, state: whole_number(text, minimum=0, maximum=state.num_machines - 1),
        asked=_several_machines,
    ),
    Question(
        name="main_process_ip",
        text="Address of machine 0 (empty to pass it as --main_process_ip)",
        setting="launch.main_process_ip",
        default=Default("", "not in the file"),
        parse=_parse_address,
        asked=_several_machines,
        about="all machines connect to this address",
    ),
    Question(
        name="main_process_port",
        text="Free port on machine 0",
        setting="launch.main_process_port",
        default=Default(29500, "the default port of torchrun"),
        parse=lambda text, state: whole_number(text, maximum=65535),
        asked=_several_machines,
        about="must be free on machine 0",
    ),
    Question(
        name="precision",
        text="Precision",
        setting="launch.mixed_precision",
        default=Default("bf16", "half the memory of fp32 for activations; no loss scaling"),
        choices=(
            Choice("bf16", "compute in bf16, update in fp32; for A100, H100 and newer GPUs"),
            Choice("fp16", "compute in fp16 with loss scaling; for V100 and T4"),
            Choice("no", "compute in the dtype of the model"),
        ),
    ),
    Question(
        name="seq_len",
        text="Sequence length in tokens",
        default=_seq_len,
        parse=_parse_seq_len,
        asked=_has_model,
    ),
    Question(
        name="optimizer",
        text="Optimizer",
        default=Default("adamw", "the Trainer's default: 8 bytes of state per parameter"),
        choices=(
            Choice("adamw", "two fp32 values per parameter"),
            Choice("sgd", "no state without momentum"),
            Choice("adafactor", "rows and columns of the second moment"),
            Choice("adamw_8bit", "two 8-bit values per parameter (bitsandbytes)"),
            Choice("muon", "one value per parameter of a matrix"),
        ),
        asked=_has_model,
    ),
    Question(
        name="global_batch",
        text="Samples of all ranks per optimizer step",
        default=lambda state: Default(state.world_size, "one sample per rank; use the batch size of your recipe"),
        parse=_parse_global_batch,
    ),
    Question(
        name="fsdp_version",
        text="FSDP version",
        setting="fsdp.version",
        default=Default(2, "the version that PyTorch develops"),
        choices=(
            Choice(1, "FullyShardedDataParallel: flat parameters; deprecated by Transformers"),
            Choice(2, "fully_shard: one DTensor per parameter"),
        ),
    ),
    Question(
        name="recommendation",
        text="Use the recommended settings as defaults",
        default=_recommendation,
        choices=YES_NO,
        asked=lambda state: bool(state.recommended),
    ),
    Question(
        name="micro_batch",
        text="Samples of a rank per forward pass",
        default=Default(1, "needs least memory; the rest of the batch is accumulated"),
        parse=_parse_micro_batch,
    ),
    Question(
        name="sync_each_batch",
        text="Reduce gradients after every micro-batch (sync_each_batch)",
        default=Default(value=False, reason="less communication; gradients are kept unsharded meanwhile"),
        asked=lambda state: _has_model(state) and state.accumulation > 1,
    ),
)
