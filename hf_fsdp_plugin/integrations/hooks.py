"""The table of hooks: every function of Accelerate and Transformers that this package replaces.

A row names the replaced function, its replacement, why the replacement is needed and until when.
:mod:`hf_fsdp_plugin.integrations.patching` installs and removes the rows; ``docs/hooks.md`` is generated from them. To
hook another function, write its replacement in ``integrations/<library>/`` and add a row here. The rows were checked
with accelerate 1.15 and transformers 5.17 to 5.23.

A replacement is called as ``replacement(original, *args, **kwargs)``; the original of a method is bound, and ``self``
is the first of ``args``. A replacement that finds no FSDP settings of this package calls the original.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

Group = Literal["accelerate", "transformers", "loading"]
GROUPS: Final[dict[Group, str]] = {
    "accelerate": "Installed by `install()`, `accelerator()` and `FsdpTrainer`.",
    "transformers": "Installed by `install()`. `FsdpTrainer`, `FsdpTrainerMixin` and `FsdpTrainingArguments` override "
    "the same methods in a subclass instead.",
    "loading": "Installed when a spec enables RAM-efficient loading.",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Hook:
    """One function or method of another library that is replaced.

    Attributes:
        target: ``module:function`` or ``module:Class.method``.
        replacement: ``module:function``, relative to ``hf_fsdp_plugin.integrations``; imported at the first call.
        reason: why the original is not enough.
        until: the change in the other library, or in this package, after which the row can be deleted.
        group: what installs the hook, one of ``GROUPS``.
    """

    target: str
    replacement: str
    reason: str
    until: str
    group: Group = "accelerate"

    @property
    def module(self) -> str:
        return self.target.partition(":")[0]

    @property
    def class_name(self) -> str:
        """Name of the class; empty for a function of the module."""
        return self.target.partition(":")[2].rpartition(".")[0]

    @property
    def name(self) -> str:
        return self.target.partition(":")[2].rpartition(".")[2]


_ACCELERATOR = "accelerate.accelerator:Accelerator"
_TRAINER = "transformers.trainer:Trainer"
_WITH_INSTALL = "`install()` is removed from this package."
_WITH_PLANS = "Accelerate shards a model by a plan."
_STAGED = "Accelerate writes checkpoints to a staging folder and renames them."
_TRAINER_STAGED = "The Trainer writes checkpoints to a staging folder and renames them."

HOOKS: Final[tuple[Hook, ...]] = (
    Hook(
        target="accelerate.state:PartialState.__init__",
        replacement="accelerate.state:init_partial_state",
        reason="A process group with NCCL alone cannot clip or save offloaded parameters, which are on the CPU.",
        until="Accelerate starts `cpu:gloo,cuda:nccl` for FSDP plugins, not only for its own environment variables.",
    ),
    Hook(
        target="accelerate.state:AcceleratorState.__init__",
        replacement="accelerate.state:init_accelerator_state",
        reason="On CPU ranks Accelerate ignores the FSDP plugin and uses DDP; for CPU ranks of `torchrun` and for a "
        "single rank it starts no process group.",
        until="Accelerate accepts an FSDP plugin for `MULTI_CPU` and recognizes CPU ranks without an accelerator.",
    ),
    Hook(
        target="accelerate.utils.dataclasses:FullyShardedDataParallelPlugin.__init__",
        replacement="accelerate.plugin:init_plugin",
        reason="The constructor refuses supported settings, and afterwards given values and defaults look the same.",
        until=_WITH_INSTALL,
    ),
    Hook(
        target=f"{_ACCELERATOR}.__init__",
        replacement="accelerate.accelerator:init_accelerator",
        reason="An Accelerator without a plugin gets the spec of `install()`; a stock plugin is replaced by one that "
        "is made from a spec.",
        until=_WITH_INSTALL,
    ),
    Hook(
        target=f"{_ACCELERATOR}.prepare",
        replacement="accelerate.accelerator:prepare",
        reason="Units, mesh, strategy and prefetch follow the plan.",
        until=_WITH_PLANS,
    ),
    Hook(
        target=f"{_ACCELERATOR}.prepare_model",
        replacement="accelerate.accelerator:prepare_model",
        reason="Units, mesh, strategy and prefetch follow the plan.",
        until=_WITH_PLANS,
    ),
    Hook(
        target=f"{_ACCELERATOR}.get_state_dict",
        replacement="accelerate.accelerator:get_state_dict",
        reason="FSDP1's full state dict fails on CPU ranks.",
        until="torch supports it.",
    ),
    Hook(
        target=f"{_ACCELERATOR}.clip_grad_norm_",
        replacement="accelerate.accelerator:clip_grad_norm_",
        reason="Accelerate chooses the algorithm by the version in the config and by whether the parameters are all "
        "those of one model. For other parameters, the norm under FSDP1 is that of one rank's shards.",
        until="Accelerate chooses by the parameters.",
    ),
    Hook(
        target=f"{_ACCELERATOR}.save_state",
        replacement="accelerate.checkpoints:save_state",
        reason="Accelerate writes in place and deletes older checkpoints before the new one is complete.",
        until=_STAGED,
    ),
    Hook(
        target=f"{_ACCELERATOR}.load_state",
        replacement="accelerate.checkpoints:load_state",
        reason="Accelerate loads an incomplete checkpoint.",
        until=_STAGED,
    ),
    Hook(
        target=f"{_ACCELERATOR}.save_model",
        replacement="accelerate.checkpoints:save_model",
        reason="Accelerate gathers the whole model on one rank.",
        until=_STAGED,
    ),
    Hook(
        target=f"{_ACCELERATOR}.end_training",
        replacement="accelerate.accelerator:end_training",
        reason="The report is written before the process group is destroyed.",
        until="Accelerate offers a callback at the end of training.",
    ),
    *(
        Hook(
            target=f"{module}:{name}",
            replacement=f"accelerate.fsdp_utils:{name}",
            reason="The state dict type `local` is refused under FSDP2; FSDP1's full state dict fails on CPU ranks.",
            until="torch and Accelerate support both.",
        )
        # Both modules import the functions by name.
        for module in ("accelerate.accelerator", "transformers.trainer")
        for name in ("save_fsdp_model", "load_fsdp_model", "save_fsdp_optimizer", "load_fsdp_optimizer")
    ),
    Hook(
        target="transformers.training_args:TrainingArguments.__post_init__",
        replacement="transformers.arguments:validate_arguments",
        reason="Transformers refuses `bf16` on CPU ranks that a launcher selected.",
        until="Transformers reads `ACCELERATE_USE_CPU` in this method.",
        group="transformers",
    ),
    Hook(
        target="transformers.training_args:TrainingArguments._process_fsdp_args",
        replacement="transformers.arguments:process_fsdp_args",
        reason="Transformers drops some FSDP settings and refuses others.",
        until=_WITH_INSTALL,
        group="transformers",
    ),
    Hook(
        target=f"{_TRAINER}.create_accelerator_and_postprocess",
        replacement="transformers.trainer:create_accelerator",
        reason="The Accelerator gets the spec of the Trainer's arguments.",
        until=_WITH_INSTALL,
        group="transformers",
    ),
    Hook(
        target=f"{_TRAINER}._set_signature_columns_if_needed",
        replacement="transformers.trainer:set_signature_columns",
        reason="The signature of FSDP1's wrapper accepts any argument, so the Trainer keeps no dataset column.",
        until="The Trainer inspects the unwrapped model.",
        group="transformers",
    ),
    Hook(
        target=f"{_TRAINER}.evaluation_loop",
        replacement="transformers.trainer:evaluation_loop",
        reason="Evaluation before training raises under FSDP2; under FSDP1 the training after it uses unsharded "
        "parameters.",
        until="The Trainer prepares the model once, before the first evaluation.",
        group="transformers",
    ),
    Hook(
        target=f"{_TRAINER}.train",
        replacement="transformers.trainer:train",
        reason="Training resumes from complete checkpoints only, and ends with the report.",
        until=_TRAINER_STAGED,
        group="transformers",
    ),
    Hook(
        target=f"{_TRAINER}.save_model",
        replacement="transformers.checkpoints:save_model",
        reason="The Trainer gathers the whole model on one rank, and writes a sharded model without its config.",
        until=_TRAINER_STAGED,
        group="transformers",
    ),
    Hook(
        target=f"{_TRAINER}._save_checkpoint",
        replacement="transformers.checkpoints:save_checkpoint",
        reason="The Trainer writes in place and deletes older checkpoints in place.",
        until=_TRAINER_STAGED,
        group="transformers",
    ),
    Hook(
        target=f"{_TRAINER}._load_best_model",
        replacement="transformers.checkpoints:load_best_model",
        reason="The best checkpoint may still be written in the background.",
        until="This package has no asynchronous saves.",
        group="transformers",
    ),
    Hook(
        target=f"{_TRAINER}._finalize_training",
        replacement="transformers.checkpoints:finalize_training",
        reason="The last checkpoint may still be written in the background when the Trainer reads all of them.",
        until="This package has no asynchronous saves.",
        group="transformers",
    ),
    Hook(
        target=f"{_TRAINER}._load_rng_state",
        replacement="transformers.checkpoints:load_rng_state",
        reason="The file of the RNG state has another name after a change between one rank and several; a change of "
        "the world size or of the batch is reported.",
        until="The Trainer reads both names.",
        group="transformers",
    ),
    Hook(
        target="transformers.modeling_utils:PreTrainedModel._load_pretrained_model",
        replacement="transformers.loading:load_pretrained_model",
        reason="Every rank reads all weights, although only rank 0 of each machine needs them.",
        until="`_load_pretrained_model` checks `is_fsdp_enabled` again.",
        group="loading",
    ),
)
