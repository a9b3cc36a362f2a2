"""The questions on the run: model, machines, batch and precision."""

from __future__ import annotations

from typing import Final

from hf_fsdp_plugin.cli.wizard.question import YES_NO, Choice, Default, Question, State, whole_number
from hf_fsdp_plugin.estimate.sizes import SPELLINGS, parse_size
from hf_fsdp_plugin.text import format_bytes
from hf_fsdp_plugin.vocabulary import BY_NAME

USUAL_GPUS = 8
USUAL_SEQ_LEN = 4096
MAX_SEQ_LEN = 1 << 24
MAX_BATCH = 1 << 24


def _num_machines(state: State) -> Default:
    return Default(value=1, reason="one machine needs no address and no port")


_MACHINES: Final = {
    "A100-SXM4-40GB": "a100-40gb", "A100-SXM4-80GB": "a100-80gb", "H100 80GB HBM3": "h100-sxm",
    "H100 PCIe": "h100-pcie", "H200": "h200", "B200": "b200",
}  # fmt: skip
"""Part of the name of a device, as its driver gives it -> machine."""


def _machine(state: State) -> Default:
    found = state.machine().name
    known = next((machine for name, machine in _MACHINES.items() if name in found), "")
    return Default(value=known, reason=f"of the {found} found here" if known else "without one, no times are predicted")


def _parse_machine(text: str, state: State) -> str:
    from hf_fsdp_plugin.estimate.machine_file import machine_named
    from hf_fsdp_plugin.problems import SpecError

    try:
        return machine_named(text).name and text if text else ""
    except SpecError as error:
        raise ValueError(" ".join(f"{problem.message} {problem.fix}" for problem in error.problems)) from None


