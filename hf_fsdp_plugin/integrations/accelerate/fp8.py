"""fp8 with Accelerate's recipe handlers: linear layers of torchao or of Transformer Engine in sharded models.

Accelerate converts a model in ``prepare``, which this package replaces for models with a plan. The handlers and the
functions that convert are Accelerate's own. The weights stay what they were: the shards that an optimizer updates and
that checkpoints contain are in fp32. Only after a model is sharded, its shards get the class of torchao that casts them
to fp8 in the all-gather of FSDP2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from accelerate import utils
from torch import nn
from torch.optim import Optimizer

from hf_fsdp_plugin.devices import accelerator_type
from hf_fsdp_plugin.messages import print_once
from hf_fsdp_plugin.plan.fsdp_plan import FsdpPlan
from hf_fsdp_plugin.plan.parameters import reads_base_layer
from hf_fsdp_plugin.problems import Origin, Problem, SpecError
from hf_fsdp_plugin.spec.fsdp_spec import FsdpSpec
from hf_fsdp_plugin.spec.load import with_script_settings
from hf_fsdp_plugin.spec.rules import fp8_backend
from hf_fsdp_plugin.state import find_part, parts_of
from hf_fsdp_plugin.text import format_names, plural
from hf_fsdp_plugin.torch_private.fsdp2 import convert_shards, local_changes
from hf_fsdp_plugin.torch_private.modules import casts_itself, parameters


def with_handlers(spec: FsdpSpec, handlers: Iterable[Any], source: str) -> FsdpSpec:
    """Return ``spec`` with the settings of a script's recipe handlers, which turn fp8 on, as in Accelerate.

    Raises:
        SpecError: they conflict with other settings.
    """
    for handler in handlers:
        values: dict[str, Any] = {}
        if isinstance(handler, utils.AORecipeKwargs):
            config: Any = handler.config
            values = {
                "fp8.backend": "ao",
                "fp8.all_gather": config.enable_fsdp_float8_all_gather,
                "fp8.pad_inner_dim": config.pad_inner_dim,
            }
        elif type(handler) is utils.TERecipeKwargs:
            values = {"fp8.backend": "te"}
        if values:
            origin = Origin(source=source, spelling="kwargs_handlers", text=type(handler).__name__)
            spec = with_script_settings(spec, values={"launch.mixed_precision": "fp8", **values}, origin=origin)
    return spec


def handlers_of(spec: FsdpSpec, given: Iterable[Any]) -> list[Any]:
    """Return the handlers of a script, with the recipe of the spec if the script gives none.

    Raises:
        SpecError: the GPU does not compute in fp8.
    """
    handlers, kinds = [*given], {"ao": utils.AORecipeKwargs, "te": utils.TERecipeKwargs}
    if not spec.uses_fp8:
        return handlers
    if accelerator_type() == "cuda" and not spec.launch.use_cpu and not utils.check_cuda_fp8_capability():
        major, minor = torch.cuda.get_device_capability()
        message = f"fp8 needs a GPU of compute capability 8.9 or higher, and this one has {major}.{minor}."
        fix = "Set mixed_precision: bf16."
        raise SpecError([spec.problem("FSDP-E168", "launch.mixed_precision", message, fix)])
    if not any(isinstance(handler, tuple(kinds.values())) for handler in handlers):
        options: dict[str, Any] = _te_options(spec.fp8.te_options)
        backend = fp8_backend(spec)
        if backend == "ao":
            options = {"pad_inner_dim": spec.fp8.pad_inner_dim, "enable_fsdp_float8_all_gather": spec.fp8.all_gather}
        handlers.append(kinds[backend](**options))
    return handlers


def _te_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of ``TERecipeKwargs``: variables set the three parts of the precision one by one."""
    options = dict(given)
    parts = [options.pop(f"override_{name}", False) for name in ("fprop", "dgrad", "wgrad")]
    if any(parts):
        options.setdefault("override_linear_precision", tuple(parts))
    return options


def convert_model(accelerator: Any, plan: FsdpPlan, model: nn.Module, optimizers: Iterable[Optimizer]) -> None:
    """Convert the linear layers of a model that is not sharded yet, in place, if fp8 is on.

    CPU ranks emulate fp8: torchao rounds the operands to fp8 and multiplies them in the dtype of the computation.

    Raises:
        SpecError: the model is sharded already.
    """
    if not plan.spec.uses_fp8:
        return
    if plan.pre_sharded:
        message = f"{plan.model_class} was sharded before prepare(), and fp8 converts whole layers."
        fix = "Load it without a distributed_config, and do not shard it before prepare()."
        raise SpecError([plan.spec.problem("FSDP-E167", "launch.mixed_precision", message, fix)])
    if (handler := accelerator.ao_recipe_handler) is not None:
        if accelerator.state.dynamo_plugin.backend.value.lower() == "no":
            message = "torchao's fp8 without torch.compile casts in separate kernels: a step takes longer than in bf16."
            print_once(Problem(code="FSDP-W641", message=message, fix="Set dynamo_config: {dynamo_backend: INDUCTOR}."))
        if plan.device_type == "cpu":
            handler.config = replace(handler.config, emulate=True)
        utils.convert_model_to_fp8_ao(model, config=handler.config, module_filter_func=handler.module_filter_func)
        _check_weights(plan, model)
        return
    before = dict(model.named_parameters())
    with torch.no_grad():
        utils.convert_model(model)
    after = {before[name]: parameter for name, parameter in model.named_parameters()}
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        group["params"] = [after.get(parameter, parameter) for parameter in group["params"]]


