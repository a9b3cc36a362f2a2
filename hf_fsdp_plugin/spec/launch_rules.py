"""Rules about the launch: the engine, the number of processes, the machines."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from hf_fsdp_plugin.problems import Problem
from hf_fsdp_plugin.spec.model import FsdpSpec
from hf_fsdp_plugin.strategies import STRATEGIES

Rule = Callable[[FsdpSpec], Iterator[Problem]]
OTHER_ENGINES = {"DEEPSPEED": "DeepSpeed", "MEGATRON_LM": "Megatron-LM"}
XLA_TYPES = ("XLA", "TPU")
FSDP_SECTIONS = frozenset(
    {"fsdp", "sharding", "mesh", "wrap", "offload", "prefetch", "checkpoint", "loading", "params", "xla"}
)


def about(spec: FsdpSpec, code: str, setting: str, message: str, fix: str = "") -> Problem:
    """Return a problem of one setting, at its origin."""
    return Problem(code=code, message=message, fix=fix, setting=setting, origin=spec.origins.get(setting))


def check_engine(spec: FsdpSpec) -> Iterator[Problem]:
    """The config is one of DeepSpeed or Megatron-LM."""
    kind = spec.launch.distributed_type
    if kind in OTHER_ENGINES:
        message = f"distributed_type is {kind}: this is a config for {OTHER_ENGINES[kind]}, not for FSDP."
        fix = "Set distributed_type: FSDP and an fsdp_config, or use accelerate launch."
        yield about(spec, "FSDP-E120", "launch.distributed_type", message, fix)
        return
    for engine in OTHER_ENGINES.values():
        key = f"{engine.lower().replace('-', '_')}_config"
        if spec.launch.extra.get(key):
            message = f"{key} is set; this plugin runs FSDP, not {engine}."
            yield about(spec, "FSDP-E120", "launch.extra", message, f"Remove {key}, or use accelerate launch.")


def check_fp8(spec: FsdpSpec) -> Iterator[Problem]:
    if spec.launch.extra.get("fp8_config"):
        message = "fp8_config is set. fp8 is implemented inside the model (torchao, TransformerEngine), not by FSDP."
        yield about(spec, "FSDP-E121", "launch.extra", message, "Remove fp8_config and set mixed_precision: bf16.")


def check_fsdp_enabled(spec: FsdpSpec) -> Iterator[Problem]:
    """Stock Accelerate ignores every FSDP setting if ``distributed_type`` is not FSDP."""
    kind = spec.launch.distributed_type
    if kind == "FSDP" or kind in OTHER_ENGINES or kind in XLA_TYPES:
        return
    asked = [name for name in spec.origins if name.partition(".")[0] in FSDP_SECTIONS]
    if asked:
        message = f"distributed_type is {kind}, with which the FSDP settings ({spec.origin(asked[0])}, …) are ignored."
        fix = "Set distributed_type: FSDP, or remove the fsdp_config."
        yield about(spec, "FSDP-E123", "launch.distributed_type", message, fix)
    else:
        message = f"distributed_type is {kind}: this config does not enable FSDP."
        fix = "Set distributed_type: FSDP and an fsdp_config to shard the model."
        yield about(spec, "FSDP-W124", "launch.distributed_type", message, fix)


def check_defaults_only(spec: FsdpSpec) -> Iterator[Problem]:
    if spec.launch.distributed_type != "FSDP" or not spec.asked("launch.distributed_type"):
        return
    if not any(name.partition(".")[0] in FSDP_SECTIONS for name in spec.origins):
        message = (
            f"FSDP is enabled with defaults only: FSDP{spec.fsdp.version}, {spec.sharding.strategy}, "
            f"wrap policy {spec.wrap.policy}, {spec.checkpoint.state_dict} checkpoints."
        )
        yield about(spec, "FSDP-N125", "launch.distributed_type", message)


def check_xla(spec: FsdpSpec) -> Iterator[Problem]:
    if spec.xla.enabled or spec.xla.v2 or spec.launch.distributed_type in XLA_TYPES:
        name = "xla.enabled" if spec.xla.enabled else "xla.v2" if spec.xla.v2 else "launch.distributed_type"
        message = "the FSDP of PyTorch/XLA (for TPUs) is not supported by this plugin."
        fix = "Remove the xla settings to use PyTorch's FSDP, or use accelerate launch on a TPU."
        yield about(spec, "FSDP-E126", name, message, fix)
    elif spec.xla.grad_ckpt or spec.xla.settings:
        name = "xla.grad_ckpt" if spec.xla.grad_ckpt else "xla.settings"
        fix = "Use fsdp_activation_checkpointing, or remove the key."
        yield about(spec, "FSDP-W127", name, "the setting has no effect without xla: true.", fix)


def check_mesh_size(spec: FsdpSpec) -> Iterator[Problem]:
    world = spec.launch.num_processes
    if world == "auto":
        return
    shard, replicate = spec.mesh.shard, spec.mesh.replicate
    where = spec.origin("launch.num_processes")
    if shard != "auto" and replicate != "auto" and shard * replicate != world:
        message = f"the mesh size {replicate} × {shard} (replicate × shard) is not num_processes={world} ({where})."
        fix = f"Choose sizes whose product is {world}, or remove one of them."
        yield about(spec, "FSDP-E128", "mesh.shard", message, fix)
        return
    for name, size in (("mesh.shard", shard), ("mesh.replicate", replicate)):
        if size != "auto" and world % size:
            message = f"num_processes={world} ({where}) is not divisible by {size}."
            yield about(spec, "FSDP-E129", name, message, f"Choose a divisor of {world}.")


def check_mesh_strategy(spec: FsdpSpec) -> Iterator[Problem]:
    strategy, shard, replicate = spec.sharding.strategy, spec.mesh.shard, spec.mesh.replicate
    is_sharded = STRATEGIES[strategy].is_sharded
    if not is_sharded and shard not in ("auto", 1):
        message = f"{strategy} does not shard the model, but the shard size is {shard}."
        yield about(spec, "FSDP-E130", "mesh.shard", message, "Remove the shard size, or use full_shard.")
    elif is_sharded and shard == 1 and replicate not in ("auto", 1) and spec.asked("sharding.strategy"):
        message = f"{strategy} with a shard size of 1 does not shard the model."
        yield about(spec, "FSDP-E130", "mesh.shard", message, "Use no_shard, or a larger shard size.")


def check_machines(spec: FsdpSpec) -> Iterator[Problem]:
    launch = spec.launch
    num_machines = launch.num_machines
    if launch.machine_rank >= num_machines:
        message = f"machine_rank is {launch.machine_rank}, but num_machines is {num_machines}; ranks begin at 0."
        fix = f"Set a rank from 0 to {num_machines - 1}."
        yield about(spec, "FSDP-E131", "launch.machine_rank", message, fix)
    if launch.num_processes != "auto" and launch.num_processes % num_machines:
        message = f"num_processes={launch.num_processes} is not divisible by num_machines={num_machines}."
        fix = f"num_processes is the total of all machines: set a multiple of {num_machines}."
        yield about(spec, "FSDP-E132", "launch.num_processes", message, fix)
    if launch.main_process_port > 65535:
        message = f"{launch.main_process_port} is not a valid port."
        yield about(spec, "FSDP-E133", "launch.main_process_port", message, "Choose a port up to 65535.")
    if num_machines > 1 and not launch.main_process_ip and launch.machine_rank > 0:
        message = f"num_machines is {num_machines}, but main_process_ip is not set."
        fix = "Set it to the address of machine 0, in the config or on the command line."
        yield about(spec, "FSDP-W134", "launch.main_process_ip", message, fix)


def check_environment(spec: FsdpSpec) -> Iterator[Problem]:
    if spec.launch.compute_environment == "AMAZON_SAGEMAKER":
        message = "the SageMaker launcher is not supported by this plugin."
        fix = "Inside the job, use hf-fsdp launch with compute_environment: LOCAL_MACHINE."
        yield about(spec, "FSDP-W135", "launch.compute_environment", message, fix)


LAUNCH_RULES: Final[tuple[Rule, ...]] = (
    check_engine,
    check_fp8,
    check_fsdp_enabled,
    check_defaults_only,
    check_xla,
    check_mesh_size,
    check_mesh_strategy,
    check_machines,
    check_environment,
)
