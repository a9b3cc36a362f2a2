"""The table of hooks: every function of another library that this package replaces.

Each row contains the replaced function, its replacement, the reason, and when the row can be deleted.
:mod:`hf_fsdp_plugin.integrations.patching` installs and removes the rows; ``docs/hooks.md`` is generated from them. To
hook another function, write its replacement in the file or folder of the library in ``integrations/`` and add a row
here (those for TRL and sentence-transformers are beside those for the functions of Accelerate that they resemble). The
rows were checked with accelerate 1.15 and transformers 5.17 to 5.24.

A replacement is called as ``replacement(original, *args, **kwargs)``; the original of a method is bound, and ``self``
is the first of ``args``. A replacement that finds no FSDP settings of this package calls the original.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal

from hf_fsdp_plugin.contracts import Contract, Without


@dataclass(frozen=True, slots=True)
class Hook:
    """One function or method of another library that is replaced.

    Attributes:
        target: ``module:function`` or ``module:Class.method``.
        replacement: ``module:function``, relative to ``hf_fsdp_plugin.integrations``; imported at the first call.
        reason: why the original is not sufficient.
        until: the change in the other library, or in this package, after which the row can be deleted.
        always: whether it runs in every process, for example to find out whether FSDP is asked for. Others run only
            after FSDP was asked for, or while a model is sharded; before, the original runs as it is.
        direct: for functions that are called many times in a step: ``replacement(original)`` is called once, when the
            hook is installed, and returns what replaces the target.
        without: what happens if the library has no such function: the replacement is off with a warning, or the import
            of the library is refused, because settings would be lost or wrong files written.
        instead: names that other supported versions have in place of the target's last name. The first name that
            exists is replaced.
    """

    target: str
    replacement: str
    reason: str
    until: str = "The library no longer does this."
    always: bool = False
    direct: bool = False
    without: Without = "off"
    instead: tuple[str, ...] = ()

    @property
    def contract(self) -> Contract:
        use = f"the replacement {self.replacement}"
        return Contract(target=self.target, without=self.without, use=use, instead=self.instead)

    def name_in(self, owner: Any) -> str | None:
        """Return the name that a module or class has; ``None`` if it has none of them."""
        names = (self.name, *self.instead)
        return next((name for name in names if getattr(owner, name, None) is not None or name == "__new__"), None)

    @property
    def module(self) -> str:
        return self.target.partition(":")[0]

    @property
    def class_name(self) -> str:
        """Name of the class; empty for a module-level function."""
        return self.target.partition(":")[2].rpartition(".")[0]

    @property
    def name(self) -> str:
        return self.target.rpartition(":")[2].rpartition(".")[2]


def _rows(owner: str, replacement: str, reason: str, *names: str, **more: Any) -> tuple[Hook, ...]:
    """Return one row for each name.

    Args:
        owner: ``module`` or ``module:Class`` that has the names.
        replacement: a ``*`` in it stands for the name.
        names: a name, or ``"new|old"`` if other supported versions have another name in its place.
        more: fields that all rows have.
    """
    separator, split = "." if ":" in owner else ":", [name.split("|") for name in names]
    return tuple(
        Hook(f"{owner}{separator}{name}", replacement.replace("*", name), reason, instead=tuple(instead), **more)
        for name, *instead in split
    )


COLLECTIVES: Final = {
    "allreduce": ("all-reduce", 0),
    "broadcast": ("broadcast", 0),
    "reduce": ("reduce", 0),
    "allgather": ("all-gather (list)", 1),
    "reduce_scatter": ("reduce-scatter (list)", 0),
    "gather": ("gather", 1),
    "scatter": ("scatter", 0),
    "alltoall": ("all-to-all", 1),
    "barrier": ("barrier", None),
    "monitored_barrier": ("monitored barrier", None),
    "allreduce_coalesced": ("all-reduce (coalesced)", 0),
    # torch 2.11 and 2.12 have the other names, and call them.
    "all_gather_single|_allgather_base": ("all-gather", 1),
    "reduce_scatter_single|_reduce_scatter_base": ("reduce-scatter", 1),
    "all_to_all_single|alltoall_base": ("all-to-all", 1),
}
"""Method of a process group -> the operation in messages, and the position of this rank's tensors."""

