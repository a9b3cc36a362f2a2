"""Replacements of methods of the Trainer, and subclasses that use them.

To support the Trainer of another library:

- A subclass of ``transformers.Trainer`` needs :class:`FsdpTrainerMixin`, or ``install``.
- Any other Trainer that trains with an ``accelerate.Accelerator`` needs ``install`` only: models are prepared, clipped,
  saved and loaded by the replacements of Accelerate's methods.
- If its own methods have to change, add ``integrations/<library>/trainer.py`` with one function for each method, like
  the functions below, and one row for each in :mod:`hf_fsdp_plugin.integrations.hooks`. Private attributes are used in
  ``integrations/<library>/private.py`` only.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.utils import find_labels

from hf_fsdp_plugin.backends.ranks.agreement import TRAINING_LIMIT, preparation_limit, wait_for_all_ranks
from hf_fsdp_plugin.backends.sharding.script_access import ParameterCounts
from hf_fsdp_plugin.backends.sharding.shard import create_with_original_shapes, plan_of
from hf_fsdp_plugin.checkpoint.names import TRAINER_PREFIX
from hf_fsdp_plugin.integrations import patching, resuming
from hf_fsdp_plugin.integrations.accelerate import run_report
from hf_fsdp_plugin.integrations.accelerate.accelerator import is_left_to_transformers
from hf_fsdp_plugin.integrations.accelerate.plugin import if_planned, if_sharded, planned_plugin
from hf_fsdp_plugin.integrations.accelerate.private import prepared_models
from hf_fsdp_plugin.integrations.run_metrics import run_metrics
from hf_fsdp_plugin.integrations.saving import manager
from hf_fsdp_plugin.integrations.session import attributes_in_block, current_run, session
from hf_fsdp_plugin.integrations.transformers import private
from hf_fsdp_plugin.integrations.transformers.arguments import fsdp_arguments, read_spec
from hf_fsdp_plugin.integrations.transformers.checkpoint_hooks import (
    checkpoint_to_resume,
    load_other_model,
    save_checkpoint,
)
from hf_fsdp_plugin.integrations.transformers.requested_saves import AgreedCheckpoint
from hf_fsdp_plugin.messages import print_once, print_warnings
from hf_fsdp_plugin.plan.fsdp_plan import torch_dtype
from hf_fsdp_plugin.plan.names import unwrapped
from hf_fsdp_plugin.plan.units import distributed_config_of
from hf_fsdp_plugin.problems import Problem, SpecError
from hf_fsdp_plugin.spec.fsdp_spec import FsdpSpec
from hf_fsdp_plugin.spec.load import with_script_settings
from hf_fsdp_plugin.state import find_part, parts_of
from hf_fsdp_plugin.torch_private.fsdp1 import flat_shapes


def create_accelerator(original: Callable[[], None], trainer: Any) -> None:
    """Create the Accelerator with the spec of the Trainer's arguments.

    The Trainer refuses ``save_only_model`` together with a sharded state dict or ``load_best_model_at_end``, because it
    would not save the model. The checkpoints of this package contain the model for every state dict type.
    """
    if not session().is_active() and not trainer.args.fsdp:
        original()
        return
    patching.changes().install("accelerate")
    spec = _spec_of_trainer(trainer)
    only_model = trainer.args.save_only_model and spec is None
    in_session = attributes_in_block(session(), trainer_spec=spec)
    plugin = {"fsdp_plugin_args": None} if spec is not None else {}  # set in arguments that are older than `install`
    with attributes_in_block(trainer.args, save_only_model=only_model, **plugin), in_session:
        original()
    if spec is not None:
        parts_of(trainer.accelerator).put(run_report.OutputFolder(trainer.args.output_dir))


def _spec_of_trainer(trainer: Any) -> FsdpSpec | None:
    """Return the spec of the Trainer's arguments and of the ``DistributedConfig`` of its model; ``None`` without FSDP.

    The stock Trainer trains a model that ``from_pretrained`` has sharded, but cannot resume its training.
    """
    spec, config = _spec_of_arguments(trainer.args), distributed_config_of(trainer.model)
    if config is None or (spec is None and is_left_to_transformers(config)):
        return spec
    mesh = trainer.args.parallelism_config
    spec = spec or session().load(training_arguments=fsdp_arguments(trainer.args), parallelism_config=mesh)
    spec = with_script_settings(spec, distributed_config=config)
    print_warnings(spec.problems)
    private.hide_loading(trainer.model)
    return spec


def _spec_of_arguments(arguments: Any) -> FsdpSpec | None:
    """Return the spec of a ``TrainingArguments``, which is read here if it is a copy, or older than ``install``."""
    if session().spec_of_arguments(arguments) is None and arguments.fsdp:
        read_spec(arguments)
    return session().spec_of_arguments(arguments)


def validate_args(original: Callable[[], None], trainer: Any) -> None:
    """Accept ``optimizers``: their parameters are replaced by the shards when the model is prepared.

    Under FSDP1, the Trainer prepares its model before the optimizer.
    """
    plugin = planned_plugin(trainer.accelerator)
    is_supported = plugin is not None or distributed_config_of(trainer.model) is not None
    if not is_supported or trainer.model_init is not None or trainer.optimizer_cls_and_kwargs is not None:
        original()
        return
    if plugin is not None and trainer.optimizer is not None:
        plugin.later_optimizers.add(trainer.optimizer)
    with attributes_in_block(trainer, optimizer=None, lr_scheduler=None):
        original()


def set_signature_columns(original: Callable[[], None], trainer: Any) -> None:
    """Read the columns from the signature of the unwrapped model: FSDP1's wrapper accepts any argument."""
    inner = unwrapped(trainer.model)
    if inner is not trainer.model and not trainer.label_names:
        trainer.label_names = find_labels(type(inner))
    with attributes_in_block(trainer, model=inner):
        original()


