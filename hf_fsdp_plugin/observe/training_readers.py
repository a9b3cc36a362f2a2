"""Functions that read the settings of checkpoints, activations, loading and the launch from the live model."""

from __future__ import annotations

from dataclasses import replace

from hf_fsdp_plugin.devices import accelerator_type
from hf_fsdp_plugin.observe.first_step import native_layers
from hf_fsdp_plugin.observe.observed_run import ObservedRun, ObservedValue, common_value, unobservable, unplanned_cast
from hf_fsdp_plugin.observe.units import checkpoints_natively
from hf_fsdp_plugin.observe.weights import WeightComparison
from hf_fsdp_plugin.plan.names import canonical_name, is_inside
from hf_fsdp_plugin.text import format_bytes, format_names, plural
from hf_fsdp_plugin.torch_private.functions import (
    ActivationWrapper,
    CheckpointWrapper,
    checkpoint_keywords,
    compilation_is_disabled,
    uses_torch_checkpoint,
)
from hf_fsdp_plugin.torch_private.modules import calls_compiled


def read_state_dict(run: ObservedRun) -> ObservedValue:
    if run.state_dict is None:
        return unobservable("no checkpoint was saved, and the report has no Accelerator")
    return ObservedValue(value=run.state_dict)


def read_asynchronous(run: ObservedRun) -> ObservedValue:
    if run.saved_asynchronously is None:
        return unobservable("no checkpoint was saved")
    return ObservedValue(value=run.saved_asynchronously, reason="of the last checkpoint")


def read_verify(run: ObservedRun) -> ObservedValue:
    return unobservable("only a resume uses this setting; the model does not record it")


def read_checkpointing(run: ObservedRun) -> ObservedValue:
    wrappers = [module for module in run.model.modules() if isinstance(module, CheckpointWrapper)]
    native = any(map(checkpoints_natively, run.model.modules()))
    if len(switched := run.first_step.native_checkpointing | {native}) > 1 and not wrappers:
        reason = f"{len(switched)} states of Transformers' gradient checkpointing were observed during the run"
        return ObservedValue(value="switched on and off", reason=reason, matches=False)
    if not wrappers and not native:
        return ObservedValue(value="none")
    if missing := _not_recomputed(run):
        total = len(missing) + run.first_step.recomputation.num_recomputed if run.first_step.recomputation else 0
        reason = f"not computed again in the backward: {format_names(missing, 2)}"
        return ObservedValue(value=f"in {total - len(missing)} of {total} units", reason=reason, matches=False)
    if wrappers and native:
        reason = "torch's and Transformers' checkpointing are both enabled, so activations are recomputed twice"
        return ObservedValue(value="twice", reason=reason)
    if native:
        layers = read_native(run)
        value = "full" if layers.value is True else layers.value
        reason = layers.reason or "Transformers' gradient checkpointing"
        return ObservedValue(value=value, reason=reason, matches=layers.matches)
    keywords = [checkpoint_keywords(module) for module in wrappers]
    kind = common_value("selective" if "context_fn" in names else "full" for names in keywords)
    if broken := [module for module in wrappers if not uses_torch_checkpoint(module)]:
        return ObservedValue(value=f"{kind} in {len(wrappers) - len(broken)} of {len(wrappers)} units", matches=False)
    not_checkpointed = [unit.name for unit in run.layers if not unit.checkpointed]
    if not_checkpointed and len(wrappers) < len(run.layers):
        return ObservedValue(value=f"{kind} in {len(wrappers)} of {len(run.layers)} units", matches=False)
    return ObservedValue(value=kind, reason=f"{len(wrappers)} modules")


def _not_recomputed(run: ObservedRun) -> tuple[str, ...]:
    """Return the checkpointed modules that the first step did not compute again, if it had a backward."""
    first_step = run.first_step
    if first_step.recomputation is None or not first_step.num_steps:
        return ()
    return first_step.recomputation.not_recomputed


def read_native(run: ObservedRun) -> ObservedValue:
    """Read whether Transformers' checkpointing is enabled, in all layers that support it."""
    layers = [module for _, module in native_layers(run.model)]
    num_enabled = sum(map(checkpoints_natively, layers))
    if 0 < num_enabled < len(layers):
        return ObservedValue(value=f"in {num_enabled} of {len(layers)} layers", matches=False)
    if run.plan.activation.native and (missing := _not_recomputed(run)):
        return ObservedValue(value=False, reason=f"not computed again in the backward: {format_names(missing, 2)}")
    return ObservedValue(value=any(map(checkpoints_natively, run.model.modules())))


def read_activation_offload(run: ObservedRun) -> ObservedValue:
    """Read whether the activations of all planned units are offloaded."""
    wrappers = [module for module in run.model.modules() if isinstance(module, ActivationWrapper)]
    found = sum(not isinstance(wrapper, CheckpointWrapper) and "forward" not in vars(wrapper) for wrapper in wrappers)
    planned = sum(len(unit.modules) for unit in run.plan.units if unit.from_policy)
    if 0 < found < planned:
        return ObservedValue(value=f"in {found} of {planned} units", matches=False)
    return ObservedValue(value=found > 0)


def read_sync_module_states(run: ObservedRun) -> ObservedValue:
    return _read_loading(run, planned=run.plan.sync_module_states)