Group = Literal["accelerate", "transformers", "loading", "preflight", "calls", "hangs", "profile"]

_ACCELERATOR = "accelerate.accelerator:Accelerator"
_MODEL = "transformers.modeling_utils:PreTrainedModel"
_ARGUMENTS = "transformers.training_args:TrainingArguments"
_TRAINER = "transformers.trainer:Trainer"
_GGUF = "transformers.modeling_gguf_pytorch_utils"
_BASE_MODEL = "sentence_transformers.base.model:BaseModel"
_GROUP = "torch.distributed.distributed_c10d:ProcessGroup"
_FUNCTIONAL = "torch.distributed._functional_collectives"
_FSDP1 = "torch.distributed.fsdp._runtime_utils"
_FSDP2 = "torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup"

_WITH_INSTALL = "`install()` is removed from this package."
_WITHOUT_OLD = "Commands for Transformers 4 are no longer in use."
_PREFLIGHT = "`hf-fsdp check --run` is removed from this package."
_RECORDED: dict[str, Any] = {
    "until": "torch's flight recorder covers every backend, names FSDP units, and is readable after a crash.",
    "direct": True,
}
_LOCAL = "The state dict type `local` is refused under FSDP2; FSDP1's full state dict fails on CPU ranks."
_DAMAGED = "Errors of damaged or missing files name neither file nor tensor, or occur after weights were read."
# fmt: off
_ACCELERATE_HOOKS = (
    Hook("accelerate.state:PartialState.__init__", "accelerate.accelerator:init_partial_state",
         "NCCL alone cannot clip or save offloaded parameters. On CPU ranks, Transformers ignores `ddp_timeout`."),
    Hook("accelerate.state:AcceleratorState.__init__", "accelerate.accelerator:init_accelerator_state",
         "CPU ranks ignore the FSDP plugin, and those of `torchrun` or a single one get no process group.",
         without="refused"),
    Hook("accelerate.utils.dataclasses:FullyShardedDataParallelPlugin.__init__", "accelerate.plugin:init_plugin",
         "The constructor refuses supported settings, and afterwards given values and defaults look the same.",
         _WITH_INSTALL, always=True, without="refused"),
    Hook(f"{_ACCELERATOR}.__init__", "accelerate.accelerator:init_accelerator",
         "An Accelerator gets the spec of `install()`, or a plugin that is made from a spec instead of a stock one.",
         _WITH_INSTALL, always=True, without="refused"),
    *_rows(_ACCELERATOR, "accelerate.prepare:*", "Units, mesh, strategy and prefetch follow the plan.",
           "prepare", "prepare_model", until="Accelerate shards a model by a plan.", without="refused"),
    Hook(f"{_ACCELERATOR}.get_state_dict", "accelerate.accelerator:get_state_dict",
         "FSDP1's full state dict fails on CPU ranks."),
    Hook(f"{_ACCELERATOR}.clip_grad_norm_", "accelerate.accelerator:clip_grad_norm_", without="refused",
         reason="For parameters that are not all those of one model, FSDP1's norm covers one rank's shards only."),
    Hook(f"{_ACCELERATOR}.maybe_context_parallel", "accelerate.accelerator:maybe_context_parallel",
         "torch's error for a sequence that the context axis does not divide names neither the length nor the axis."),
    Hook("transformers.masking_utils:find_packed_sequence_indices", "accelerate.accelerator:find_packed_sequences",
         "The two parts of a sequence that a rank of the context axis has are taken for packed sequences."),
    Hook(f"{_ACCELERATOR}.clip_grad_value_", "accelerate.accelerator:clip_grad_value_",
         "Accelerate refuses it under FSDP, although it clips each element alone."),
    # Modules that have imported it by name get the replacement, too.
    Hook("torch.nn.utils.clip_grad:clip_grad_norm_", "torch_functions:clip_grad_norm_", without="refused",
         reason="For parameters of FSDP1, each rank clips by the norm of its own shards."),
    Hook("torch.nn.utils:get_total_norm", "torch_functions:get_total_norm",
         "For gradients of FSDP1, the result is the norm of one rank's shards."),
    Hook(f"{_ACCELERATOR}.save_state", "accelerate.checkpoints:save_state", without="refused",
         reason="Accelerate writes in place and deletes older checkpoints before the new one is complete."),
    Hook(f"{_ACCELERATOR}.load_state", "accelerate.checkpoints:load_state", without="refused",
         reason="Accelerate loads an incomplete checkpoint."),
    # Accelerate's module imports the function by name.
    Hook("accelerate.accelerator:load_custom_state", "accelerate.checkpoints:load_custom_state",
         "The state of a registered object is unpickled without a limit: the file can execute any code."),
    Hook(f"{_ACCELERATOR}.save_model", "accelerate.checkpoints:save_model",
         "Accelerate gathers the whole model on one rank."),
    Hook(f"{_ACCELERATOR}.end_training", "accelerate.accelerator:end_training",
         "The report is written before the process group is destroyed.", "Accelerate has a callback at the end."),
    # The Trainer calls it for `generate` through the module.
    Hook("torch.distributed.fsdp:register_fsdp_forward_method", "torch_functions:register_forward_method",
         "Around `generate`, torch gathers the root before the other ranks have made the call: one rank alone waits."),
    # Stock would write its own files over those that the manifest names.
    *_rows("accelerate.utils.fsdp_utils", "accelerate.checkpoints:*", _LOCAL, "save_fsdp_model", without="refused"),
    *_rows("accelerate.utils.fsdp_utils", "accelerate.checkpoints:*", _LOCAL,
           "load_fsdp_model", "save_fsdp_optimizer", "load_fsdp_optimizer"),
    Hook("trl.models.utils:prepare_fsdp", "accelerate.prepare:prepare_fsdp",
         "A second model is sharded by the plugin's fields: without mesh and broadcast, under FSDP2 as one unit."),
    *_rows("peft.tuners.tuners_utils:BaseTuner", "peft:refuse_if_sharded",
           "PEFT merges one rank's shards, and replaces modules that FSDP manages.",
           "merge_adapter", "merge_and_unload", "unload", without="refused"),
    Hook("torch.nn.modules.module:Module.state_dict", "torch_functions:state_dict",
         "Under FSDP1, a module inside a wrapper returns flat shards and empty tensors. A call on one rank waits."),
    Hook("torch.nn.modules.module:Module.load_state_dict", "torch_functions:load_state_dict",
         "FSDP1's root module cannot load the state dict that it returns, and no module of FSDP2 loads whole tensors."),
    Hook("torch:save", "torch_functions:torch_save", without="refused",
         reason="torch writes one rank's shards without an error."),
    Hook("safetensors.torch:_find_shared_tensors", "torch_functions:find_shared_tensors", without="refused",
         reason="safetensors fails for a `DTensor` and writes flat shards. All of its functions that write call this."),
    Hook(f"{_ACCELERATOR}.save", "torch_functions:accelerator_save",
         "Only the main process writes, so the other ranks would neither gather shards nor refuse them."),
    Hook(f"{_MODEL}.save_pretrained", "transformers.model_files:save_pretrained", without="refused",
         reason="Transformers writes empty tensors or fails for a model that was sharded after loading."),
    Hook("peft.peft_model:PeftModel.save_pretrained", "transformers.model_files:save_pretrained",
         "PEFT writes empty tensors or fails for a model that is sharded.", without="refused"),
    Hook("transformers.utils.hub:PushToHubMixin.push_to_hub", "saving:call_on_rank_0",
         "Each rank saves to its own temporary folder and uploads it."),
    Hook(f"{_BASE_MODEL}.save", "saving:call_on_rank_0", without="refused",
         reason="Each rank writes the same files, and modules of the library write their shards."),
    Hook(f"{_BASE_MODEL}.push_to_hub", "saving:call_on_rank_0",
         "Each rank saves to its own temporary folder and uploads it."),
)