def apply_autocast(accelerator: Any, plan: FsdpPlan, model: nn.Module) -> None:
    """Run the forward of a sharded model in the fp8 autocast of Transformer Engine, if the plan selects it."""
    if plan.spec.uses_fp8 and accelerator.te_recipe_handler is not None:
        utils.apply_fp8_autowrap(model, accelerator.te_recipe_handler)


def _check_weights(plan: FsdpPlan, model: nn.Module) -> None:
    """Check that torchao can cast the shards, without the padding of FSDP2, and that only layers use the result."""
    size, weights = plan.mesh.num_shards, casting_weights(model)
    rows = {f"{name}.weight": weight.shape[0] for name, weight in weights.items()}
    wrong = [name for name, number in rows.items() if number % size and name not in plan.ignored_parameters]
    wrapped = {name: name.rpartition(".")[0] for name in weights if name.endswith(".base_layer")}
    read = [name for name, layer in wrapped.items() if reads_base_layer(model.get_submodule(layer))]
    problems, gather_whole = [], "Set enable_fsdp_float8_all_gather: false in fp8_config"
    if wrong:
        message = f"{size} shards do not divide the rows of {plural(len(wrong), 'weight')}: {format_names(wrong, 3)}."
        fix = f"{gather_whole}, or another shard size."
        problems.append(plan.spec.problem("FSDP-E169", "fp8.all_gather", message, fix))
    if read:
        message = f"adapters compute with the weights of {plural(len(read), 'layer')}, which are gathered in fp8: "
        message += f"{format_names(read, 3)}."
        problems.append(plan.spec.problem("FSDP-E635", "fp8.all_gather", message, f"{gather_whole}, or use LoRA."))
    if problems:
        raise SpecError(problems)


@dataclass(frozen=True, slots=True)
class _Scales:
    """Computes the scales again of a model whose weights are gathered in fp8."""

    refresh: Callable[..., None]


def casting_weights(model: nn.Module) -> dict[str, Any]:
    """Return name of a module -> its weight, for weights that convert themselves in the all-gather."""
    # Layers of PEFT return the weight of the layer inside them.
    own = ((name, parameters(module).get("weight")) for name, module in model.named_modules())
    return {name: weight for name, weight in own if casts_itself(weight)}


def plain_weights(model: nn.Module) -> Callable[[nn.Module], None]:
    """Register the plain weights instead of those that convert themselves, so that they are loaded and sharded.

    Returns:
        A function that makes the shards of the model convert themselves.
    """
    kinds: dict[int, Callable[[torch.Tensor], torch.Tensor]] = {}
    for name, weight in casting_weights(model).items():
        module = model.get_submodule(name)
        (inner, *_), context = weight.__tensor_flatten__()
        kinds[id(module)] = _wrapping(type(weight.data), inner, context)
        module.weight = getattr(weight, inner)  # the parameter that the module had before the conversion

    def convert(sharded: nn.Module) -> None:
        if kinds:
            convert_shards(sharded, lambda module, name: kinds.get(id(module)) if name == "weight" else None)
            _keep_scales(sharded, [module for module in sharded.modules() if id(module) in kinds])

    return convert


def _wrapping(kind: Any, inner: str, context: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda shard: kind.__tensor_unflatten__({inner: shard}, context, shard.shape, shard.stride())


def _keep_scales(model: nn.Module, modules: Sequence[Any]) -> None:
    """Compute the scales of all weights in one reduction before a forward, if weights have changed since.

    Otherwise each all-gather reduces the largest element of each weight. After a checkpoint is loaded, the scales of
    the weights before would be wrong.
    """
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    seen: list[int] = []

    def refresh(*_: Any) -> None:
        precompute_float8_dynamic_scale_for_fsdp(model)
        seen[:] = local_changes(module.weight for module in modules)

    def refresh_if_changed(*_: Any) -> None:
        if seen != local_changes(module.weight for module in modules):
            refresh()

    model.register_forward_pre_hook(refresh_if_changed, prepend=True)  # before FSDP2's own hook
    parts_of(model).put(_Scales(refresh))


def refresh_scales_after_steps(optimizer: Optimizer, model: nn.Module) -> None:
    """Compute the scales of the updated weights after each step of an optimizer, as Accelerate does.

    torch does not count the changes by fused optimizers.
    """
    if (scales := find_part(model, _Scales)) is not None:
        optimizer.register_step_post_hook(scales.refresh)
