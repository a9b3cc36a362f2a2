"""Runs one forward and backward pass of a model on the meta device, and records what it allocates.

Of equal layers, only some run.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Collection, Iterable
from contextlib import ExitStack, suppress
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.experimental import context_parallel

from hf_fsdp_plugin.backends.sharding.activation_checkpointing import configs_with_cache
from hf_fsdp_plugin.backends.sharding.forwards import fp32_forwards
from hf_fsdp_plugin.backends.torch_types import cast_floats
from hf_fsdp_plugin.plan.fsdp_plan import FsdpPlan, torch_dtype
from hf_fsdp_plugin.plan.names import is_inside
from hf_fsdp_plugin.problems import Problem, SpecError
from hf_fsdp_plugin.tools.plan.estimate.divided import RankModel, divided
from hf_fsdp_plugin.tools.plan.estimate.memory.attention import DeviceAttention
from hf_fsdp_plugin.tools.plan.estimate.memory.stages import Recorder, replace_forward
from hf_fsdp_plugin.tools.plan.estimate.memory.step import StepProfile, expand_layers
from hf_fsdp_plugin.tools.plan.estimate.types import Workload
from hf_fsdp_plugin.torch_private.context_parallel import add_cpu_attention, context_exchange, set_context_exchange
from hf_fsdp_plugin.torch_private.modules import entries_in_block, registrations

_MIN_LAYERS = 5
"""Number of equal layers from which on some of them are skipped: the first two and the last two always run."""


def profile_step(plan: FsdpPlan, model: nn.Module, workload: Workload) -> StepProfile:
    """Return the memory that a forward and backward pass allocates, in the plan's dtypes and with its checkpointing.

    Layers that are equal to another one do not run: their stages are copies. `model` is unchanged afterwards.

    Args:
        model: on the meta device, not sharded.

    Raises:
        SpecError: the model cannot run on the meta device (FSDP-E810), has other inputs than a batch of text or images
            (FSDP-E811), or its axes cannot be predicted in this process (FSDP-E813).
    """
    batch = meta_batch(model, micro_batch=workload.micro_batch, seq_len=workload.seq_len)
    try:
        with divided(plan, model) as rank:
            return _profile(plan, rank, workload, batch)
    except SpecError:
        raise
    except Exception as error:  # the code of the model can raise any exception
        reason = (str(error).strip().splitlines() or [""])[0]
        message = f"{type(model).__name__} cannot run on the meta device: {type(error).__name__}: {reason}"
        fix = "Check that the model accepts a batch of this size, and that its code reads no values of tensors."
        raise SpecError([Problem(code="FSDP-E810", message=message, fix=fix)]) from error


def _profile(plan: FsdpPlan, rank: RankModel, workload: Workload, batch: dict[str, Any]) -> StepProfile:
    model = rank.model
    equal = equal_layers(model, plan.fp32_parameters)
    groups = {layer: copies for layer, copies in equal.items() if _has_own_units(plan, layer)}
    with ExitStack() as undo:
        _set_training(model, workload, undo)
        _set_compute_dtypes(plan, model, [name for copies in groups.values() for name in copies], undo)
        for module, forward in list(fp32_forwards(plan, model)):
            replace_forward(module, forward, undo)
        inputs = [x for x in batch.values() if isinstance(x, torch.Tensor)]
        recorder = Recorder(plan, rank, inputs, groups, undo)
        _set_stored_dtypes(plan, model, undo)
        undo.enter_context(DeviceAttention(plan.device_type))
        undo.enter_context(recorder.tracker)
        input_bytes = sum(x.untyped_storage().nbytes() for x in inputs)
        if rank.context is not None:
            batch = _divide_sequence(plan, model, batch, rank.context, undo)
            input_bytes = recorder.tracker.live.activations
        recorder.mark("start", "")
        outputs = model(**batch)
        loss: torch.Tensor = outputs["loss"] if isinstance(outputs, dict) else outputs[0]
        del outputs  # they are freed, as in the Trainer's ``compute_loss``
        recorder.mark("loss", "")
        loss.backward()
        recorder.finish()
    stages = tuple(expand_layers(recorder.stages, recorder.representatives))
    return StepProfile(stages=stages, input_bytes=input_bytes)


def _divide_sequence(
    plan: FsdpPlan, model: nn.Module, batch: dict[str, Any], mesh: DeviceMesh, undo: ExitStack
) -> dict[str, torch.Tensor]:
    """Return the part of a batch that a rank of the context axis has, in new tensors with memory for the whole batch.

    The batch and the attention are those of the Trainer and of Accelerate's ``_attach_context_parallel_hooks``.
    """
    from transformers import masking_utils

    ids, labels = torch.zeros_like(batch["input_ids"]), torch.zeros_like(batch["labels"])
    positions = torch.arange(ids.shape[1], device="meta").expand(ids.shape[0], -1)
    parts = {"input_ids": ids, "labels": labels, "shift_labels": torch.zeros_like(labels), "position_ids": positions}
    buffers = list(parts.values())
    undo.callback(set_context_exchange, context_exchange())
    set_context_exchange(plan.spec.mesh.context_exchange)
    if plan.device_type == "cpu":
        add_cpu_attention()
    dims = [1] * len(buffers)
    undo.enter_context(context_parallel(mesh, buffers=buffers, buffer_seq_dims=dims, no_restore_buffers=set(buffers)))

    # As the replacement of integrations.accelerate.accelerator: there is no mask of packed sequences.
    undo.enter_context(entries_in_block({"find_packed_sequence_indices": lambda ids: None}, vars(masking_utils)))

    def causal(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        return args, {**kwargs, "attention_mask": None, "is_causal": True}

    for name, module in model.named_modules():
        if name.endswith("self_attn"):
            undo.callback(module.register_forward_pre_hook(causal, with_kwargs=True).remove)
    return parts


def meta_batch(model: nn.Module, *, micro_batch: int, seq_len: int) -> dict[str, Any]:
    """Return inputs and labels of a training forward, as tensors on the meta device.

    Text models get tokens, image classifiers pixels, speech models features of the longest sound, and models that
    contrast text with images both, with ``return_loss``. The tokens are at most as many as the model has positions.

    Raises:
        SpecError: the model has other inputs (FSDP-E811).
    """
    # The forward of a PeftModel without a task type accepts any arguments. The model inside it names them.
    model = inner() if callable(inner := getattr(model, "get_base_model", None)) else model
    config: Any = getattr(model, "config", None)
    main = getattr(model, "main_input_name", "input_ids")
    accepted = inspect.signature(model.forward).parameters.keys()

    def indices(*shape: int) -> torch.Tensor:
        return torch.zeros(micro_batch, *shape, dtype=torch.long, device="meta")

    def floats(*shape: int) -> torch.Tensor:
        return torch.zeros(micro_batch, *shape, device="meta")

    def pixels(vision: Any) -> torch.Tensor:
        size = getattr(vision, "image_size", 224)
        sides = size if isinstance(size, tuple | list) else (size, size)
        return floats(getattr(vision, "num_channels", 3), *sides)

    if config is not None and {"return_loss", "pixel_values", "input_ids"} <= accepted:
        text, vision = getattr(config, "text_config", config), getattr(config, "vision_config", config)
        length = min(seq_len, getattr(text, "max_position_embeddings", seq_len))
        return {"input_ids": indices(length), "pixel_values": pixels(vision), "return_loss": True}
    has_loss = "labels" in accepted or "start_positions" in accepted
    is_speech = main == "input_features" and hasattr(config, "num_mel_bins")
    known = main in ("input_ids", "pixel_values") or is_speech
    if config is None or not known or main not in accepted or not has_loss:
        name, main = type(model).__name__, getattr(model, "main_input_name", "unknown")
        message = f"the activations of {name} cannot be counted: its main input is {main}, or it has no labels "
        fix = "Use a model with a head for text, images or speech, such as a causal language model."
        raise SpecError([Problem(code="FSDP-E811", message=f"{message}from which it computes a loss.", fix=fix)])
    if is_speech:  # two features are one position of the encoder
        length = min(seq_len, getattr(config, "max_target_positions", seq_len))
        features = floats(config.num_mel_bins, 2 * config.max_source_positions)
        return {"input_features": features, "labels": indices(length)}
    if main == "pixel_values":
        return {"pixel_values": pixels(config), "labels": indices()}
    tokens, one_each = indices(seq_len), indices()
    if "start_positions" in accepted:
        return {"input_ids": tokens, "start_positions": one_each, "end_positions": one_each}
    labels = tokens
    if type(model).__name__.endswith(("ForSequenceClassification", "ForMultipleChoice", "ForNextSentencePrediction")):
        kind = getattr(config, "problem_type", None)
        has_one_label = kind == "single_label_classification" or (kind is None and config.num_labels > 1)
        labels = one_each if has_one_label else floats(config.num_labels)
    return {"input_ids": tokens, "labels": labels}


def equal_layers(model: nn.Module, distinct: Collection[str] = ()) -> dict[str, tuple[str, ...]]:
    """Return the groups of equal layers in the model's outermost module lists that are large enough to skip some.

    The result has the second layer of each group, which represents it, and the layers that do not run: all but the
    first two and the last, as the first and the last layer may differ at their borders.

    Args:
        distinct: names of parameters that are computed in another dtype than the others.
    """
    found: dict[str, tuple[str, ...]] = {}
    outermost: list[str] = []
    for path, layers in model.named_modules():
        if not isinstance(layers, nn.ModuleList) or any(path.startswith(outer) for outer in outermost):
            continue
        outermost.append(f"{path}.")
        groups: dict[object, list[str]] = defaultdict(list)
        for index, layer in enumerate(layers):
            name = f"{path}.{index}"
            special = tuple(each.removeprefix(name) for each in distinct if each.startswith(f"{name}."))
            groups[_structure(layer), special].append(name)
        found |= {names[1]: tuple(names[2:-1]) for names in groups.values() if len(names) >= _MIN_LAYERS}
    return found


def _structure(layer: nn.Module) -> object:
    """Return the properties that equal layers have in common: classes, shapes, dtypes, settings (sliding windows)."""

    def settings(module: nn.Module) -> tuple[object, ...]:
        return tuple(
            (name, value)
            for name, value in vars(module).items()
            if isinstance(value, int | float | str | bool) and "idx" not in name and "index" not in name
        )

    modules = tuple((name, type(module), settings(module)) for name, module in layer.named_modules())
    parameters = tuple((name, p.shape, p.dtype, p.requires_grad) for name, p in layer.named_parameters())
    return modules, parameters


def _has_own_units(plan: FsdpPlan, layer: str) -> bool:
    """Whether no unit around a layer contains parameters of it. Its stages can be copied only then."""
    around = [unit for unit in plan.units if not any(name and is_inside(name, layer) for name in unit.modules)]
    return not any(is_inside(name, layer) for unit in around for name in unit.parameters)


def _set_training(model: nn.Module, workload: Workload, undo: ExitStack) -> None:
    """Set the mode of a training, without a cache, and the workload's attention.

    FlashAttention saves the same tensors as ``sdpa``. Some models have eager attention only.
    """
    config: Any = getattr(model, "config", None)
    setter: Any = getattr(model, "set_attn_implementation", None)
    before = getattr(config, "_attn_implementation", None)
    wanted = "eager" if workload.attention == "eager" else "sdpa"
    if setter is not None and before not in (None, wanted):
        with suppress(ValueError):  # the model does not support it
            undo.callback(setter, before)
            setter(wanted)
    if hasattr(config, "problem_type"):  # classifiers set it in their first forward
        undo.callback(setattr, config, "problem_type", config.problem_type)
    for cached in configs_with_cache(model):
        undo.callback(setattr, cached, "use_cache", True)
        cached.use_cache = False
    undo.callback(model.train, model.training)
    model.train()


def _set_compute_dtypes(plan: FsdpPlan, model: nn.Module, skipped: Iterable[str], undo: ExitStack) -> None:
    """Replace the parameters by ones in the dtype in which FSDP gathers them, except in layers that do not run."""
    dtype = torch_dtype(plan.precision.param)
    skipped_modules = {id(module) for name in skipped for module in model.get_submodule(name).modules()}
    new: dict[int, nn.Parameter] = {}
    in_trained_flat = _in_trained_flat(plan, model)
    kept = {id(model.get_parameter(name)) for name in plan.fp32_parameters}
    for registered, name, parameter in registrations(m for m in model.modules() if id(m) not in skipped_modules):
        if id(parameter) not in new:
            casts = dtype is not None and parameter.is_floating_point()
            computed = torch.float32 if id(parameter) in kept else dtype if casts else parameter.dtype
            data = torch.empty_like(parameter, device="meta", dtype=computed)
            needs_grad = parameter.requires_grad or id(parameter) in in_trained_flat
            new[id(parameter)] = nn.Parameter(data, requires_grad=needs_grad)
        undo.callback(registered.__setitem__, name, parameter)
        registered[name] = new[id(parameter)]


def _in_trained_flat(plan: FsdpPlan, model: nn.Module) -> set[int]:
    """Return the ids of parameters in units that FSDP1 trains, frozen ones too.

    In a forward, all parameters of a unit are views of its flat parameter, which needs a gradient if one of them does
    (``FlatParamHandle._use_unsharded_views``). So activations are saved for the gradients of frozen ones as well.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    units = ([parameters[name] for name in unit.parameters] for unit in plan.units if plan.backend == "fsdp1")
    return {id(p) for own in units if any(p.requires_grad for p in own) for p in own if p.is_floating_point()}


