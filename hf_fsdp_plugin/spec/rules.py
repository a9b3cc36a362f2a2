"""Rules between settings: functions that take a spec and yield the problems that they find."""

from __future__ import annotations

import importlib.util
import math
import re
from collections.abc import Iterator, Mapping
from typing import Final

from hf_fsdp_plugin.axes import MODEL_AXES
from hf_fsdp_plugin.problems import Problem
from hf_fsdp_plugin.sources.interface import enables_fsdp
from hf_fsdp_plugin.spec.fsdp_spec import FsdpSpec
from hf_fsdp_plugin.spec.precedence import OTHER_ENGINES
from hf_fsdp_plugin.spec.value_parsers import is_class_name
from hf_fsdp_plugin.strategies import STRATEGIES
from hf_fsdp_plugin.vocabulary import BY_NAME

FP16_ON_CPU = (
    "fp16 training is not supported on CPU ranks: its gradient scaler requires an accelerator.",
    "Set mixed_precision to bf16 or no.",
)
"""Message and remedy of FSDP-E147."""
STORAGE_DRIVERS = "Install the driver of fsspec: pip install s3fs for s3://, gcsfs for gs://, or adlfs for abfs://."
"""Remedy of FSDP-E418."""
XLA_TYPES = ("XLA", "TPU")


def check_rules(spec: FsdpSpec) -> tuple[Problem, ...]:
    """Return all problems that the rules find."""
    of_run, of_model = (_check_engine, _check_ranks, _check_units), (_check_precision, check_fp8, check_fsdp1_only)
    return tuple(problem for rule in (*of_run, *of_model, _check_loading, _check_storage) for problem in rule(spec))


def _check_engine(spec: FsdpSpec) -> Iterator[Problem]:
    """Reject other engines than PyTorch's FSDP, and report FSDP settings without FSDP, and FSDP without settings."""
    kind, extra = spec.launch.distributed_type, spec.launch.extra
    if kind in OTHER_ENGINES:
        message = f"distributed_type is {kind}: this is a config for {OTHER_ENGINES[kind]}, not for FSDP."
        fix = "Set distributed_type: FSDP and an fsdp_config, or convert the file with hf-fsdp convert."
        fix = fix if kind == "DEEPSPEED" else "Set distributed_type: FSDP and an fsdp_config, or use accelerate launch."
        yield spec.problem("FSDP-E120", "launch.distributed_type", message, fix)
    for engine in () if kind in OTHER_ENGINES else OTHER_ENGINES.values():
        key = f"{engine.lower().replace('-', '_')}_config"
        if extra.get(key):
            message = f"{key} is set; this plugin runs FSDP, not {engine}."
            yield spec.problem("FSDP-E120", "launch.extra", message, f"Remove {key}, or use accelerate launch.")
    yield from _check_enabled(spec)
    yield from _check_xla(spec)


def _check_enabled(spec: FsdpSpec) -> Iterator[Problem]:
    """Report a ``distributed_type`` other than FSDP, for which stock Accelerate ignores all FSDP settings."""
    kind = spec.launch.distributed_type
    asked = [name for name, origin in spec.origins.items() if enables_fsdp(name, spec.get(name), origin)]
    if kind in ("FSDP", *OTHER_ENGINES, *XLA_TYPES):
        return
    if asked:
        message = f"distributed_type is {kind}, but FSDP settings are given ({spec.origin(asked[0])}, …)."
        fix = "Set distributed_type: FSDP, or remove the fsdp_config."
        yield spec.problem("FSDP-E123", "launch.distributed_type", message, fix)
    else:
        yield fsdp_is_off(spec)


def fsdp_is_off(spec: FsdpSpec) -> Problem:
    """Return the warning that no source enables FSDP."""
    origin = spec.origins.get("launch.distributed_type")
    message = f"FSDP is not enabled by these settings{f' ({origin})' if origin is not None else ''}."
    fix = "Set distributed_type: FSDP and an fsdp_config, or fsdp=True in TrainingArguments, to shard the model."
    return spec.problem("FSDP-W124", "launch.distributed_type", message, fix)