def get_model_param_count(original: Callable[..., int], model: Any, trainable_only: bool = False) -> int:
    """Return the number of whole parameters. Transformers counts this rank's pieces of FSDP1."""
    if (counts := find_part(model, ParameterCounts)) is None:
        return original(model, trainable_only=trainable_only)
    return counts.trainable if trainable_only else counts.total


def get_num_trainable_parameters(original: Callable[[], int], trainer: Any) -> int:
    """Return the number of whole trainable parameters. The Trainer counts this rank's pieces of FSDP1."""
    counts = find_part(trainer.model, ParameterCounts)
    return original() if counts is None else counts.trainable


class StartChecks(TrainerCallback):
    """Checks the prepared model and the arguments of a Trainer when the training begins."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        run_metrics().start(args.output_dir, step=state.global_step, max_steps=state.max_steps)
        watch_loss(self._trainer, model)
        self._check_weight_decay(args, model)

    def _check_weight_decay(self, args: Any, model: Any) -> None:
        """Warn if biases and norms are in flat parameters with weights, which have one weight decay."""
        plan = plan_of(model)
        if plan is None or plan.backend != "fsdp1" or plan.use_orig or not args.weight_decay:
            return
        num_dims = [set(map(len, shapes)) for shapes in flat_shapes(model)]
        if any(min(found) < 2 <= max(found) for found in num_dims):
            message = f"weight_decay={args.weight_decay:g} applies to biases and norms too: without use_orig_params "
            message += "the parameters of a unit are one flat parameter. Otherwise the Trainer excludes them."
            fix = "Set fsdp_use_orig_params: true, or use FSDP2."
            print_once(Problem(code="FSDP-W692", setting="params.use_orig", message=message, fix=fix))


@if_planned
def run_epoch(original: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> Any:
    """Train nothing in a run that was resumed after its last step. The Trainer would train a step more each time."""
    if 0 < trainer.state.max_steps <= trainer.state.global_step:
        trainer.control.should_training_stop = True
        message = f"the checkpoint is of step {trainer.state.global_step}: the {trainer.state.max_steps} steps of this "
        message += "run are done, so nothing is trained."
        fix = "To train on, raise max_steps or num_train_epochs."
        print_once(Problem(code="FSDP-N410", message=message, fix=fix))
        return None
    return original(*args, **kwargs)


@if_planned
def update_auto_batch_size(original: Callable[..., None], trainer: Any, *args: Any, **kwargs: Any) -> None:
    """Keep the sharded model for a retry with smaller batches. The Trainer would train FSDP1's pieces as the model."""
    with attributes_in_block(trainer, is_fsdp_enabled=False):
        original(*args, **kwargs)


