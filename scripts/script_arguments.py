"""What becomes of each argument that a script can pass in Python, under FSDP: for ``docs/settings.md`` and its test.

The arguments that are noted or refused when an object is created are rows of the package
(``hf_fsdp_plugin/integrations/script_arguments.py``). The others are here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from hf_fsdp_plugin.integrations.script_arguments import ROWS as CHECKED

Verdict = Literal["applied", "library", "note", "refused"]
"""Whether this package applies an argument, leaves it to the library, notes that it has no meaning, or refuses it."""


@dataclass(frozen=True, slots=True)
class DocumentedRow:
    """Arguments of one class that have the same verdict for the same reason.

    Attributes:
        elsewhere: whether the package reads the argument as a setting, and reports it if needed, in another place.
    """

    owner: str
    verdict: Verdict
    written: str
    about: str
    code: str = ""
    fix: str = ""
    elsewhere: bool = False

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self.written.split())


_row = DocumentedRow
_NO_SHARDING: Final = "does not depend on how the model is sharded"
_OTHER_GROUP: Final = "is refused (FSDP-E612) if a group with another one is started already"

_MSAMP_NAMES: Final = {
    "MSAMPRecipeKwargs": "opt_level",
    "FP8RecipeKwargs": "opt_level use_autocast_during_eval margin interval fp8_format amax_history_len "
    "amax_compute_algo override_linear_precision use_mxfp8_block_scaling backend",
}
"""Class of which every argument is refused -> its arguments."""

# fmt: off
_ROWS: Final = (
    _row("Accelerator", "applied", "fsdp_plugin mixed_precision parallelism_config kwargs_handlers dynamo_backend "
         "dynamo_plugin", "is part of the settings"),
    _row("Accelerator", "library", "device_placement split_batches gradient_accumulation_steps cpu dataloader_config "
         "rng_types log_with project_dir project_config gradient_accumulation_plugin step_scheduler_with_optimizer",
         _NO_SHARDING),
    _row("AutocastKwargs", "library", "enabled cache_enabled", "applies to `accelerator.autocast()`; the precision of "
         "FSDP stays"),
    _row("GradScalerKwargs", "applied", "init_scale growth_factor backoff_factor growth_interval enabled",
         "configures the scaler of fp16"),
    _row("InitProcessGroupKwargs", "applied", "timeout", "is set on a group that is started already, too"),
    _row("InitProcessGroupKwargs", "applied", "backend", _OTHER_GROUP),
    _row("AORecipeKwargs", "applied", "config module_filter_func pad_inner_dim enable_fsdp_float8_all_gather",
         "turns fp8 on, and overrides `fp8_config`", elsewhere=True),
    _row("TERecipeKwargs", "library", "use_autocast_during_eval margin interval fp8_format amax_history_len "
         "amax_compute_algo override_linear_precision use_mxfp8_block_scaling",
         "turns fp8 on with Transformer Engine, to which Accelerate passes it"),
    _row("ProfileKwargs", "library", "activities schedule_option on_trace_ready record_shapes profile_memory "
         "with_stack with_flops with_modules output_trace_dir", "applies to `accelerator.profile()`"),
    _row("GradientAccumulationPlugin", "library", "num_steps adjust_scheduler sync_with_dataloader sync_each_batch",
         _NO_SHARDING),
    _row("TorchDynamoPlugin", "applied", "backend mode fullgraph dynamic options disable use_regional_compilation",
         "compiles the units of the wrap policy, which is what use_regional_compilation means"),
    _row("DataLoaderConfiguration", "library", "split_batches dispatch_batches even_batches use_seedable_sampler "
         "data_seed non_blocking use_stateful_dataloader", _NO_SHARDING),
    _row("ParallelismConfig", "applied", "dp_replicate_size dp_shard_size cp_size tp_size",
         "is mesh.replicate, mesh.shard, mesh.context or mesh.tensor", elsewhere=True),
    _row("ParallelismConfig", "refused", "sp_size", "is an axis of DeepSpeed; only 1 is supported", "FSDP-E122",
         elsewhere=True),
    _row("ParallelismConfig", "note", "tp_handler cp_handler sp_handler", "has no effect without its axis",
         "FSDP-W026", elsewhere=True),
    _row("ParallelismConfig", "library", "cp_backend sp_backend", "has one value only"),
    _row("FullyShardedDataParallelPlugin", "applied", "fsdp_version sharding_strategy reshard_after_forward "
         "backward_prefetch mixed_precision_policy auto_wrap_policy cpu_offload ignored_modules state_dict_type "
         "limit_all_gathers use_orig_params sync_module_states forward_prefetch activation_checkpointing "
         "activation_checkpointing_offload cpu_ram_efficient_loading transformer_cls_names_to_wrap min_num_params",
         "is a setting; an unsupported value is refused (FSDP-E037)", elsewhere=True),
    _row("FullyShardedDataParallelPlugin", "note", "state_dict_config optim_state_dict_config",
         "selects the state dict type; its options have no effect", "FSDP-N136", elsewhere=True),
    _row("FullyShardedDataParallelPlugin", "refused", "param_init_fn", "is a function", "FSDP-E037", elsewhere=True),
    _row("TrainingArguments", "applied", "fsdp fsdp_config bf16 fp16 use_cpu parallelism_config gradient_checkpointing "
         "gradient_checkpointing_kwargs activation_checkpointing activation_checkpointing_kwargs torch_compile "
         "torch_compile_backend torch_compile_mode max_grad_norm ddp_timeout", "is a setting, or runs by the plan",
         elsewhere=True),
    _row("TrainingArguments", "applied", "save_only_model save_total_limit load_best_model_at_end "
         "resume_from_checkpoint", "controls checkpoints of this package", elsewhere=True),
    _row("TrainingArguments", "applied", "ddp_backend", _OTHER_GROUP, elsewhere=True),
    _row("TrainingArguments", "library", "", "the Trainer uses it"),  # all others; a test lists them
)
# fmt: on
ROWS: Final = (
    *_ROWS,
    *(
        DocumentedRow(
            row.owner,
            "refused" if row.code.startswith("FSDP-E") else "note",
            _MSAMP_NAMES[row.owner] if row.written == "*" else row.written,
            row.about,
            "" if row.code == "FSDP-N613" else row.code,
            row.fix,
        )
        for row in CHECKED
    ),
)