def _check_xla(spec: FsdpSpec) -> Iterator[Problem]:
    """Leave runs with ``xla: true`` to Transformers if torch_xla is installed, and refuse them otherwise."""
    name = "xla.enabled" if spec.xla.enabled else "xla.v2"
    message, fix = "the FSDP of PyTorch/XLA (for TPUs) is", "Remove the xla settings to use PyTorch's FSDP"
    if spec.launch.distributed_type in XLA_TYPES:
        fix = "Use accelerate launch on a TPU, or set distributed_type: FSDP to use PyTorch's FSDP."
        yield spec.problem("FSDP-E126", "launch.distributed_type", f"{message} not supported by this launcher.", fix)
    elif spec.uses_xla and importlib.util.find_spec("torch_xla") is None:
        message = f"{message} selected, and torch_xla is not installed."
        yield spec.problem("FSDP-E126", name, message, f"{fix}, or install torch_xla on a TPU machine.")
    elif spec.uses_xla:
        message = f"{message} run by Transformers. This package shards nothing and writes no report or checkpoints."
        yield spec.problem("FSDP-W163", name, message, f"{fix}.")
    elif spec.xla.grad_ckpt or spec.xla.settings:
        name = "xla.grad_ckpt" if spec.xla.grad_ckpt else "xla.settings"
        fix = "Use fsdp_activation_checkpointing, or remove the key."
        yield spec.problem("FSDP-W127", name, "the setting has no effect without xla: true.", fix)


def _check_ranks(spec: FsdpSpec) -> Iterator[Problem]:
    """Check the sizes of the mesh, and the machines."""
    yield from check_mesh_size(spec)
    launch, num_machines = spec.launch, spec.launch.num_machines
    if launch.machine_rank >= num_machines:
        message = f"machine_rank is {launch.machine_rank}, but num_machines is {num_machines}; ranks begin at 0."
        fix = f"Set a rank from 0 to {num_machines - 1}."
        yield spec.problem("FSDP-E131", "launch.machine_rank", message, fix)
    if launch.num_processes != "auto" and launch.num_processes % num_machines:
        message = f"num_processes={launch.num_processes} is not divisible by num_machines={num_machines}."
        fix = f"num_processes is the total of all machines: set a multiple of {num_machines}."
        yield spec.problem("FSDP-E132", "launch.num_processes", message, fix)
    largest = BY_NAME["launch.main_process_port"].maximum
    if largest is not None and launch.main_process_port > largest:
        message = f"main_process_port={launch.main_process_port} is not a valid port."
        yield spec.problem("FSDP-E133", "launch.main_process_port", message, f"Choose a port from 0 to {largest}.")
    if num_machines > 1 and not launch.main_process_ip and launch.machine_rank > 0:
        message = f"num_machines is {num_machines}, but main_process_ip is not set."
        fix = "Set it to the address of machine 0, in the config or on the command line."
        yield spec.problem("FSDP-W134", "launch.main_process_ip", message, fix)


def check_mesh_size(spec: FsdpSpec) -> Iterator[Problem]:
    """Check the sizes of the mesh against the version, the strategy and the number of ranks."""
    mesh, world, strategy = spec.mesh, spec.launch.num_processes, STRATEGIES[spec.sharding.strategy]
    shard, replicate = mesh.shard, mesh.replicate
    yield from check_model_axes(with_known_shard(spec))
    asked = spec.asked("sharding.strategy")
    num_ranks = max((size for size in (replicate, world) if size != "auto"), default=1)
    if not strategy.is_sharded and shard not in ("auto", 1):
        message = f"{strategy.name} does not shard the model, but the shard size is {shard}."
        yield spec.problem("FSDP-E130", "mesh.shard", message, "Remove the shard size, or use full_shard.")
    elif strategy.is_sharded and shard == 1 and num_ranks > 1 and asked and not mesh.has_model_axes:
        message = f"{strategy.name} with a shard size of 1 does not shard the model."
        yield spec.problem("FSDP-E130", "mesh.shard", message, "Use no_shard, or a larger shard size.")
    if world == "auto":
        return
    where = spec.origin("launch.num_processes")
    known = {name: size for name, size in mesh.rank_axes().items() if size != "auto"}
    product = math.prod(known.values())
    if len(known) == len(mesh.rank_axes()) and product != world:
        sizes, names = (" × ".join(map(str, words)) for words in (known.values(), known))
        message = f"num_processes={world} ({where}) is not the mesh size {sizes} ({names})."
        fix = f"Start {product} processes, or choose sizes whose product is {world}."
        yield spec.problem("FSDP-E128", "mesh.shard", message, fix)
        return
    wrong = [(f"mesh.{axis}", size) for axis, size in known.items() if size < 1 or world % size]
    for name, size in wrong:
        message = f"num_processes={world} ({where}) is not divisible by {name}={size}."
        yield spec.problem("FSDP-E129", name, message, divisor_remedy(name, world))
    if not wrong and world % product:
        sizes = " × ".join(f"mesh.{axis}={size}" for axis, size in known.items() if size > 1)
        message = f"num_processes={world} ({where}) is not divisible by {sizes}."
        yield spec.problem("FSDP-E129", "mesh.shard", message, f"Start a multiple of {product} processes.")