_TRANSFORMERS_HOOKS = (
    Hook(f"{_ARGUMENTS}.__new__", "transformers.arguments:new_arguments",
         "The own constructor of a subclass that is a dataclass refuses the arguments of Transformers 4.",
         _WITHOUT_OLD, always=True),
    Hook(f"{_ARGUMENTS}.__init__", "transformers.arguments:init_arguments",
         "Transformers 5 removed `fsdp_min_num_params` and `fsdp_transformer_layer_cls_to_wrap`.",
         _WITHOUT_OLD, always=True),
    *(
        Hook(f"{module}:HfArgumentParser.__init__", "transformers.arguments:init_parser",
             "Commands for Transformers 4 contain these two arguments. TRL has a copy of the parser.",
             _WITHOUT_OLD, always=True)
        for module in ("transformers.hf_argparser", "trl.scripts._hf_argparser")
    ),
    Hook(f"{_ARGUMENTS}.__post_init__", "transformers.arguments:validate_arguments",
         "Transformers refuses `bf16` on CPU ranks that a launcher selected.", always=True),
    Hook(f"{_ARGUMENTS}._process_fsdp_args", "transformers.arguments:process_fsdp_args",
         "Transformers drops some FSDP settings and refuses others.", _WITH_INSTALL, always=True, without="refused"),
    Hook("transformers.distributed.mixin:DistributedMixin.prepare_distribute_model",
         "transformers.arguments:prepare_distribute_model", always=True,
         reason="`device_map` and unknown keys of `distributed_config` are ignored, and CPU tensors get no backend."),
    Hook("transformers.distributed.mixin:DistributedMixin.maybe_distribute_model",
         "transformers.loading:distribute_checked_model",
         "Heads or experts that an axis does not divide are errors without a remedy, or of a later forward."),
    Hook(f"{_MODEL}.from_pretrained", "transformers.loading:from_pretrained_on_axes", without="refused",
         reason="A model is loaded whole, although the settings have a tensor or expert axis.",
         until="Transformers reads the axes from Accelerate's config."),
    Hook(f"{_TRAINER}.create_accelerator_and_postprocess", "transformers.trainer:create_accelerator",
         "The Accelerator gets the spec of the Trainer's arguments.", _WITH_INSTALL, without="refused"),
    Hook(f"{_TRAINER}._validate_args", "transformers.trainer:validate_args",
         "The Trainer refuses `optimizers` under FSDP. `prepare` replaces their parameters too."),
    Hook(f"{_TRAINER}._set_signature_columns_if_needed", "transformers.trainer:set_signature_columns",
         "The signature of FSDP1's wrapper accepts any argument, so the Trainer keeps no dataset column."),
    Hook(f"{_TRAINER}._run_epoch", "transformers.trainer:run_epoch",
         "A run that is resumed after its last step, as after a failure at its end, trains a step more each time."),
    Hook(f"{_TRAINER}.evaluation_loop", "transformers.trainer:evaluation_loop",
         "Evaluation before training raises under FSDP2; under FSDP1, unsharded parameters are trained after it."),
    Hook("transformers.trainer:update_fsdp_plugin_peft", "peft:update_fsdp_plugin_peft",
         "The function overrides the user's wrap policy for every PEFT model."),
    Hook(f"{_TRAINER}.train", "transformers.trainer:train",
         "Training resumes from complete checkpoints only, and ends with the report.", _WITH_INSTALL),
    Hook(f"{_TRAINER}.save_model", "transformers.checkpoints:save_model", without="refused",
         reason="The Trainer gathers the whole model on one rank, and writes a sharded model without its config."),
    Hook(f"{_TRAINER}._save_checkpoint", "transformers.checkpoints:save_checkpoint", without="refused",
         reason="The Trainer writes in place and deletes older checkpoints in place."),
    Hook(f"{_TRAINER}._finalize_training", "transformers.checkpoints:finalize_training",
         "The best checkpoint is loaded, and others deleted, while the last one may still be written.",
         "This package has no asynchronous saves."),
    Hook(f"{_TRAINER}._load_optimizer_and_scheduler", "transformers.checkpoints:load_optimizer_and_scheduler",
         "The saved schedule has a value for each group of the optimizer; the groups depend on the axes of the mesh."),
    Hook(f"{_TRAINER}._load_rng_state", "transformers.checkpoints:load_rng_state",
         "The file of the RNG state has another name for a single rank. Differences of a resumed run are reported."),
    Hook("transformers.trainer_seq2seq:Seq2SeqTrainer.prediction_step", "transformers.trainer:prediction_step",
         "The method gathers the whole FSDP1 model in fp32 on every rank for each batch."),
)

