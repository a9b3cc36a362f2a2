"""Replacements of methods of ``TrainingArguments``: this package parses the FSDP settings."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from hf_fsdp_plugin.integrations.patching import changes, is_true, set_loading_variables
from hf_fsdp_plugin.integrations.script_arguments import check_object, print_or_raise
from hf_fsdp_plugin.integrations.session import attributes_in_block, session
from hf_fsdp_plugin.messages import print_warnings
from hf_fsdp_plugin.problems import Origin, Problem, SpecError
from hf_fsdp_plugin.sources.accelerate_file import read_fsdp_config
from hf_fsdp_plugin.sources.interface import Sources
from hf_fsdp_plugin.sources.script_objects import ARGUMENTS, DISTRIBUTED_CONFIG, FSDP_SIZES, read_distributed_config
from hf_fsdp_plugin.spec.fsdp_spec import FsdpSpec
from hf_fsdp_plugin.strategies import STRATEGIES

_SWITCHES = ("bf16", "fp16", "gradient_checkpointing", "activation_checkpointing")
"""Fields that are settings only if true: false is their default, so the user may not have set it."""


def validate_arguments(original: Callable[..., None], arguments: Any, *args: Any, **kwargs: Any) -> None:
    """Set ``use_cpu`` on CPU ranks that a launcher selected.

    Without ``use_cpu``, Transformers rejects bf16. With it, Transformers ignores ``ddp_timeout``.
    """
    changes().install("accelerate")
    if any(getattr(arguments, name, None) for name in ("fsdp", "fsdp_config")):
        session().ask_for_fsdp()
    if not session().uses_fsdp:
        original(*args, **kwargs)
        return
    if is_true("ACCELERATE_USE_CPU"):
        arguments.use_cpu = True
    with attributes_in_block(session(), group_timeout=arguments.ddp_timeout_delta):
        original(*args, **kwargs)


def process_fsdp_args(original: Callable[[], Any], arguments: Any) -> Any:
    """Parse the FSDP settings, and keep the spec for the Trainer. Call the original if no source enables FSDP.

    Returns:
        ``None`` instead of keyword arguments for Accelerate's plugin, because the plugin is created from the spec.

    Raises:
        SpecError: any source has an error. The exception contains all problems of all sources.
    """
    spec = read_spec(arguments)
    if not spec.enabled:
        if arguments.fsdp and not spec.uses_xla:
            arguments.fsdp = None  # Transformers turns FSDP on for any text, "false" included
        return original()
    if arguments.fsdp:
        arguments.fsdp = True
        arguments.fsdp_config = _completed_config(arguments.fsdp_config, spec)
    return None


def read_spec(arguments: Any) -> FsdpSpec:
    """Return the spec of all sources with a ``TrainingArguments``, which is remembered if it enables FSDP.

    Raises:
        SpecError: any source has an error, or an argument of the script is refused.
    """
    mesh = getattr(arguments, "parallelism_config", None)
    spec = session().load(training_arguments=fsdp_arguments(arguments), parallelism_config=mesh)
    print_warnings(spec.problems)
    if spec.enabled:
        print_or_raise([*check_object(arguments, source=ARGUMENTS)])
        session().remember(arguments, spec)
        set_loading_variables(spec)
    return spec


def _completed_config(config: Any, spec: FsdpSpec) -> dict[str, Any]:
    """Return ``fsdp_config`` as Transformers leaves it, for code that reads it: without prefixes, with its defaults."""
    completed = {name.removeprefix("fsdp_"): value for name, value in read_fsdp_config(config).items()}
    if isinstance(layers := completed.get("transformer_layer_cls_to_wrap"), str):
        completed["transformer_layer_cls_to_wrap"] = [layers]
    strategy = spec.sharding.strategy
    reshards = STRATEGIES[strategy].reshards_after_forward if spec.fsdp.version == 2 else strategy
    defaults: dict[str, Any] = {"min_num_params": 0, "xla": False, "xla_fsdp_v2": False, "xla_fsdp_grad_ckpt": False}
    defaults |= {"reshard_after_forward": reshards} if spec.asked("sharding.strategy") else {}
    defaults |= {"cpu_offload": True} if spec.offload.params else {}
    return {**defaults, **completed}


def fsdp_arguments(arguments: Any) -> dict[str, Any]:
    """Return the FSDP fields that are set in a ``TrainingArguments``, as keyword arguments."""
    given = {name: getattr(arguments, name, None) for name in ("fsdp", "fsdp_config")}
    given |= {name: True for name in _SWITCHES if getattr(arguments, name, None)}
    return {name: value for name, value in given.items() if value}


def prepare_distribute_model(
    original: Callable[..., Any], cls: type, distributed_config: Any = None, *args: Any, **kwargs: Any
) -> Any:
    """Check the config before the model is loaded, and start the process group that FSDP needs.

    Raises:
        SpecError: the config has an unknown key, or a ``device_map`` is given too.
    """
    if distributed_config is None:
        return original(distributed_config, *args, **kwargs)
    session().ask_for_fsdp()
    read = read_distributed_config(Sources(distributed_config=distributed_config, environ={}))
    if read is not None and (unknown := [problem for problem in read.problems if problem.code == "FSDP-E020"]):
        raise SpecError(unknown)
    fields = distributed_config if isinstance(distributed_config, dict) else vars(distributed_config)
    sizes = [fields.get(name) for name in FSDP_SIZES]
    if any(isinstance(size, int) and size > 1 for size in sizes):
        device_map = kwargs.get("device_map", args[0] if args else None)
        if device_map is not None:
            message = f"from_pretrained was called with device_map={device_map!r} and a distributed_config."
            fix = "Remove device_map: each rank loads its shards to its own device."
            origin = Origin(source=DISTRIBUTED_CONFIG)
            raise SpecError([Problem(code="FSDP-E651", message=message, fix=fix, origin=origin)])
        if "RANK" in os.environ:  # as the first PartialState does, with a backend for CPU tensors too
            from accelerate import PartialState

            PartialState(cpu=is_true("ACCELERATE_USE_CPU"))
    return original(distributed_config, *args, **kwargs)