def _set_stored_dtypes(plan: FsdpPlan, model: nn.Module, undo: ExitStack) -> None:
    """Give units that FSDP1 splits off because of their dtype the dtype of the computation in their forward only.

    PEFT casts the input of each adapter to the dtype of its weight, which is that of the shards; FSDP1 casts it back.
    So every adapter saves a copy of its input for the backward, also if adapters have the same input.

    Args:
        model: the model, whose parameters have the dtype of the computation.
    """
    dtype = torch_dtype(plan.precision.param)
    if plan.backend != "fsdp1" or dtype is None:
        return
    for unit in plan.units:
        own = {id(model.get_parameter(name)) for name in unit.parameters}
        for name in unit.modules if unit.is_split_off else ():
            _store_outside(plan, model.get_submodule(name), own, dtype, undo)


def _store_outside(plan: FsdpPlan, unit: nn.Module, own: set[int], dtype: torch.dtype, undo: ExitStack) -> None:
    slots = [slot for slot in registrations(unit.modules()) if id(slot[2]) in own]
    dtype_of = plan.precision.stored_dtype
    stored = [nn.Parameter(p.detach().to(dtype_of(p)), requires_grad=p.requires_grad) for _, _, p in slots]

    def register(*, inside: bool) -> None:
        for (registered, key, parameter), shard in zip(slots, stored, strict=True):
            registered[key] = parameter if inside else shard

    def before(module: nn.Module, args: tuple[Any, ...]) -> Any:
        register(inside=True)
        return cast_floats(args, dtype)

    def after(module: nn.Module, args: Any, output: Any) -> None:
        register(inside=False)

    undo.callback(register, inside=True)
    undo.callback(unit.register_forward_pre_hook(before).remove)
    undo.callback(unit.register_forward_hook(after).remove)
    register(inside=False)