@if_planned
def evaluation_loop(original: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> Any:
    """Shard the model before an evaluation that precedes the training.

    Otherwise the Trainer raises an error under FSDP2, and later trains unsharded parameters under FSDP1.
    """
    private.show_loading(trainer.model)
    is_prepared = bool(prepared_models(trainer.accelerator))
    if not is_prepared and (dtype := _full_eval(trainer)) is not None:
        trainer.model.to(torch_dtype(dtype))  # the Trainer would convert shards
    wait_for_all_ranks(
        f"an evaluation or prediction of {type(trainer).__name__} after step {trainer.state.global_step}",
        fix="Call `evaluate` and `predict`, and set `control.should_evaluate`, on all ranks.",
        limit=TRAINING_LIMIT if is_prepared else preparation_limit(),
    )
    if not is_prepared:
        trainer.model = trainer.model_wrapped = trainer.accelerator.prepare(trainer.model)
    watch_loss(trainer, trainer.model)
    if trainer.gather_function == trainer.accelerator.gather:
        # Seq2SeqTrainer's choice keeps the samples that are repeated to give all ranks as many batches.
        trainer.gather_function = trainer.accelerator.gather_for_metrics
    with _without_full_eval(trainer):
        return original(*args, **kwargs)


@if_planned
def train(original: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> Any:
    """Resume from a complete checkpoint only, also after a restart of the run, and write the report at the end.

    A resume has these steps:

    1. the ranks agree on the attempt of the run (``resuming.attempt``);
    2. choose the checkpoint: the newest complete one after a restart, else what the script asks for
       (``checkpoints.checkpoint_to_resume``);
    3. the Trainer's own ``train`` prepares the model and calls ``_load_from_checkpoint``: the shards of the model are
       read by the replacement of ``load_fsdp_model``, or by ``checkpoints.load_other_model``;
    4. it calls ``_load_optimizer_and_scheduler``, in which the replacement of ``load_fsdp_optimizer`` reads the shards
       of the optimizer, and ``_load_rng_state``: both are replaced (``checkpoints``);
    5. it skips the batches of the steps that were trained, and trains.
    """
    if trainer.model is not None:  # the Trainer removes it after each trial of a hyperparameter search
        private.show_loading(trainer.model)
    current_run().num_trainings += 1
    resume = args[0] if args else kwargs.get("resume_from_checkpoint")
    resuming.attempt().agree(f"{type(trainer).__name__}.train")
    plugin = planned_plugin(trainer.accelerator)
    if plugin is not None and plugin.spec.checkpoint.storage:
        manager().use_storage(plugin.spec.checkpoint.storage)
    if resuming.is_started_again() or resume:
        found = checkpoint_to_resume(trainer, resume)
        args, kwargs = (found, *args[1:]), {k: v for k, v in kwargs.items() if k != "resume_from_checkpoint"}
    if (dtype := _full_eval(trainer)) is not None:
        message = f"{dtype}_full_eval converts the whole model to {dtype} after a training, but the weights are "
        message += "shards, which the training computes in another dtype."
        fix = f"Set {dtype}: true, with which evaluations are computed in {dtype} too, or remove {dtype}_full_eval."
        raise SpecError([Problem(code="FSDP-E645", message=message, fix=fix)])
    callbacks = (StartChecks(trainer), agreed := AgreedCheckpoint(trainer))
    for callback in callbacks:
        trainer.add_callback(callback)
    create = partial(create_optimizer, trainer, _own_create_optimizer(trainer))
    try:
        with (
            attributes_in_block(trainer, create_optimizer=create),
            private.loading_sharded_models(trainer, load_other_model),
            private.saving_own_checkpoints(trainer, save_checkpoint),
            _without_full_eval(trainer),
        ):
            result = original(*args, **kwargs)
    except SystemExit:
        if agreed.has_exited:
            _report_training(trainer)
        raise
    finally:
        agreed.close()
        for callback in callbacks:
            trainer.remove_callback(callback)
    manager().wait()
    _report_training(trainer)
    return result


def _report_training(trainer: Any) -> None:
    """Write the report of a training that has ended, with its last checkpoint."""
    folder = trainer.args.output_dir
    checkpoint = Path(folder) / f"{TRAINER_PREFIX}{trainer.state.global_step}"
    last = checkpoint if checkpoint.is_dir() else None
    run_report.report_run(trainer.accelerator, output_dir=folder, batch=private.trainer_batch(trainer), checkpoint=last)


def _full_eval(trainer: Any) -> Literal["bf16", "fp16"] | None:
    """Return the dtype of an evaluation of the whole model, unless FSDP computes in it anyway; ``None`` for none."""
    asked: Literal["bf16", "fp16"] | None = "fp16" if trainer.args.fp16_full_eval else None
    asked = "bf16" if trainer.args.bf16_full_eval else asked
    return None if asked == trainer.accelerator.state.fsdp_plugin.spec.precision.param else asked


def _without_full_eval(trainer: Any) -> AbstractContextManager[None]:
    """Keep the Trainer from converting shards, and from moving the whole model to the device, in the block."""
    return attributes_in_block(trainer.args, bf16_full_eval=False, fp16_full_eval=False)


def _own_create_optimizer(trainer: Any) -> Callable[..., Any]:
    """Return the method of a Trainer, which may be a copy of one that trains, with the replacement of that one."""
    method = vars(trainer).get("create_optimizer")
    if isinstance(method, partial) and method.func is create_optimizer:
        return partial(type(trainer).create_optimizer, trainer)
    return trainer.create_optimizer


def create_optimizer(trainer: Any, create: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Create the optimizer of a Trainer, which sees the original shapes of a model that FSDP1 has sharded before."""

    def created() -> Any:
        create(*args, **kwargs)
        return trainer.optimizer

    model = next(iter((*args, *kwargs.values())), None)
    create_with_original_shapes(trainer.model if model is None else model, created)
    return trainer.optimizer


class FsdpTrainerMixin:
    """Mixin for Trainers without ``install``: ``class MyTrainer(FsdpTrainerMixin, SFTTrainer)``.

    The settings are read by :class:`FsdpTrainingArguments`, or by any ``TrainingArguments`` after ``install``.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        patching.changes().install("accelerate", "transformers")
        if distributed_config_of(kwargs.get("model", args[0] if args else None)) is not None:
            session().ask_for_fsdp()  # the model may have been loaded before anything of this package
        super().__init__(*args, **kwargs)


class FsdpTrainer(FsdpTrainerMixin, Trainer):
    """``transformers.Trainer`` that applies every FSDP setting and reports what ran."""


class FsdpTrainingArguments(TrainingArguments):
    """``transformers.TrainingArguments`` that keeps every FSDP setting and refuses unsupported ones."""

    def __post_init__(self) -> None:
        patching.changes().install("accelerate", "transformers")
        super().__post_init__()


@if_sharded
def prediction_step(original: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> Any:
    """Generate with the module inside FSDP1's wrapper, so that the Trainer does not gather the whole model.

    It gathers unit by unit, as in a forward. The loss is computed by the wrapper, which is the first of ``args``.
    """
    if not isinstance(trainer.model, FullyShardedDataParallel):
        return original(*args, **kwargs)
    with attributes_in_block(trainer, model=trainer.model.module):
        return original(*args, **kwargs)


_NUM_ITEMS: Final = "num_items_in_batch"
_NEUTRAL: Final = frozenset({"__get__", "to", "detach", "dim", "size", "numel", "is_floating_point", "is_complex"})
"""Functions of a tensor that do not compute with its value. FSDP calls them for all inputs."""


class _Watched:
    """The model whose loss a Trainer watches, as a weak reference."""

    def __init__(self) -> None:
        self.model: Callable[[], nn.Module | None] = lambda: None


def watch_loss(trainer: Any, model: nn.Module) -> None:
    """Let a Trainer scale the loss of a model that ignores ``num_items_in_batch`` as a mean, from its first forward on.

    The Trainer passes the number of labels in a batch to every forward that has ``**kwargs``. It then multiplies the
    loss by the number of ranks, and does not divide it by the accumulated batches, because the model is supposed to
    have divided a sum by the labels of all of them. Many models return a mean instead: T5, BART, BERT, and most models
    for classification.

    The first forward with labels gets a tensor that records whether it is used. Compiled models are left unchanged.
    """
    dynamo = trainer.accelerator.state.dynamo_plugin
    compiles = trainer.args.torch_compile or (dynamo is not None and dynamo.backend.value.lower() != "no")
    watched = parts_of(trainer).get(_Watched)
    if compiles or not trainer.model_accepts_loss_kwargs or watched.model() is model:
        return
    watched.model = weakref.ref(model)
    uses: list[str] = []

    class Watched(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.__name__ in _NEUTRAL:
                return super().__torch_function__(func, types, args, kwargs or {})
            uses.append(func.__name__)
            # The result is a plain tensor: FSDP1 does not begin the backward of a loss of another class.
            return nn.Parameter.__torch_function__(func, types, args, kwargs or {})

    def before(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        if isinstance(number := kwargs.get(_NUM_ITEMS), torch.Tensor):
            return args, {**kwargs, _NUM_ITEMS: number.as_subclass(Watched)}
        return None

    def after(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        loss = output.get("loss") if isinstance(output, Mapping) else None
        if isinstance(kwargs.get(_NUM_ITEMS), Watched) and kwargs.get("labels") is not None and loss is not None:
            for handle in handles:
                handle.remove()
            if not uses:
                _scale_as_mean(trainer, module)

    inner = unwrapped(model)
    handles = [
        inner.register_forward_pre_hook(before, with_kwargs=True),
        inner.register_forward_hook(after, with_kwargs=True),
    ]


def _scale_as_mean(trainer: Any, model: Any) -> None:
    trainer.model_accepts_loss_kwargs = False  # the Trainer reads it after this forward
    ranks = trainer.accelerator.num_processes if trainer.args.average_tokens_across_devices else 1
    factor = ranks * trainer.args.gradient_accumulation_steps
    if factor > 1:
        name = type(model.get_base_model() if hasattr(model, "get_base_model") else model).__name__
        message = f"the forward of {name} accepts {_NUM_ITEMS} and ignores it. Transformers multiplies its loss and "
        message += f"gradients by the ranks and the accumulated batches, here by {factor}. This run does not."
        fix = "Divide losses of runs without this package by that number to compare them."
        print_once(Problem(code="FSDP-N644", message=message, fix=fix))