_LOADING_HOOKS = (
    Hook("transformers.modeling_utils:is_fsdp_enabled", "transformers.loading:is_fsdp_enabled",
         "With RAM-efficient loading, weights that a checkpoint lacks stay on the meta device on all ranks but one."),
    Hook(f"{_MODEL}._load_pretrained_model", "transformers.loading:load_pretrained_model",
         "Every rank converts weights into its own memory instead of that of one rank, and shows a progress bar."),
    Hook("transformers.core_model_loading:set_param_for_module", "transformers.loading:set_param_for_module",
         "The rank that computes the weights for its machine would have all of them in private memory first."),
    Hook(f"{_GGUF}:load_gguf_checkpoint", "transformers.loading:load_gguf_checkpoint",
         "Every rank dequantizes the whole file into its own memory."),
    Hook(f"{_GGUF}:get_gguf_hf_weights_map", "transformers.loading:get_gguf_hf_weights_map",
         "The rank that dequantizes for its machine would have all weights in private memory first."),
    Hook("transformers.utils.hub:get_checkpoint_shard_files", "transformers.model_files:get_shard_files", _DAMAGED),
    Hook("transformers.modeling_utils:_get_resolved_checkpoint_files", "transformers.model_files:resolve_files",
         f"{_DAMAGED} Checkpoints with shards are not read."),
)

