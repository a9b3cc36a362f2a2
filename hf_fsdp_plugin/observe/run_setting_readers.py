"""Reads each setting from the live model and compares it with the requested value.

The readers of checkpoints, activations, loading and the launch are here, the others in ``unit_setting_readers``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

from hf_fsdp_plugin.backends.sharding.activation_checkpointing import checkpoints_itself
from hf_fsdp_plugin.contracts import ContractError
from hf_fsdp_plugin.devices import accelerator_type
from hf_fsdp_plugin.observe import unit_setting_readers
from hf_fsdp_plugin.observe.observed_run import ObservedRun, ObservedValue, common_value, differing, unobserved
from hf_fsdp_plugin.observe.units import checkpoints_natively
from hf_fsdp_plugin.observe.weights import WeightComparison
from hf_fsdp_plugin.plan.names import canonical_name, is_inside
from hf_fsdp_plugin.spec.value_parsers import setting_to_json
from hf_fsdp_plugin.text import plural
from hf_fsdp_plugin.torch_private import functions
from hf_fsdp_plugin.torch_private.modules import calls_compiled


def read_checkpointing(run: ObservedRun) -> ObservedValue:
    wrappers = [module for module in run.model.modules() if isinstance(module, functions.CheckpointWrapper)]
    native = any(map(checkpoints_natively, run.model.modules()))
    if len(switched := run.first_step.native_checkpointing | {native}) > 1 and not wrappers:
        reason = f"{len(switched)} states of Transformers' gradient checkpointing were observed during the run"
        return differing("switched on and off", reason)
    if not wrappers and not native:
        return ObservedValue("none")
    if wrappers and native:
        reason = "torch's and Transformers' checkpointing are both enabled, so activations are recomputed twice"
        return ObservedValue("twice", reason)
    if native:
        layers = read_native(run)
        if run.plan.activation.checkpointing == "none" and layers.value is True:
            return ObservedValue("full", "the script has enabled the model's own checkpointing", matches=True)
        reason = layers.reason or "Transformers' gradient checkpointing"
        return ObservedValue("full" if layers.value is True else layers.value, reason, layers.matches)
    keywords = [functions.checkpoint_keywords(module) for module in wrappers]
    kind = common_value("selective" if "context_fn" in names else "full" for names in keywords)
    if broken := [module for module in wrappers if not functions.uses_torch_checkpoint(module)]:
        return differing(f"{kind} in {len(wrappers) - len(broken)} of {len(wrappers)} units")
    not_checkpointed = [unit.name for unit in run.layers if not unit.checkpointed]
    if not_checkpointed and len(wrappers) < len(run.layers):
        return differing(f"{kind} in {len(wrappers)} of {len(run.layers)} units")
    return ObservedValue(kind, reason=f"{len(wrappers)} modules")


def read_native(run: ObservedRun) -> ObservedValue:
    """Read whether Transformers' checkpointing is enabled, in all layers that support it."""
    layers = list(filter(checkpoints_itself, run.model.modules()))
    num_enabled = sum(map(checkpoints_natively, layers))
    every = -(-len(layers) // num_enabled) if num_enabled else 1
    if every > 1 and [checkpoints_natively(layer) for layer in layers] == [n % every == 0 for n in range(len(layers))]:
        return ObservedValue(True, f"in one of {every} layers: every_n_layers={every} of Transformers", matches=True)
    if 0 < num_enabled < len(layers):
        return differing(f"in {num_enabled} of {len(layers)} layers")
    return ObservedValue(any(map(checkpoints_natively, run.model.modules())))


def read_activation_offload(run: ObservedRun) -> ObservedValue:
    """Read whether the activations of all planned units are offloaded."""
    wrappers = [module for module in run.model.modules() if isinstance(module, functions.ActivationWrapper)]
    offloaders = [wrapper for wrapper in wrappers if not isinstance(wrapper, functions.CheckpointWrapper)]
    found = sum(map(functions.calls_own_forward, offloaders))
    planned = len(run.chosen)
    if 0 < found < planned:
        return differing(f"in {found} of {planned} units")
    return ObservedValue(found > 0)


def read_ram_efficient(run: ObservedRun) -> ObservedValue:
    """Check that the ranks shared memory: parameters were mapped or not loaded before they were sharded."""
    observed = read_loading(run, planned=run.plan.ram_efficient)
    weights = run.weights
    if observed.matches and weights is not None and weights.num_shared_ranks == 0 and run.world_size > 1:
        return unobserved("no rank had mapped parameters, or not loaded them, before the model was sharded")
    return observed


def read_loading(run: ObservedRun, *, planned: bool) -> ObservedValue:
    """Check that every rank has rank 0's weights and that no tensor is on the meta device."""
    if not planned:
        return unobserved("every rank loads all weights; this cannot be read off the model")
    if (weights := run.weights) is None:
        return unobserved("the weights were not compared between ranks")
    if weights.num_on_meta:
        return differing(False, f"{weights.num_on_meta} tensors were not loaded: they are on the meta device")
    if weights.differing:
        return differing(False, f"ranks differ in {', '.join(weights.differing[:3])}")
    num_planned = sum(len(unit.parameters) for unit in run.plan.units) + len(run.plan.ignored_parameters)
    if weights.num_broadcast is not None:
        num_equal = weights.num_broadcast + weights.num_from_files
        if num_equal < num_planned and not run.plan.pre_sharded:
            reason = f"{num_equal} tensors are those of rank 0, but the model has {num_planned} parameters"
            return differing(False, reason)
        origin = _origin_of_weights(weights)
        if num_equal:
            return ObservedValue(True, origin, matches=True)
    if weights.replicated:
        return ObservedValue(True, "replicas and buffers are equal on all ranks", matches=True)
    return unobserved("all weights are loaded and buffers are equal, but no weight is on more than one rank")


def _origin_of_weights(weights: WeightComparison) -> str:
    """Return where all ranks have their weights from, in one sentence."""
    taken = f"took {plural(weights.num_from_files, 'parameter')} from the same files" if weights.num_from_files else ""
    filled = f"; {weights.num_filled} of them were not loaded on other ranks" if weights.num_filled else ""
    received = f"received {weights.num_broadcast} bit-identical tensors from rank 0{filled}"
    parts = [taken, received if weights.num_broadcast or not taken else ""]
    return f"all ranks {' and '.join(filter(None, parts))}"


def read_num_machines(run: ObservedRun) -> ObservedValue:
    if run.num_hosts == run.plan.spec.launch.num_machines:
        return ObservedValue(run.num_hosts)
    found = f"the ranks have {run.num_hosts} host names"
    return unobserved(f"{found}, but containers of one machine may have different names")


def read_mixed_precision(run: ObservedRun) -> ObservedValue:
    if run.plan.spec.uses_fp8:
        value = "fp8" if any(unit.fp8_modules for unit in run.units) else "no"
        return replace(unit_setting_readers.read_fp8_backend(run), value=value)
    asked, param = str(run.plan.spec.launch.mixed_precision).lower(), run.plan.spec.precision.param
    if (asked in ("bf16", "fp16") or param in ("bf16", "fp16")) and param != asked:
        return unobserved(f"overridden by precision.param={param}")
    if not run.units_with_params:
        return unobserved("no parameter belongs to a unit")
    value = common_value(unit.param_dtype for unit in run.units_in_policy_dtype)
    if reason := unit_setting_readers.unplanned_cast(run):
        return differing(value, reason)
    casts = any(unit.live.casts for unit in run.units_with_params)
    return ObservedValue(value if casts and value != "fp32" else "no")


def read_use_cpu(run: ObservedRun) -> ObservedValue:
    if run.device_type == "cpu" and not run.plan.spec.launch.use_cpu:
        return ObservedValue(True, "this machine has no accelerator", matches=accelerator_type() == "cpu")
    return ObservedValue(run.device_type == "cpu")


def read_dynamo(run: ObservedRun) -> ObservedValue:
    asked = {str(key).removeprefix("dynamo_"): value for key, value in run.plan.spec.launch.dynamo_config.items()}
    compiles = str(asked.get("backend", "NO")).upper() != "NO"
    compiled = {canonical_name(name) for name, module in run.model.named_modules() if calls_compiled(module)}
    chosen = list(map(canonical_name, run.chosen))
    called = [name for name in chosen if any(is_inside(name, outer) for outer in compiled)]
    if compiled and functions.compilation_is_disabled():
        reason = "TORCHDYNAMO_DISABLE or torch._dynamo.config.disable is set"
        return ObservedValue("not compiled", reason, matches=not compiles)
    if compiles and compiled and len(called) < len(chosen):
        return differing(f"compiled in {len(called)} of {len(chosen)} units")
    reason = f"by region: {plural(len(compiled), 'module')}" if compiled and "" not in compiled else ""
    return ObservedValue("compiled" if compiled else "not compiled", reason, matches=bool(compiled) == compiles)


ValueReader = Callable[[ObservedRun], ObservedValue]


def _recorded(attribute: str, missing: str, reason: str = "") -> ValueReader:
    """Return a reader of an attribute of the run, which is unobservable if it is ``None``, for the reason `missing`."""

    def read(run: ObservedRun) -> ObservedValue:
        value = getattr(run, attribute)
        return unobserved(missing) if value is None else ObservedValue(value, reason)

    return read


def read_state_dict(run: ObservedRun) -> ObservedValue:
    if run.state_dict is None:
        return unobserved("no checkpoint was saved, and the report has no Accelerator")
    return ObservedValue(run.state_dict, run.state_dict_reason, matches=True if run.state_dict_reason else None)


def _switch_of_fsdp1(attribute: str, fsdp2: str) -> ValueReader:
    """Return a reader of what only FSDP1 has a switch for. ``fsdp2`` is what FSDP2 always does."""

    def read(run: ObservedRun) -> ObservedValue:
        if any(unit.live.version == 2 for unit in run.units):
            return ObservedValue(True, fsdp2)
        return ObservedValue(common_value(getattr(unit.live, attribute) for unit in run.units))

    return read


_ALWAYS_SHOWN: Final[dict[str, ValueReader]] = {
    "fsdp.version": lambda run: ObservedValue(common_value(unit.live.version for unit in run.units)),
    "sharding.strategy": unit_setting_readers.read_strategy,
    "mesh.shard": unit_setting_readers.read_mesh_shard,
    "mesh.replicate": unit_setting_readers.read_mesh_replicate,
    "mesh.context": lambda run: ObservedValue(unit_setting_readers.axis_size(run, "context")),
    "mesh.tensor": lambda run: ObservedValue(unit_setting_readers.axis_size(run, "tensor")),
    "mesh.expert": lambda run: ObservedValue(unit_setting_readers.axis_size(run, "expert")),
    "wrap.policy": unit_setting_readers.read_wrap_policy,
    "offload.params": unit_setting_readers.read_offload,
    "precision.param": unit_setting_readers.read_param_dtype,
    "precision.reduce": unit_setting_readers.read_reduce_dtype,
    "prefetch.backward": unit_setting_readers.read_backward_prefetch,
    "prefetch.forward": unit_setting_readers.read_forward_prefetch,
    "activation.checkpointing": read_checkpointing,
}
"""Settings that determine the memory, the speed or the numerics of the run: the report contains them in any case."""

READERS: Final[Mapping[str, ValueReader]] = {
    **_ALWAYS_SHOWN,
    "sharding.reduce_replicas_at_last_micro_batch": unit_setting_readers.read_late_reduction,
    "wrap.classes": unit_setting_readers.read_wrap_classes,
    "wrap.min_num_params": unit_setting_readers.read_min_num_params,
    "wrap.ignored_modules": unit_setting_readers.read_ignored_modules,
    "mesh.context_exchange": unit_setting_readers.read_context_exchange,
    "offload.optimizer": unit_setting_readers.read_offload_optimizer,
    "offload.pin_memory": unit_setting_readers.read_pin_memory,
    "precision.fp32_modules": unit_setting_readers.read_fp32_modules,
    "precision.output": unit_setting_readers.read_output_dtype,
    "precision.buffer": unit_setting_readers.read_buffer_dtype,
    "prefetch.limit_all_gathers": _switch_of_fsdp1("limit_all_gathers", "FSDP2 always limits all-gathers"),
    "params.use_orig": _switch_of_fsdp1("use_orig", "FSDP2 always keeps the original parameters"),
    "checkpoint.state_dict": read_state_dict,
    "checkpoint.asynchronous": _recorded("saved_asynchronously", "no checkpoint was saved", "of the last checkpoint"),
    "checkpoint.verify": lambda run: unobserved("only a resume uses this setting; the model does not record it"),
    "checkpoint.storage": _recorded("storage", "no checkpoint was saved to a storage"),
    "checkpoint.save_on_signal": lambda run: unobserved("it takes effect when a signal arrives"),
    "metrics.log": lambda run: unobserved("the model does not record it"),
    "metrics.straggler_percent": lambda run: unobserved("the model does not record it"),
    "activation.native": read_native,
    "activation.offload": read_activation_offload,
    "loading.ram_efficient": read_ram_efficient,
    "loading.sync_module_states": lambda run: read_loading(run, planned=run.plan.sync_module_states),
    "fp8.backend": unit_setting_readers.read_fp8_backend,
    "fp8.all_gather": unit_setting_readers.read_fp8_all_gather,
    "fp8.pad_inner_dim": unit_setting_readers.read_fp8_padding,
    "fp8.te_options": lambda run: unobserved("the layers of Transformer Engine do not store its recipe"),
    "launch.num_processes": lambda run: ObservedValue(run.world_size),
    "launch.num_machines": read_num_machines,
    "launch.mixed_precision": read_mixed_precision,
    "launch.use_cpu": read_use_cpu,
    "launch.distributed_type": lambda run: ObservedValue("FSDP"),
    "launch.dynamo_config": read_dynamo,
}
"""Canonical name of a setting -> function that reads its value from the live model."""


_DTYPES: Final = ("precision.param", "precision.reduce", "precision.output", "launch.mixed_precision")
"""Settings whose values a script may change for an evaluation, for example by ``bf16_full_eval``."""


def read_setting(name: str, run: ObservedRun) -> ObservedValue:
    """Read one setting from the live model, by canonical name."""
    if name in READERS:
        return READERS[name](run)
    if name.startswith("xla."):
        asked = run.plan.spec.get(name)
        return ObservedValue(False if asked else asked, "the model is not on an XLA device", matches=not asked)
    return unobserved("only the launcher uses this setting; the model does not record it")


def observe_settings(run: ObservedRun) -> list[Mapping[str, Any]]:
    """Compare the settings that the report shows with the live model, in the order of the spec.

    Each of them is ``observed_setting`` of docs/json.schema.json.
    """
    plan, spec = run.plan, run.plan.spec
    rows: list[Mapping[str, Any]] = []
    shown = {*_ALWAYS_SHOWN, *(["wrap.classes"] if spec.wrap.policy == "transformer" else [])}
    if spec.uses_fp8:
        shown |= {"fp8.backend", "fp8.all_gather"}
    for name in (name for name, _, _ in spec.settings() if name in shown or spec.asked(name)):
        planned = plan.get(name)
        asked = spec.get(name) if spec.asked(name) else planned
        if not run.units and not name.startswith("launch."):
            found = differing("not sharded", "no module of the live model is an FSDP unit")
        else:
            try:
                found = read_setting(name, run)
            except ContractError as error:
                found = unobserved(error.reason)
            if found.value is None and not found.unobservable:
                # For example, scalars are not sharded, so the units of a model of scalars have no parameters.
                reasons = (error.reason for unit in run.units for error in unit.live.unknown())
                found = unobserved(next(reasons, "no unit has parameters"))
        only_evaluated = not (run.model.training or run.first_step.num_steps)
        if only_evaluated and name in _DTYPES and (cast := unit_setting_readers.stored_cast(run)):
            found = replace(found, reason=f"{cast}, of a model that is only evaluated", matches=True)
        if plan.pre_sharded and not spec.asked(name) and not found.unobservable:
            found = replace(found, reason=found.reason or "set by the script when it wrapped the model", matches=True)
        row = {"asked": asked, "planned": planned, "observed": found.value}
        row = {key: setting_to_json(value) for key, value in row.items()}
        matches = found.matches
        if matches is None:  # "unchanged" is the dtype of the model, whatever that is
            matches = planned == "unchanged" or row["observed"] == row["planned" if asked == "auto" else "asked"]
        status = "unobservable" if found.unobservable else "applied" if matches else "differs"
        origin = spec.origin(name).to_json()
        rows.append({"setting": name, **row, "status": status, "origin": origin, "reason": found.reason})
    return rows