def with_known_shard(spec: FsdpSpec) -> FsdpSpec:
    """Return the spec with the shard size that the number of ranks leaves, if nothing else decides it."""
    mesh, world, replicate = spec.mesh, spec.launch.num_processes, spec.mesh.replicate
    if replicate == "auto" and not STRATEGIES[spec.sharding.strategy].hybrid:
        replicate = 1
    if mesh.shard != "auto" or world == "auto" or replicate == "auto" or world % (replicate * mesh.ranks_per_sample):
        return spec
    return spec.with_values({"mesh.shard": world // (replicate * mesh.ranks_per_sample)}, {})


def mesh_variables(spec: FsdpSpec, world_size: int) -> dict[str, str]:
    """Return the variables from which a script's ``ParallelismConfig()`` reads sizes, as ``accelerate launch`` does.

    Accelerate has no expert axis: its ranks are those of the other axes.
    """
    mesh = with_known_shard(spec.with_values({"launch.num_processes": world_size}, {})).mesh
    sizes = {"DP_REPLICATE": mesh.replicate, "DP_SHARD": mesh.shard, "CP": mesh.context, "TP": mesh.tensor}
    if not any(spec.asked(f"mesh.{axis}") for axis in mesh.axes()):
        return {}
    return {f"PARALLELISM_CONFIG_{name}_SIZE": str(size) for name, size in sizes.items() if size != "auto"}


def check_model_axes(spec: FsdpSpec) -> Iterator[Problem]:
    """Check the axes whose ranks train the same samples: they need FSDP2 and shards."""
    mesh, num_same = spec.mesh, spec.mesh.ranks_per_sample
    for name, size in ((f"mesh.{axis}", getattr(mesh, axis)) for axis in MODEL_AXES):
        if size > 1 and spec.fsdp.version == 1:
            message = f"{name}={size} requires FSDP2, and the version is 1 ({spec.origin('fsdp.version')})."
            yield spec.problem("FSDP-E137", name, message, f"Set fsdp_version: 2, or {name} to 1.")
        elif size > 1 and not STRATEGIES[spec.sharding.strategy].is_sharded:
            strategy = spec.sharding.strategy
            message = f"{name}={size} with {strategy}: Accelerate and Transformers combine it with shards."
            yield spec.problem("FSDP-E137", name, message, "Use full_shard, with mesh.shard: 2 or more.")
    if num_same > 1 and mesh.shard == 1 and mesh.replicate not in ("auto", 1):
        message = f"mesh.replicate={mesh.replicate} with mesh.shard=1 and {num_same} ranks for the same samples:"
        message += " Accelerate combines replicas with these axes only if the model is sharded, too."
        yield spec.problem("FSDP-E138", "mesh.shard", message, "Set mesh.shard to 2 or more, or mesh.replicate to 1.")
    if mesh.expert % mesh.tensor and mesh.expert > 1:
        message = f"mesh.expert={mesh.expert} is not a multiple of mesh.tensor={mesh.tensor}."
        fix = "An expert group consists of whole tensor groups: set a multiple of mesh.tensor, or mesh.tensor to 1."
        yield spec.problem("FSDP-E138", "mesh.expert", message, fix)
    elif mesh.expert > 1 and mesh.shard != "auto" and (mesh.shard * num_same) % mesh.expert:
        message = f"mesh.expert={mesh.expert} does not divide the {mesh.shard * num_same} ranks of one replica."
        fix = f"Set it to a divisor of mesh.shard × mesh.context × mesh.tensor that is a multiple of {mesh.tensor}."
        yield spec.problem("FSDP-E138", "mesh.expert", message, fix)


def divisor_remedy(name: str, world: int) -> str:
    """Return what to do if a size of the mesh does not divide the number of ranks."""
    divisors = [str(number) for number in range(1, world + 1) if world % number == 0]
    return f"Set {name} to one of {', '.join(divisors)}, or change the number of processes."


def _check_units(spec: FsdpSpec) -> Iterator[Problem]:
    """Check the wrap policy, the classes and modules that it names, and the checkpointing of the units."""
    wrap, activation = spec.wrap, spec.activation
    if activation.offload and activation.checkpointing == "none":
        message = "activation offload requires activation checkpointing, which is off."
        fix = "Set fsdp_activation_checkpointing: true, or remove fsdp_activation_checkpointing_offload."
        yield spec.problem("FSDP-E140", "activation.offload", message, fix)
    elif activation.offload and activation.native:
        message = "activation offload belongs to FSDP's checkpointing, but that of Transformers is set."
        fix = "Set fsdp_activation_checkpointing: true instead of gradient_checkpointing, or pass "
        fix += 'activation_checkpointing_kwargs={"offload": True} (Transformers 5.24) instead of the offload.'
        yield spec.problem("FSDP-E141", "activation.offload", message, fix)
    if spec.offload.optimizer and spec.offload.params:
        message = "offload_optimizer has no effect with offload_params, which updates everything in CPU memory."
        fix = "Remove fsdp_offload_params to update on the device, or fsdp_offload_optimizer."
        yield spec.problem("FSDP-W171", "offload.optimizer", message, fix)
    if wrap.policy == "size" and wrap.min_num_params <= 0:
        message = f"the size policy requires min_num_params above 0; it is {wrap.min_num_params}."
        fix = "Set fsdp_min_num_params, for example to 1e8, or wrap by layer class: TRANSFORMER_BASED_WRAP."
        yield spec.problem("FSDP-E142", "wrap.policy", message, fix)
    if wrap.policy != "transformer" and wrap.classes:
        message = f"layer classes have no effect with the wrap policy {wrap.policy}."
        fix = "Set fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP, or remove the classes."
        yield spec.problem("FSDP-W143", "wrap.classes", message, fix)
    if wrap.policy != "size" and wrap.min_num_params > 0:
        message = f"min_num_params has no effect with the wrap policy {wrap.policy}."
        fix = "Set fsdp_auto_wrap_policy: SIZE_BASED_WRAP, or remove min_num_params."
        yield spec.problem("FSDP-W143", "wrap.min_num_params", message, fix)
    for name in (name for name in wrap.classes if not is_class_name(name)):
        fix = "Write names such as LlamaDecoderLayer, without a path, separated by commas."
        yield spec.problem("FSDP-E144", "wrap.classes", f"'{name[:80]}' is not a class name.", fix)
    for name in ("wrap.ignored_modules", "precision.fp32_modules"):
        pattern = spec.get(name)
        try:
            re.compile(pattern)
        except (re.error, RecursionError, OverflowError) as reason:
            message = f"'{pattern[:80]}' is not a valid regular expression: {reason}."
            fix = "Write an expression that matches module names, such as .*\\.lora_.*, and escape brackets."
            yield spec.problem("FSDP-E145", name, message, fix)


def _check_precision(spec: FsdpSpec) -> Iterator[Problem]:
    modes = {spec.launch.mixed_precision, spec.precision.param}
    if modes == {"bf16", "fp16"}:
        message = f"{spec.origin('launch.mixed_precision')} conflicts with {spec.origin('precision.param')}."
        yield spec.problem("FSDP-E146", "precision.param", message, "Set only one of bf16 and fp16.")
    if spec.launch.use_cpu and "fp16" in modes:
        name = "precision.param" if spec.precision.param == "fp16" else "launch.mixed_precision"
        yield spec.problem("FSDP-E147", name, *FP16_ON_CPU)


def check_fsdp1_only(spec: FsdpSpec) -> Iterator[Problem]:
    """Report settings of FSDP1 that have no counterpart in FSDP2, if they are set under FSDP2."""
    if spec.fsdp.version != 2:
        return
    fix = "Remove the key, or set fsdp_version: 1."
    if not spec.prefetch.limit_all_gathers:
        reason = "FSDP2 frees memory in stream order, which always limits all-gathers."
        yield spec.problem("FSDP-W148", "prefetch.limit_all_gathers", f"false is not supported by FSDP2. {reason}", fix)
    if not spec.params.use_orig:
        reason = "FSDP2 has no flat parameters: they always keep their names and shapes."
        yield spec.problem("FSDP-W148", "params.use_orig", f"false is not supported by FSDP2. {reason}", fix)


def _check_loading(spec: FsdpSpec) -> Iterator[Problem]:
    if spec.loading.ram_efficient and not spec.loading.sync_module_states:
        message = f"{spec.origin('loading.ram_efficient')} needs the weights of rank 0 on every rank, and "
        message += f"{spec.origin('loading.sync_module_states')} prevents their broadcast."
        fix = "Set fsdp_sync_module_states: true, or remove fsdp_cpu_ram_efficient_loading."
        yield spec.problem("FSDP-E149", "loading.sync_module_states", message, fix)


def _check_storage(spec: FsdpSpec) -> Iterator[Problem]:
    """Check that fsspec knows the URL of the storage, and that its driver is installed."""
    kind, separator, _ = spec.checkpoint.storage.partition("://")
    if separator:
        from fsspec.registry import known_implementations  # few configs need it

        module = known_implementations.get(kind, {"class": ""})["class"].partition(".")[0]
        if not module or importlib.util.find_spec(module) is None:
            message = f"{spec.checkpoint.storage} needs {module or 'a driver of fsspec that does not exist'}."
            yield spec.problem("FSDP-E418", "checkpoint.storage", message, STORAGE_DRIVERS)


_FP8_PACKAGES: Final[Mapping[str, tuple[str, str]]] = {
    "ao": ("torchao", "torchao"),
    "te": ("transformer_engine", "transformer-engine"),
    "msamp": ("msamp", "MS-AMP"),
}
"""Backend -> its module, and the name of the package that is installed."""
_FP8_SETTINGS: Final = ("fp8.backend", "fp8.all_gather", "fp8.pad_inner_dim", "fp8.te_options")
_OFF: Final = "set mixed_precision: bf16."


def fp8_backend(spec: FsdpSpec) -> str:
    """Return the backend of a spec, as Accelerate chooses it: the first that is installed, or torchao."""
    if spec.fp8.backend != "auto":
        return spec.fp8.backend
    return next((name for name in ("ao", "te") if _is_installed(name)), "ao")


def _is_installed(backend: str) -> bool:
    return importlib.util.find_spec(_FP8_PACKAGES[backend][0]) is not None


def check_fp8(spec: FsdpSpec) -> Iterator[Problem]:
    """Check that the backend is installed, and works with the other settings."""
    if not spec.enabled:
        return
    if not spec.uses_fp8:
        if given := [name for name in _FP8_SETTINGS if spec.asked(name) and spec.get(name) != "auto"]:
            message = f"{given[0]} has no effect: mixed_precision is {spec.launch.mixed_precision}."
            yield spec.problem("FSDP-W165", given[0], message, "Set mixed_precision: fp8, or remove it.")
        return
    backend = fp8_backend(spec)
    if backend == "msamp":
        message = "Accelerate does not combine MS-AMP with FSDP."
        yield spec.problem("FSDP-E121", "fp8.backend", message, f"Set backend: AO in fp8_config, or {_OFF}")
    elif not _is_installed(backend):
        package = _FP8_PACKAGES[backend][1]
        message = f"fp8 needs {package}, which is not installed."
        fix = f"Install it with `pip install {package}`, or {_OFF}"
        name = "fp8.backend" if spec.asked("fp8.backend") else "launch.mixed_precision"
        yield spec.problem("FSDP-E166", name, message, fix)
    if spec.fp8.all_gather and spec.fsdp.version == 1:
        where = spec.origin("fsdp.version")
        message = f"weights are all-gathered in fp8 by FSDP2 only, and the version is 1 ({where})."
        fix = "Set fsdp_version: 2, or enable_fsdp_float8_all_gather: false in fp8_config."
        yield spec.problem("FSDP-E167", "fp8.all_gather", message, fix)
    for axis in ("tensor", "expert"):
        if (size := getattr(spec.mesh, axis)) > 1:
            message = f"mesh.{axis}={size} with fp8: only whole layers are converted, and from_pretrained divides them."
            yield spec.problem("FSDP-E167", f"mesh.{axis}", message, f"Set mesh.{axis} to 1, or {_OFF}")
    if spec.precision.fp32_modules:
        message = "modules that compute in fp32 cannot be excluded from fp8, which Accelerate chooses by their sizes."
        fix = f"Remove fsdp_fp32_modules, or {_OFF}"
        yield spec.problem("FSDP-E167", "precision.fp32_modules", message, fix)
    if spec.precision.param == "fp16":
        message = f"fp8 is combined with bf16, and {spec.origin('precision.param')} sets fp16."
        yield spec.problem("FSDP-E167", "precision.param", message, "Remove it.")