_PREFLIGHT_HOOKS = tuple(
    Hook(target, f"preflight.{replacement}", f"A preflight {does}.", _PREFLIGHT, always=True)
    for target, replacement, does in (
        (f"{_ARGUMENTS}._validate_args", "replacements:validate_args",
         "writes to temporary folders, has small batches, and leaves out what needs a GPU"),
        (f"{_MODEL}.from_pretrained", "replacements:from_pretrained", "loads the tiny clone of the model"),
        (f"{_MODEL}._from_config", "replacements:from_config", "builds the tiny clone of the model"),
        ("datasets.load:load_dataset", "replacements:load_dataset", "reads a few samples"),
        (f"{_TRAINER}._inner_training_loop", "training:inner_training_loop", "runs three steps, resumes, and exports"),
    )
)

_CALL_HOOKS = (
    *_rows("torch.distributed.distributed_c10d:Work", "call_hooks:record_wait",
           "The time since which a rank waits is recorded, and marked in a profile.", "wait", **_RECORDED),
    *_rows(_FSDP1, "call_hooks:gather_of_unit",
           "FSDP1 names the unit that it gathers neither for a record nor in a trace.", "_unshard", **_RECORDED),
    *_rows(_FSDP1, "call_hooks:reduction_of_unit",
           "FSDP1 names the unit that it reduces neither for a record nor in a trace.",
           "_post_backward_hook", **_RECORDED),
)
_HANG_HOOKS = (
    *_rows(_GROUP, "call_hooks:record_collective", "The order of the collectives of each rank is recorded.",
           *COLLECTIVES, **_RECORDED),
    *_rows(_GROUP, "call_hooks:record_message", "A rank that waits for a message names its peer.",
           "send", "recv", **_RECORDED),
    *_rows(_FUNCTIONAL, "call_hooks:record_functional",
           "Collectives of `DTensor` call no method of a process group in Python. All of them call this function.",
           "_resolve_group|_resolve_group_name", **_RECORDED),
    *_rows(_FUNCTIONAL, "call_hooks:wait_tensor", "The time since which a rank waits in a collective is recorded.",
           "wait_tensor", **_RECORDED),
    *_rows(_FSDP2, "call_hooks:unit_method", "The record of a collective names the FSDP unit that needs it.",
           "unshard", "post_backward", **_RECORDED),
)

_PROFILE_HOOKS = (
    Hook("torch.autograd:backward", "profiling.run:mark_backward",
         "The trace does not contain where a backward pass begins and ends.",
         "`hf-fsdp profile` is removed from this package.", always=True),
)
# fmt: on

HOOKS: Final[dict[Group, tuple[Hook, ...]]] = {
    "accelerate": _ACCELERATE_HOOKS,
    "transformers": _TRANSFORMERS_HOOKS,
    "loading": _LOADING_HOOKS,
    "preflight": _PREFLIGHT_HOOKS,
    "calls": _CALL_HOOKS,
    "hangs": _HANG_HOOKS,
    "profile": _PROFILE_HOOKS,
}