def read_ram_efficient(run: ObservedRun) -> ObservedValue:
    """Check that the ranks share memory: the parameters were mapped, shared or not loaded before they were sharded."""
    observed = _read_loading(run, planned=run.plan.ram_efficient)
    weights = run.weights
    if not observed.matches or weights is None or weights.before is None or run.world_size == 1:
        return observed
    before = weights.before
    counts = {
        "mapped from files": before.num_mapped,
        "in memory shared by the ranks of a machine": before.num_shared,
        "not loaded": before.num_on_meta,
        "in private memory": before.num_private,
        "on the accelerator": before.num_on_device,
    }
    kinds = ", ".join(f"{count} {kind}" for kind, count in counts.items() if count)
    if not weights.num_shared_ranks:
        return unobservable(f"no rank shared memory with others before the model was sharded: parameters {kinds}")
    memory = (
        f"at most {format_bytes(before.private_bytes)} of {format_bytes(before.total_bytes)} were private to a rank"
    )
    return replace(observed, reason=f"{observed.reason}; before, {memory}: parameters {kinds}")


def _read_loading(run: ObservedRun, *, planned: bool) -> ObservedValue:
    """Check that every rank has rank 0's weights and that no tensor is on the meta device."""
    if not planned:
        return unobservable("every rank loads all weights; this cannot be read off the model")
    weights = run.weights
    if weights is None:
        return unobservable("the weights were not compared between ranks")
    if weights.num_on_meta:
        reason = f"{weights.num_on_meta} tensors were not loaded: they are on the meta device"
        return ObservedValue(value=False, reason=reason, matches=False)
    if weights.differing:
        reason = f"ranks differ in {', '.join(weights.differing[:3])}"
        return ObservedValue(value=False, reason=reason, matches=False)
    num_planned = sum(len(unit.parameters) for unit in run.plan.units) + len(run.plan.ignored_parameters)
    if weights.num_broadcast is not None:
        num_equal = weights.num_broadcast + weights.num_from_files
        if num_equal < num_planned and not run.plan.pre_sharded:
            reason = f"{num_equal} tensors are those of rank 0, but the model has {num_planned} parameters"
            return ObservedValue(value=False, reason=reason, matches=False)
        origin = _origin_of_weights(weights)
        if weights.changed:
            return unobservable(
                f"{origin}, but a checkpoint or the script has changed weights before the first forward"
            )
        if num_equal:
            return ObservedValue(value=True, reason=origin, matches=True)
    if weights.replicated:
        return ObservedValue(value=True, reason="replicas and buffers are equal on all ranks", matches=True)
    return unobservable("all weights are loaded and buffers are equal, but no weight is on more than one rank")


def _origin_of_weights(weights: WeightComparison) -> str:
    parts = []
    if weights.num_from_files:
        parts.append(f"all ranks took {plural(weights.num_from_files, 'parameter')} from the same files")
    if weights.num_broadcast or not parts:
        filled = f"; {weights.num_filled} of them were not loaded on other ranks" if weights.num_filled else ""
        subject = "and" if parts else "all ranks"
        parts.append(f"{subject} received {weights.num_broadcast} bit-identical tensors from rank 0{filled}")
    return " ".join(parts)


def read_num_processes(run: ObservedRun) -> ObservedValue:
    return ObservedValue(value=run.world_size)


def read_num_machines(run: ObservedRun) -> ObservedValue:
    if run.num_hosts == run.plan.spec.launch.num_machines:
        return ObservedValue(value=run.num_hosts)
    return unobservable(
        f"the ranks have {run.num_hosts} host names, but containers of one machine may have different names"
    )


def read_mixed_precision(run: ObservedRun) -> ObservedValue:
    asked, param = str(run.plan.spec.launch.mixed_precision).lower(), run.plan.spec.precision.param
    if (asked in ("bf16", "fp16") or param in ("bf16", "fp16")) and param != asked:
        return unobservable(f"overridden by precision.param={param}")
    if not run.units_with_params:
        return unobservable("no parameter belongs to a unit")
    if reason := unplanned_cast(run):
        value = common_value(unit.param_dtype for unit in run.units_in_policy_dtype)
        return ObservedValue(value=value, reason=reason, matches=False)
    if not any(unit.live.casts for unit in run.units_with_params):
        return ObservedValue(value="no")
    value = common_value(unit.param_dtype for unit in run.units_in_policy_dtype)
    return ObservedValue(value="no" if value == "fp32" else value)


def read_use_cpu(run: ObservedRun) -> ObservedValue:
    if run.device_type == "cpu" and not run.plan.spec.launch.use_cpu:
        reason = "this machine has no accelerator"
        return ObservedValue(value=True, reason=reason, matches=accelerator_type() == "cpu")
    return ObservedValue(value=run.device_type == "cpu")


def read_distributed_type(run: ObservedRun) -> ObservedValue:
    return ObservedValue(value="FSDP")


def read_dynamo(run: ObservedRun) -> ObservedValue:
    asked = {str(key).removeprefix("dynamo_"): value for key, value in run.plan.spec.launch.dynamo_config.items()}
    compiles = str(asked.get("backend", "NO")).upper() != "NO"
    compiled = {canonical_name(name) for name, module in run.model.named_modules() if calls_compiled(module)}
    chosen = [name for unit in run.plan.units if unit.from_policy for name in map(canonical_name, unit.modules)]
    called = [name for name in chosen if any(is_inside(name, outer) for outer in compiled)]
    if compiled and compilation_is_disabled():
        reason = "TORCHDYNAMO_DISABLE or torch._dynamo.config.disable is set"
        return ObservedValue(value="not compiled", reason=reason, matches=not compiles)
    if compiles and compiled and len(called) < len(chosen):
        return ObservedValue(value=f"compiled in {len(called)} of {len(chosen)} units", matches=False)
    return ObservedValue(value="compiled" if compiled else "not compiled", matches=bool(compiled) == compiles)