def _gpus(state: State) -> Default:
    launch = state.existing.launch
    if launch.num_processes != "auto":
        return Default(value=max(1, launch.num_processes // launch.num_machines), reason=f"as in {state.path}")
    if state.cpu:
        return Default(value=2, reason="the smallest number of CPU ranks for which FSDP shards")
    named = state.named_machine()
    if named is not None and named.ranks_per_machine:
        return Default(value=named.ranks_per_machine, reason=f"of {named.name}")
    found = state.machine()
    if found.count:
        name = f"{found.name}, " if found.name else ""
        return Default(value=found.count, reason=f"found on this machine: {name}{found.kind}")
    return Default(value=USUAL_GPUS, reason="torch finds no GPU here; machines for training usually have 8")


def _gpu_memory(state: State) -> Default:
    named = state.named_machine()
    if named is not None and named.memory_bytes:
        return Default(value=format_bytes(int(named.memory_bytes)), reason=f"of {named.name}: {named.device}")
    found = state.machine()
    if found.memory_bytes:
        return Default(value=format_bytes(found.memory_bytes, binary=True), reason=f"of the {found.name} found here")
    return Default(value="", reason="torch finds no GPU here; without a size, nothing is compared with it")


def _memory(text: str, state: State) -> str:
    if text and parse_size(text) is None:
        raise ValueError(f"{text[:40]!r} is not a size of memory. Write {SPELLINGS}.")
    return text


def _address(text: str, state: State) -> str:
    from hf_fsdp_plugin.spec.values import InvalidValue, parse_value

    if not text:
        return ""
    try:
        return str(parse_value(BY_NAME["launch.main_process_ip"], text))
    except InvalidValue as error:
        raise ValueError(f"{text[:80]!r} is not valid; expected {error.expected}.") from None


def _machine_rank(text: str, state: State) -> int:
    return whole_number(text, minimum=0, maximum=state.num_machines - 1)


def _seq_len(state: State) -> Default:
    longest = state.model.max_seq_len if state.model is not None else 0
    if longest and longest <= USUAL_SEQ_LEN:
        return Default(value=longest, reason="the longest sequence of this model")
    return Default(value=USUAL_SEQ_LEN, reason="a usual length; activations grow with it")


def _parse_seq_len(text: str, state: State) -> int:
    seq_len = whole_number(text, maximum=MAX_SEQ_LEN)
    longest = state.model.max_seq_len if state.model is not None else 0
    if longest and seq_len > longest:
        raise ValueError(f"{seq_len:,} is longer than {longest:,}, the longest sequence of the model.")
    return seq_len


def _global_batch(state: State) -> Default:
    return Default(value=state.world_size, reason="one sample per rank; use the batch size of your recipe")


def _parse_global_batch(text: str, state: State) -> int:
    batch = whole_number(text, maximum=MAX_BATCH)
    if batch % state.world_size:
        lower = batch - batch % state.world_size
        near = " or ".join(f"{size:,}" for size in (lower, lower + state.world_size) if size)
        raise ValueError(f"{batch:,} is not divisible by the {state.world_size:,} ranks. Nearest: {near}.")
    return batch


def _micro_batch(state: State) -> Default:
    return Default(value=1, reason="needs least memory; the rest of the batch is accumulated")


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


def _accumulates(state: State) -> bool:
    return int(state.answers["global_batch"]) > int(state.answers["micro_batch"]) * state.world_size


def _several_machines(state: State) -> bool:
    return state.num_machines > 1


def _has_model(state: State) -> bool:
    return state.model is not None


QUESTIONS = (
    Question(
        name="model",
        text="Model (folder, config.json or hub id; empty for none)",
        help="model for layer classes and memory: a folder, a config.json, or a hub id",
        default=lambda state: Default(value="", reason="without a model, no memory is predicted"),
    ),
    Question(
        name="num_machines",
        text="Number of machines",
        help="number of machines",
        setting="launch.num_machines",
        default=_num_machines,
        parse=lambda text, state: whole_number(text),
    ),
    Question(
        name="machine",
        text="Kind of machine, for predicted times (such as h100-sxm; empty for none)",
        help="known machine or machine file, for predicted times: h100-sxm, a100-80gb, ...",
        default=_machine,
        parse=_parse_machine,
        asked=_has_model,
    ),
    Question(
        name="gpus",
        text="GPUs of each machine",
        help="GPUs (ranks) of each machine",
        default=_gpus,
        parse=lambda text, state: whole_number(text, maximum=(1 << 20) // state.num_machines),
    ),
    Question(
        name="gpu_memory",
        text="Memory of a GPU, such as 80GB (empty if unknown)",
        help="memory of a GPU, such as 80GB",
        default=_gpu_memory,
        parse=_memory,
        asked=_has_model,
    ),
    Question(
        name="machine_rank",
        text="Rank of this machine, from 0",
        help="rank of this machine, from 0",
        setting="launch.machine_rank",
        default=lambda state: Default(value=0, reason="the other machines use the same file with --machine_rank"),
        parse=_machine_rank,
        asked=_several_machines,
    ),
    Question(
        name="main_process_ip",
        text="Address of machine 0 (empty to pass it as --main_process_ip)",
        help="IP address or host name of machine 0",
        setting="launch.main_process_ip",
        default=lambda state: Default(value="", reason="not in the file"),
        parse=_address,
        asked=_several_machines,
        about="all machines connect to this address",
    ),
    Question(
        name="main_process_port",
        text="Free port on machine 0",
        help="free port on machine 0",
        setting="launch.main_process_port",
        default=lambda state: Default(value=29500, reason="the default port of torchrun"),
        parse=lambda text, state: whole_number(text, maximum=65535),
        asked=_several_machines,
        about="must be free on machine 0",
    ),
    Question(
        name="precision",
        text="Precision",
        help="mixed precision: bf16, fp16 or no",
        setting="launch.mixed_precision",
        default=lambda state: Default(value="bf16", reason="half the memory of fp32 for activations; no loss scaling"),
        choices=lambda state: (
            Choice(value="bf16", label="bf16", about="compute in bf16, update in fp32; for A100, H100 and newer GPUs"),
            Choice(value="fp16", label="fp16", about="compute in fp16 with loss scaling; for V100 and T4"),
            Choice(value="no", label="no", about="compute in the dtype of the model"),
        ),
    ),
    Question(
        name="seq_len",
        text="Sequence length in tokens",
        help="tokens per sample",
        default=_seq_len,
        parse=_parse_seq_len,
        asked=_has_model,
    ),
    Question(
        name="optimizer",
        text="Optimizer",
        help="optimizer, for the predicted memory",
        default=lambda state: Default(value="adamw", reason="the Trainer's default: 8 bytes of state per parameter"),
        choices=lambda state: (
            Choice(value="adamw", label="adamw", about="two fp32 values per parameter"),
            Choice(value="sgd", label="sgd", about="no state without momentum"),
            Choice(value="adafactor", label="adafactor", about="rows and columns of the second moment"),
            Choice(value="adamw_8bit", label="adamw_8bit", about="two 8-bit values per parameter (bitsandbytes)"),
            Choice(value="muon", label="muon", about="one value per parameter of a matrix"),
        ),
        asked=_has_model,
    ),
    Question(
        name="global_batch",
        text="Samples of all ranks per optimizer step",
        help="samples of all ranks per optimizer step",
        default=_global_batch,
        parse=_parse_global_batch,
    ),
    Question(
        name="fsdp_version",
        text="FSDP version",
        help="FSDP version: 1 or 2",
        setting="fsdp.version",
        default=lambda state: Default(value=2, reason="the version that PyTorch develops"),
        choices=lambda state: (
            Choice(value=1, label="1", about="FullyShardedDataParallel: flat parameters; deprecated by Transformers"),
            Choice(value=2, label="2", about="fully_shard: one DTensor per parameter"),
        ),
    ),
    Question(
        name="recommendation",
        text="Use the recommended settings as defaults",
        help="use the recommended settings as defaults of the others: yes or no",
        default=_recommendation,
        choices=lambda state: YES_NO,
        asked=lambda state: bool(state.recommended),
    ),
    Question(
        name="micro_batch",
        text="Samples of a rank per forward pass",
        help="samples of a rank per forward pass",
        default=_micro_batch,
        parse=_parse_micro_batch,
    ),
    Question(
        name="sync_each_batch",
        text="Reduce gradients after every micro-batch (sync_each_batch)",
        help="reduce gradients after every micro-batch, not only the last: yes or no",
        default=lambda state: Default(value=False, reason="less communication; gradients are kept unsharded meanwhile"),
        choices=lambda state: YES_NO,
        asked=lambda state: state.model is not None and _accumulates(state),
    ),
)
