"""Rules about what is launched: which engine, on how many processes and machines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from hf_fsdp_plugin.problems import Problem
from hf_fsdp_plugin.spec.complaints import Rule, error, note, warning
from hf_fsdp_plugin.spec.model import FsdpSpec
from hf_fsdp_plugin.strategies import STRATEGIES

OTHER_ENGINES = {"DEEPSPEED": "DeepSpeed", "MEGATRON_LM": "Megatron-LM"}
XLA_TYPES = ("XLA", "TPU")
FSDP_SECTIONS = frozenset(
    {"fsdp", "sharding", "mesh", "wrap", "offload", "prefetch", "checkpoint", "loading", "params", "xla"}
)


def other_engine(spec: FsdpSpec) -> Iterator[Problem]:
    """A DeepSpeed or Megatron config given by mistake."""
    kind = spec.launch.distributed_type
    if kind in OTHER_ENGINES:
        engine = OTHER_ENGINES[kind]
        yield error(
            spec,
            "launch.distributed_type",
            f"distributed_type is {kind}: this is a config for {engine}, not for FSDP.",
            "Write distributed_type: FSDP and an fsdp_config, or launch it with accelerate launch.",
        )
        return
    for key, engine in (("deepspeed_config", "DeepSpeed"), ("megatron_lm_config", "Megatron-LM")):
        if spec.launch.extra.get(key):
            yield error(
                spec,
                "launch.extra",
                f"a {key} is given; this plugin runs FSDP, not {engine}.",
                f"Drop {key}, or launch with accelerate launch.",
            )


def fp8(spec: FsdpSpec) -> Iterator[Problem]:
    if spec.launch.extra.get("fp8_config"):
        yield error(
            spec,
            "launch.extra",
            "an fp8_config is given: fp8 is made inside the model by torchao or TransformerEngine, not by FSDP.",
            "Drop fp8_config and write mixed_precision: bf16.",
        )


def fsdp_is_on(spec: FsdpSpec) -> Iterator[Problem]:
    """Stock Accelerate ignores every FSDP setting where the type is another one."""
    kind = spec.launch.distributed_type
    if kind == "FSDP" or kind in OTHER_ENGINES or kind in XLA_TYPES:
        return
    asked = [name for name in spec.origins if name.partition(".")[0] in FSDP_SECTIONS]
    if asked:
        example = spec.origin(asked[0])
        yield error(
            spec,
            "launch.distributed_type",
            f"distributed_type is {kind}, under which the FSDP settings ({example}, …) would be ignored.",
            "Write distributed_type: FSDP, or drop the fsdp_config.",
        )
    else:
        yield warning(
            spec,
            "launch.distributed_type",
            f"distributed_type is {kind}: this config does not ask for FSDP.",
            "Write distributed_type: FSDP and an fsdp_config to shard the model.",
        )


def defaults_are_told(spec: FsdpSpec) -> Iterator[Problem]:
    if spec.launch.distributed_type != "FSDP" or not spec.asked("launch.distributed_type"):
        return
    if not any(name.partition(".")[0] in FSDP_SECTIONS for name in spec.origins):
        yield note(
            spec,
            "launch.distributed_type",
            f"FSDP is asked for and nothing else is said: FSDP {spec.fsdp.version}, {spec.sharding.strategy}, "
            f"wrap policy {spec.wrap.policy}, {spec.checkpoint.state_dict} checkpoints.",
        )


def xla(spec: FsdpSpec) -> Iterator[Problem]:
    kind = spec.launch.distributed_type
    if spec.xla.enabled or spec.xla.v2 or kind in XLA_TYPES:
        name = "xla.enabled" if spec.xla.enabled else "xla.v2" if spec.xla.v2 else "launch.distributed_type"
        yield error(
            spec,
            name,
            "PyTorch/XLA's FSDP is an engine of its own, for TPUs, and not driven by this plugin.",
            "Drop the xla settings to run PyTorch's FSDP, or launch with accelerate launch on a TPU.",
        )
    elif spec.xla.grad_ckpt or spec.xla.settings:
        name = "xla.grad_ckpt" if spec.xla.grad_ckpt else "xla.settings"
        yield warning(spec, name, "has no effect without xla: true.", "Use fsdp_activation_checkpointing, or drop it.")


def mesh_fits_world(spec: FsdpSpec) -> Iterator[Problem]:
    world = spec.launch.num_processes
    if world == "auto":
        return
    shard, replicate = spec.mesh.shard, spec.mesh.replicate
    if shard != "auto" and replicate != "auto" and shard * replicate != world:
        yield error(
            spec,
            "mesh.shard",
            f"a mesh of {replicate} × {shard} (replicate × shard) is not num_processes, {world} "
            f"({spec.origin('launch.num_processes')}).",
            f"Make their product {world}, or leave one of them out.",
        )
        return
    for name, size in (("mesh.shard", shard), ("mesh.replicate", replicate)):
        if size != "auto" and world % size:
            yield error(
                spec,
                name,
                f"{size} does not divide num_processes, {world} ({spec.origin('launch.num_processes')}).",
                f"Choose a divisor of {world}.",
            )


def mesh_fits_strategy(spec: FsdpSpec) -> Iterator[Problem]:
    strategy, shard, replicate = spec.sharding.strategy, spec.mesh.shard, spec.mesh.replicate
    sharded = STRATEGIES[strategy].is_sharded
    if not sharded and shard not in ("auto", 1):
        yield error(
            spec,
            "mesh.shard",
            f"{strategy} keeps whole copies, and {shard} ranks are to share one.",
            "Drop the shard size, or choose full_shard.",
        )
    elif sharded and shard == 1 and replicate not in ("auto", 1) and spec.asked("sharding.strategy"):
        yield error(
            spec, "mesh.shard", f"{strategy} over 1 rank shards nothing.", "Write no_shard, or a larger shard size."
        )


def machines(spec: FsdpSpec) -> Iterator[Problem]:
    launch = spec.launch
    if launch.machine_rank >= launch.num_machines:
        yield error(
            spec,
            "launch.machine_rank",
            f"machine_rank is {launch.machine_rank} of {launch.num_machines} machines; ranks count from 0.",
            f"Write a rank from 0 to {launch.num_machines - 1}.",
        )
    if launch.num_processes != "auto" and launch.num_processes % launch.num_machines:
        yield error(
            spec,
            "launch.num_processes",
            f"{launch.num_processes} processes cannot be dealt evenly to {launch.num_machines} machines.",
            f"num_processes counts all machines together: write a multiple of {launch.num_machines}.",
        )
    if launch.main_process_port > 65535:
        yield error(
            spec, "launch.main_process_port", f"{launch.main_process_port} is no port.", "Choose one up to 65535."
        )
    if launch.num_machines > 1 and not launch.main_process_ip and launch.machine_rank > 0:
        yield warning(
            spec,
            "launch.main_process_ip",
            f"{launch.num_machines} machines and no address of machine 0.",
            "Give main_process_ip, in the file or on the command line.",
        )


def elsewhere(spec: FsdpSpec) -> Iterator[Problem]:
    if spec.launch.compute_environment == "AMAZON_SAGEMAKER":
        yield warning(
            spec,
            "launch.compute_environment",
            "SageMaker's own launcher is not driven by this plugin.",
            "Inside the job, launch with hf-fsdp launch and LOCAL_MACHINE.",
        )


LAUNCH_RULES: Final[tuple[Rule, ...]] = (
    other_engine,
    fp8,
    fsdp_is_on,
    defaults_are_told,
    xla,
    mesh_fits_world,
    mesh_fits_strategy,
    machines,
    elsewhere,
)
