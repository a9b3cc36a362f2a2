"""The table of hooks: every function of another library that this package replaces.

Each row contains the replaced function, its replacement, the reason, and when the row can be deleted.
:mod:`hf_fsdp_plugin.integrations.patching` installs and removes the rows; ``docs/hooks.md`` is generated from them. To
hook another function, write its replacement in ``integrations/<library>/`` and add a row here. The rows were checked
with accelerate 1.15 and transformers 5.17 to 5.24.

A replacement is called as ``replacement(original, *args, **kwargs)``; the original of a method is bound, and ``self``
is the first of ``args``. A replacement that finds no FSDP settings of this package calls the original.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
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
    until: str
    always: bool = False
    direct: bool = False
    without: Without = "off"
    instead: tuple[str, ...] = ()

    @property
    def contract(self) -> Contract:
        use = f"the replacement {self.replacement}"
        return Contract(target=self.target, without=self.without, use=use, instead=self.instead)

    def of(self, owner: Any) -> Hook | None:
        """Return the row with the name that its module or class has; ``None`` if it has none of them."""
        names = (self.name, *self.instead)
        found = next((name for name in names if getattr(owner, name, None) is not None or name == "__new__"), None)
        return None if found is None else replace(self, target=self.target.removesuffix(self.name) + found, instead=())

    @property
    def module(self) -> str:
        return self.target.partition(":")[0]

    @property
    def class_name(self) -> str:
        """Name of the class; empty for a module-level function."""
        return self.target.partition(":")[2].rpartition(".")[0]

    @property
    def name(self) -> str:
        return self.target.partition(":")[2].rpartition(".")[2]


Group = Literal["accelerate", "transformers", "loading", "preflight", "calls", "hangs", "profile"]
GROUPS: Final[dict[Group, str]] = {
    "accelerate": "Installed by `install()`, `accelerator()` and `FsdpTrainer`, with those of torch, PEFT, TRL and "
    "sentence-transformers. The functions that save and load run as they are for models that are not sharded.",
    "transformers": "Installed by `install()`. `FsdpTrainer`, `FsdpTrainerMixin` and `FsdpTrainingArguments` override "
    "the same methods in a subclass instead.",
    "loading": "Installed by `install()`, and when a spec enables FSDP.",
    "preflight": "Installed in the ranks of `hf-fsdp check --run` only.",
    "calls": "Installed together with the groups `hangs` and `profile`.",
    "hangs": "Installed in ranks, unless `--hang_timeout 0` or `HF_FSDP_HANG_TIMEOUT=0` is set. They call the "
    "original and record the call (see [hangs.md](hangs.md)).",
    "profile": "Installed in the ranks of `hf-fsdp profile`, and by `ProfilerCallback`.",
}

_ACCELERATOR = "accelerate.accelerator:Accelerator"
_MODEL = "transformers.modeling_utils:PreTrainedModel"
_ARGUMENTS = "transformers.training_args:TrainingArguments"
_TRAINER = "transformers.trainer:Trainer"
_WITH_INSTALL = "`install()` is removed from this package."
_WITHOUT_OLD = "Commands for Transformers 4 are no longer in use."
_STAGED = "Accelerate writes checkpoints to a staging folder and renames them."
_WHOLE_TENSORS = "The library refuses shards."
_DAMAGED = "Errors of damaged or missing files name neither file nor tensor, or occur after weights were read."
_NAMES_FILES = "Transformers checks the files of a model first, and its errors name file and tensor."
_PREFLIGHT = "`hf-fsdp check --run` is removed from this package."
_TRAINER_STAGED = "The Trainer writes checkpoints to a staging folder and renames them."
_COLLECTIVES = "torch.distributed.distributed_c10d:ProcessGroup"
_FUNCTIONAL = "torch.distributed._functional_collectives"
_FSDP1 = "torch.distributed.fsdp._runtime_utils"
_UNIT = "The record of a collective names the FSDP unit that needs it."
_WITH_RECORD = "torch's flight recorder covers every backend, names FSDP units, and is readable after a crash."
_OLD_NAMES = {
    "all_gather_single": ("_allgather_base",),
    "reduce_scatter_single": ("_reduce_scatter_base",),
    "all_to_all_single": ("alltoall_base",),
}
"""Method of a process group -> the method that torch 2.11 and 2.12 have instead, and call."""

# fmt: off
_ACCELERATE_HOOKS = (
    Hook("accelerate.state:PartialState.__init__", "accelerate.state:init_partial_state",
         reason="A process group with NCCL alone cannot clip or save offloaded parameters, which are on the CPU. On "
                "CPU ranks, Transformers ignores `ddp_timeout`.",
         until="Accelerate starts `cpu:gloo,cuda:nccl` for FSDP plugins, not only for its own environment variables, "
               "and Transformers passes the time-out."),
    Hook("accelerate.state:AcceleratorState.__init__", "accelerate.state:init_accelerator_state",
         reason="On CPU ranks Accelerate ignores the FSDP plugin and uses DDP. It starts no process group for CPU "
                "ranks of `torchrun` or for a single rank.",
         until="Accelerate accepts an FSDP plugin for `MULTI_CPU` and recognizes CPU ranks without an accelerator.",
         without="refused"),
    Hook("accelerate.utils.dataclasses:FullyShardedDataParallelPlugin.__init__", "accelerate.plugin:init_plugin",
         reason="The constructor refuses supported settings, and afterwards given values and defaults look the same.",
         always=True, until=_WITH_INSTALL, without="refused"),
    Hook(f"{_ACCELERATOR}.__init__", "accelerate.accelerator:init_accelerator",
         reason="An Accelerator without a plugin gets the spec of `install()`. A stock plugin is replaced by one that "
                "is made from a spec.",
         always=True, until=_WITH_INSTALL, without="refused"),
    *(
        Hook(f"{_ACCELERATOR}.{name}", f"accelerate.accelerator:{name}",
             reason="Units, mesh, strategy and prefetch follow the plan.",
             until="Accelerate shards a model by a plan.", without="refused")
        for name in ("prepare", "prepare_model")
    ),
    Hook(f"{_ACCELERATOR}.get_state_dict", "accelerate.accelerator:get_state_dict",
         reason="FSDP1's full state dict fails on CPU ranks.",
         until="torch supports it."),
    Hook(f"{_ACCELERATOR}.clip_grad_norm_", "accelerate.accelerator:clip_grad_norm_",
         reason="Accelerate chooses the algorithm by the version in the config and by whether the parameters are all "
                "the parameters of one model. For other parameters, FSDP1's norm covers the shards of one rank only.",
         until="Accelerate chooses by the parameters.",
         without="refused"),
    Hook(f"{_ACCELERATOR}.clip_grad_value_", "accelerate.accelerator:clip_grad_value_",
         reason="Accelerate refuses it under FSDP, although it clips each element alone.",
         until="Accelerate accepts it under FSDP."),
    # Modules that have imported it by name get the replacement, too.
    Hook("torch.nn.utils.clip_grad:clip_grad_norm_", "torch_functions:clip_grad_norm_",
         reason="For parameters of FSDP1, each rank clips by the norm of its own shards.",
         until="torch computes the norm of all shards of FSDP1, as it does for `DTensor`.",
         without="refused"),
    Hook("torch.nn.utils:get_total_norm", "torch_functions:get_total_norm",
         reason="For gradients of FSDP1, the result is the norm of one rank's shards.",
         until="torch computes the norm of all shards of FSDP1, as it does for `DTensor`."),
    Hook(f"{_ACCELERATOR}.save_state", "accelerate.checkpoints:save_state",
         reason="Accelerate writes in place and deletes older checkpoints before the new one is complete.",
         until=_STAGED, without="refused"),
    Hook(f"{_ACCELERATOR}.load_state", "accelerate.checkpoints:load_state",
         reason="Accelerate loads an incomplete checkpoint.",
         until=_STAGED, without="refused"),
    # Accelerate's module imports the function by name.
    Hook("accelerate.accelerator:load_custom_state", "accelerate.checkpoints:load_custom_state",
         reason="The state of a registered object is unpickled without a limit: the file can execute any code.",
         until="Accelerate loads it with `weights_only=True`."),
    Hook(f"{_ACCELERATOR}.save_model", "accelerate.checkpoints:save_model",
         reason="Accelerate gathers the whole model on one rank.",
         until=_STAGED),
    Hook(f"{_ACCELERATOR}.end_training", "accelerate.accelerator:end_training",
         reason="The report is written before the process group is destroyed.",
         until="Accelerate offers a callback at the end of training."),
    # The Trainer calls it for `generate` through the module.
    Hook("torch.distributed.fsdp:register_fsdp_forward_method", "torch_functions:register_forward_method",
         reason="Around `generate`, torch gathers the root before the other ranks have made the call. A call on one "
                "rank waits without end.",
         until="The Trainer leaves `generate` of a prepared model unchanged."),
    *(
        Hook(f"accelerate.utils.fsdp_utils:{name}", f"accelerate.checkpoints:{name}",
             reason="The state dict type `local` is refused under FSDP2; FSDP1's full state dict fails on CPU ranks.",
             until="torch and Accelerate support both.",
             # Stock would write its own files over those that the manifest names.
             without="refused" if name == "save_fsdp_model" else "off")
        for name in ("save_fsdp_model", "load_fsdp_model", "save_fsdp_optimizer", "load_fsdp_optimizer")
    ),
    Hook("trl.models.utils:prepare_fsdp", "accelerate.prepare:prepare_fsdp",
         reason="The function shards a second model with the plugin's fields: under FSDP2 as one unit, and under both "
                "versions without mesh, ignored modules and broadcast.",
         until="TRL prepares such models with the Accelerator."),
)

_PEFT_HOOKS = tuple(
    Hook(f"peft.tuners.tuners_utils:BaseTuner.{name}", "peft:refuse_if_sharded",
         reason="PEFT merges one rank's shards, and replaces modules that FSDP manages.",
         until="PEFT merges adapters into sharded models.",
         without="refused")
    for name in ("merge_adapter", "merge_and_unload", "unload")
)

_SAVING_HOOKS = (
    Hook("torch.nn.modules.module:Module.state_dict", "torch_functions:state_dict",
         reason="Under FSDP1, a module inside a wrapper returns flat shards and empty tensors for the parameters of "
                "outer units. A call on one rank waits without end.",
         until="torch returns a complete state dict or raises an error."),
    Hook("torch.nn.modules.module:Module.load_state_dict", "torch_functions:load_state_dict",
         reason="Under FSDP1, the module in the root's wrapper cannot load the complete state dict that it returns; "
                "under FSDP2, no module can load whole tensors.",
         until="torch loads whole tensors into shards."),
    Hook("torch:save", "torch_functions:torch_save",
         reason="torch writes one rank's shards without an error.",
         until=_WHOLE_TENSORS, without="refused"),
    Hook("safetensors.torch:_find_shared_tensors", "torch_functions:find_shared_tensors",
         reason="safetensors fails with an error about data pointers for a `DTensor`, and writes flat shards of FSDP1. "
                "All of its functions that write call this one, also where they were imported by name.",
         until=_WHOLE_TENSORS, without="refused"),
    Hook(f"{_ACCELERATOR}.save", "torch_functions:accelerator_save",
         reason="Only the main process writes, so the other ranks would neither gather shards nor refuse them.",
         until=_WHOLE_TENSORS),
    Hook(f"{_MODEL}.save_pretrained", "transformers.save_pretrained:save_pretrained",
         reason="Transformers writes empty tensors or fails for a model that was sharded after loading.",
         until="`save_pretrained` writes such models completely, or raises an error if a rank does not call it.",
         without="refused"),
    Hook("peft.peft_model:PeftModel.save_pretrained", "transformers.save_pretrained:save_peft_model",
         reason="PEFT writes empty tensors or fails for a model that is sharded.",
         until="`save_pretrained` writes such models completely, or raises an error if a rank does not call it.",
         without="refused"),
    Hook("transformers.utils.hub:PushToHubMixin.push_to_hub", "saving:push_to_hub",
         reason="Each rank saves to its own temporary folder and uploads it.",
         until="`push_to_hub` gathers such models and uploads them once."),
    Hook("sentence_transformers.base.model:BaseModel.save", "saving:save_on_rank_0",
         reason="Each rank writes the same files, and modules of the library write their shards.",
         until="`save` gathers such models and writes them once.",
         without="refused"),
    Hook("sentence_transformers.base.model:BaseModel.push_to_hub", "saving:push_to_hub",
         reason="Each rank saves to its own temporary folder and uploads it.",
         until="`push_to_hub` gathers such models and uploads them once."),
)

_TRANSFORMERS_HOOKS = (
    Hook(f"{_ARGUMENTS}.__new__", "transformers.old_arguments:new_arguments",
         reason="A subclass that is a dataclass has a constructor of its own, which refuses the arguments of "
                "Transformers 4.",
         always=True, until=_WITHOUT_OLD),
    Hook(f"{_ARGUMENTS}.__init__", "transformers.old_arguments:init_arguments",
         reason="Transformers 5 removed `fsdp_min_num_params` and `fsdp_transformer_layer_cls_to_wrap`, which scripts "
                "for Transformers 4 pass.",
         always=True, until=_WITHOUT_OLD),
    *(
        Hook(f"{module}:HfArgumentParser.__init__", "transformers.old_arguments:init_parser",
             reason="Commands for Transformers 4 contain these two arguments. TRL has a copy of the parser.",
             always=True, until=_WITHOUT_OLD)
        for module in ("transformers.hf_argparser", "trl.scripts._hf_argparser")
    ),
    Hook(f"{_ARGUMENTS}.__post_init__", "transformers.arguments:validate_arguments",
         reason="Transformers refuses `bf16` on CPU ranks that a launcher selected.",
         always=True,
         until="Transformers reads `ACCELERATE_USE_CPU` in this method."),
    Hook(f"{_ARGUMENTS}._process_fsdp_args", "transformers.arguments:process_fsdp_args",
         reason="Transformers drops some FSDP settings and refuses others.",
         always=True, until=_WITH_INSTALL, without="refused"),
    Hook("transformers.distributed.mixin:DistributedMixin.prepare_distribute_model",
         "transformers.arguments:prepare_distribute_model",
         reason="Transformers ignores a `device_map` and unknown keys of a `distributed_config`, and starts a process "
                "group for one device type only.",
         always=True,
         until="Transformers refuses both, and starts `cpu:gloo,cuda:nccl`."),
    Hook(f"{_TRAINER}.create_accelerator_and_postprocess", "transformers.trainer:create_accelerator",
         reason="The Accelerator gets the spec of the Trainer's arguments.",
         until=_WITH_INSTALL, without="refused"),
    Hook(f"{_TRAINER}._validate_args", "transformers.trainer:validate_args",
         reason="The Trainer refuses `optimizers` under FSDP, which replaces parameters. `prepare` replaces those of "
                "the optimizer too.",
         until="The Trainer prepares a given optimizer together with the model."),
    Hook(f"{_TRAINER}._set_signature_columns_if_needed", "transformers.trainer:set_signature_columns",
         reason="The signature of FSDP1's wrapper accepts any argument, so the Trainer keeps no dataset column.",
         until="The Trainer inspects the unwrapped model."),
    Hook(f"{_TRAINER}.evaluation_loop", "transformers.trainer:evaluation_loop",
         reason="Evaluation before training raises under FSDP2. Under FSDP1, the training that follows it uses "
                "unsharded parameters.",
         until="The Trainer prepares the model once, before the first evaluation."),
    Hook("transformers.trainer:update_fsdp_plugin_peft", "peft:update_fsdp_plugin_peft",
         reason="The function overrides the user's wrap policy for every PEFT model.",
         until="The function keeps a wrap policy that is set."),
    Hook(f"{_TRAINER}.train", "transformers.trainer:train",
         reason="Training resumes from complete checkpoints only, and ends with the report.",
         until=_TRAINER_STAGED),
    Hook(f"{_TRAINER}.save_model", "transformers.checkpoints:save_model",
         reason="The Trainer gathers the whole model on one rank, and writes a sharded model without its config.",
         until=_TRAINER_STAGED, without="refused"),
    Hook(f"{_TRAINER}._save_checkpoint", "transformers.checkpoints:save_checkpoint",
         reason="The Trainer writes in place and deletes older checkpoints in place.",
         until=_TRAINER_STAGED, without="refused"),
    Hook(f"{_TRAINER}._finalize_training", "transformers.checkpoints:finalize_training",
         reason="The method loads the best checkpoint and deletes others, while the last one may still be written in "
                "the background.",
         until="This package has no asynchronous saves."),
    Hook(f"{_TRAINER}._load_rng_state", "transformers.checkpoints:load_rng_state",
         reason="The file of the RNG state has one name for a single rank and another for several ranks. A change of "
                "the world size or of the batch is reported.",
         until="The Trainer reads both names."),
    Hook("transformers.trainer_seq2seq:Seq2SeqTrainer.prediction_step", "transformers.trainer:prediction_step",
         reason="The method gathers the whole FSDP1 model in fp32 on every rank for each batch.",
         until="The method calls `generate` of a sharded model."),
)

_LOADING_HOOKS = (
    Hook("transformers.modeling_utils:is_fsdp_enabled", "transformers.loading:is_fsdp_enabled",
         reason="With RAM-efficient loading, Transformers leaves weights that a checkpoint lacks on the meta device on "
                "all ranks but the first, so a script cannot use the model before it is prepared.",
         until="Transformers initializes them on every rank."),
    Hook(f"{_MODEL}._load_pretrained_model", "transformers.loading:load_pretrained_model",
         reason="Every rank casts and converts weights into its own memory, although the ranks of a machine can map "
                "the result of one rank. Every rank shows a progress bar.",
         until="Transformers shares the memory."),
    Hook("transformers.core_model_loading:set_param_for_module", "transformers.loading:set_param_for_module",
         reason="The rank that computes the weights for its machine would have all of them in private memory before it "
                "shares the first.",
         until="Transformers shares the memory."),
    Hook("transformers.modeling_gguf_pytorch_utils:load_gguf_checkpoint", "transformers.loading:load_gguf_checkpoint",
         reason="Every rank dequantizes the whole file into its own memory.",
         until="Transformers shares the memory."),
    Hook("transformers.modeling_gguf_pytorch_utils:get_gguf_hf_weights_map",
         "transformers.loading:get_gguf_hf_weights_map",
         reason="The rank that dequantizes for its machine would have all weights in private memory before it shares "
                "the first.",
         until="Transformers shares the memory."),
    Hook("transformers.utils.hub:get_checkpoint_shard_files", "transformers.model_files:get_shard_files",
         reason=_DAMAGED, until=_NAMES_FILES),
    Hook("transformers.modeling_utils:_get_resolved_checkpoint_files", "transformers.model_files:resolve_files",
         reason=f"{_DAMAGED} Checkpoints with shards are not read.", until=_NAMES_FILES),
)

_PREFLIGHT_HOOKS = (
    Hook(f"{_ARGUMENTS}._validate_args", "preflight.replacements:validate_args",
         reason="A preflight writes to temporary folders, has small batches, and leaves out what needs a GPU.",
         always=True, until=_PREFLIGHT),
    Hook(f"{_MODEL}.from_pretrained", "preflight.replacements:from_pretrained",
         reason="A preflight loads the tiny clone of the model.", always=True, until=_PREFLIGHT),
    Hook(f"{_MODEL}._from_config", "preflight.replacements:from_config",
         reason="A preflight builds the tiny clone of the model.", always=True, until=_PREFLIGHT),
    Hook("datasets.load:load_dataset", "preflight.replacements:load_dataset",
         reason="A preflight reads a few samples.", always=True, until=_PREFLIGHT),
    Hook(f"{_TRAINER}._inner_training_loop", "preflight.training:inner_training_loop",
         reason="A preflight runs two steps, resumes, and exports.", always=True, until=_PREFLIGHT),
)

_CALL_HOOKS = (
    Hook("torch.distributed.distributed_c10d:Work.wait", "call_hooks:wait",
         reason="The time since which a rank waits in a collective is recorded, and marked in the trace of a profile.",
         until=_WITH_RECORD, direct=True),
    Hook(f"{_FSDP1}:_unshard", "call_hooks:gather_of_unit",
         reason="FSDP1 names the unit that it gathers neither for a record of collectives nor in a trace, as FSDP2 "
                "does.",
         until=_WITH_RECORD, direct=True),
    Hook(f"{_FSDP1}:_post_backward_hook", "call_hooks:reduction_of_unit",
         reason="FSDP1 names the unit whose gradients it reduces neither for a record of collectives nor in a trace.",
         until=_WITH_RECORD, direct=True),
)
_HANG_HOOKS = (
    *(
        Hook(f"{_COLLECTIVES}.{name}", "call_hooks:collective",
             reason="The order of the collectives of each rank is recorded.", until=_WITH_RECORD, direct=True,
             instead=_OLD_NAMES.get(name, ()))
        for name in (
            *("allreduce", "broadcast", "reduce", "allgather", "reduce_scatter", "gather", "scatter", "alltoall"),
            *("barrier", "monitored_barrier", "allreduce_coalesced"), *_OLD_NAMES,
        )
    ),
    *(
        Hook(f"{_COLLECTIVES}.{name}", "call_hooks:message",
             reason="A rank that waits for a message names its peer.", until=_WITH_RECORD, direct=True)
        for name in ("send", "recv")
    ),
    Hook(f"{_FUNCTIONAL}:_resolve_group", "call_hooks:functional",
         reason="Collectives of `DTensor` call no method of a process group in Python. All of them call this function.",
         until=_WITH_RECORD, direct=True, instead=("_resolve_group_name",)),
    Hook(f"{_FUNCTIONAL}:wait_tensor", "call_hooks:wait_tensor",
         reason="The time since which a rank waits in a collective is recorded.", until=_WITH_RECORD, direct=True),
    *(
        Hook(f"torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup.{name}", "call_hooks:unit_method",
             reason=_UNIT, until=_WITH_RECORD, direct=True)
        for name in ("unshard", "post_backward")
    ),
)

_PROFILE_HOOKS = (
    Hook("torch.autograd:backward", "profiling.marking:backward",
         reason="The trace does not contain where a backward pass begins and ends.",
         until="`hf-fsdp profile` is removed from this package.", always=True),
)
# fmt: on

HOOKS: Final[dict[Group, tuple[Hook, ...]]] = {
    "accelerate": (*_ACCELERATE_HOOKS, *_PEFT_HOOKS, *_SAVING_HOOKS),
    "transformers": _TRANSFORMERS_HOOKS,
    "loading": _LOADING_HOOKS,
    "preflight": _PREFLIGHT_HOOKS,
    "calls": _CALL_HOOKS,
    "hangs": _HANG_HOOKS,
    "profile": _PROFILE_HOOKS,
}
