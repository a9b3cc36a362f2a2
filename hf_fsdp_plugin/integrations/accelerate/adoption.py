"""Adoption of models that ``from_pretrained(distributed_config=…)`` has sharded."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from hf_fsdp_plugin.integrations.accelerate import private
from hf_fsdp_plugin.integrations.accelerate.arguments import check_handlers
from hf_fsdp_plugin.integrations.accelerate.plugin import PlannedFsdpPlugin, planned_plugin
from hf_fsdp_plugin.integrations.accelerate.scaler import replace_scaler
from hf_fsdp_plugin.integrations.session import session
from hf_fsdp_plugin.messages import print_once, print_warnings
from hf_fsdp_plugin.plan.presharded import distributed_config_of
from hf_fsdp_plugin.problems import Origin, Problem, SpecError
from hf_fsdp_plugin.sources.distributed_config import OTHER_AXES
from hf_fsdp_plugin.spec.load import with_distributed_config
from hf_fsdp_plugin.spec.model import FsdpSpec


def adopt_models(accelerator: Any, objects: Iterable[Any]) -> None:
    """Make the accelerator use FSDP if one of ``objects`` is a model that ``from_pretrained`` has sharded.

    Stock Accelerate would wrap such a model in DistributedDataParallel, which raises, or shard it again. An accelerator
    that has a spec keeps it, with the settings of the model's ``DistributedConfig``.

    Raises:
        SpecError: the ``DistributedConfig`` conflicts with the spec.
    """
    config = next((config for obj in objects if (config := distributed_config_of(obj)) is not None), None)
    plugin = planned_plugin(accelerator)
    if config is None or (plugin is None and not session.installed) or private.prepared_models(accelerator):
        return
    if plugin is not None:
        plugin.use_spec(with_distributed_config(plugin.spec, config))
        return
    if is_left_to_transformers(config):
        return
    check_handlers(vars(accelerator).values())
    given = session.load(parallelism_config=accelerator.parallelism_config)
    spec = with_mixed_precision(given, accelerator.mixed_precision)
    spec = with_distributed_config(spec, config)
    print_warnings(spec.problems)
    private.set_fsdp(accelerator.state)
    accelerator.state.fsdp_plugin = PlannedFsdpPlugin(spec)
    replace_scaler(accelerator)
    print_once("this Accelerator uses FSDP2 now, because from_pretrained has sharded the model.")


def is_left_to_transformers(config: Any) -> bool:
    """Return whether a ``DistributedConfig`` uses tensor, pipeline or expert parallelism, and report it."""
    sizes = {name: getattr(config, name, None) or 1 for name in OTHER_AXES}
    used = [f"{name}={size}" for name, size in sizes.items() if size != 1]
    if used:
        message = f"the model is loaded with {', '.join(used)}, which this package does not support."
        fix = "Transformers trains it, without a report and without checkpoints of this package."
        print_once(Problem(code="FSDP-W650", message=message, fix=fix, origin=Origin(source="DistributedConfig")))
    return bool(used)


def with_mixed_precision(spec: FsdpSpec, given: Any) -> FsdpSpec:
    """Return ``spec`` with the precision of ``Accelerator(mixed_precision=…)``, which overrides the sources.

    Raises:
        SpecError: the precision is fp8.
    """
    if given is None or (given == "no" and not spec.asked("precision.param")):
        return spec
    origin = Origin(source="Accelerator()", spelling="mixed_precision", text=str(given))
    if str(given).lower() == "fp8":
        message = "mixed_precision=fp8: fp8 is implemented inside the model (torchao, TransformerEngine), not by FSDP."
        fix = "Set mixed_precision to bf16."
        raise SpecError([Problem(code="FSDP-E121", setting="precision.param", message=message, fix=fix, origin=origin)])
    param: Any = given if given in ("bf16", "fp16") else "auto"
    if param == spec.precision.param:
        return spec
    before = spec.origin("precision.param")
    overridden = Problem(
        code="FSDP-W103",
        setting="precision.param",
        origin=before,
        message=f"{before.written} is overridden by {origin}.",
        fix="Set it in one place.",
    )
    return replace(
        spec,
        precision=replace(spec.precision, param=param),
        origins={**spec.origins, "precision.param": origin},
        problems=(*spec.problems, overridden) if spec.asked("precision.param") else spec.problems,
    )
