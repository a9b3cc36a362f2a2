"""The table of the arguments that a script can pass in Python, and what becomes of each under FSDP.

A test compares the table with the fields of the installed versions. ``docs/settings.md`` shows it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from enum import Enum
from typing import Any, Final, Literal

from hf_fsdp_plugin.messages import print_once
from hf_fsdp_plugin.problems import Origin, Problem, SpecError, has_errors

ArgumentVerdict = Literal["applied", "library", "note", "refused"]
"""Whether this package applies an argument, leaves it to the library, notes that it has no meaning, or refuses it."""


@dataclass(frozen=True, slots=True)
class ArgumentRow:
    """Arguments of one class that have the same verdict for the same reason.

    Attributes:
        owner: name of the class.
        written: the arguments, separated by spaces.
        about: text for the documentation. After the names of arguments it is also the message of a note or an error.
        fix: remedy of an error.
        code: code of the error, or of the note if it is not FSDP-N613.
        elsewhere: whether the package reads the argument, and reports it if needed, in another place.
    """

    owner: str
    verdict: ArgumentVerdict
    written: str
    about: str
    fix: str = ""
    code: str = ""
    elsewhere: bool = False

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self.written.split())


_row = ArgumentRow
_DDP: Final = "configures DistributedDataParallel, which FSDP replaces"
_HOOK: Final = "changes the dtype or the algorithm of the gradient reduction of DistributedDataParallel, not of FSDP"
_FP8: Final = "configures fp8, which is implemented inside the model (torchao, TransformerEngine), not by FSDP"
_BF16: Final = "Remove it and set mixed_precision: bf16."
_ONE_ENGINE: Final = "selects another engine, and FSDP is enabled"
_AXIS: Final = "is another kind of parallelism; only 1 is supported"

# fmt: off
ROWS: Final = (
    _row("Accelerator", "applied", "fsdp_plugin mixed_precision parallelism_config kwargs_handlers dynamo_backend "
         "dynamo_plugin", "is part of the settings"),
    _row("Accelerator", "library", "device_placement split_batches gradient_accumulation_steps cpu dataloader_config "
         "rng_types log_with project_dir project_config gradient_accumulation_plugin step_scheduler_with_optimizer",
         "does not depend on how the model is sharded"),
    _row("Accelerator", "refused", "deepspeed_plugin deepspeed_plugins megatron_lm_plugin", _ONE_ENGINE,
         code="FSDP-E120", fix="Keep one of them."),
    _row("Accelerator", "refused", "torch_tp_plugin", "selects tensor parallelism", code="FSDP-E122",
         fix="Remove it, or train this model without the plugin."),

    _row("AutocastKwargs", "library", "enabled cache_enabled", "applies to `accelerator.autocast()`; the precision of "
         "FSDP stays"),
    _row("DistributedDataParallelKwargs", "note", "dim broadcast_buffers bucket_cap_mb find_unused_parameters "
         "check_reduction gradient_as_bucket_view static_graph comm_state_option", _DDP),
    _row("DistributedDataParallelKwargs", "refused", "comm_hook comm_wrapper", _HOOK, code="FSDP-E612",
         fix="Remove it, and set reduce_dtype in fsdp_mixed_precision_policy."),
    _row("GradScalerKwargs", "applied", "init_scale growth_factor backoff_factor growth_interval enabled",
         "configures the scaler of fp16"),
    _row("InitProcessGroupKwargs", "applied", "timeout", "is set on a group that is started already, too"),
    _row("InitProcessGroupKwargs", "applied", "backend", "is refused (FSDP-E612) if a group with "
         "another one is started already"),
    _row("InitProcessGroupKwargs", "refused", "init_method", "is not the address that the launcher gave the ranks",
         code="FSDP-E612", fix="Remove it, and start the script with a launcher."),
    *(_row(owner, "refused", names, _FP8, code="FSDP-E121", fix=_BF16) for owner, names in (
        ("AORecipeKwargs", "config module_filter_func pad_inner_dim enable_fsdp_float8_all_gather"),
        ("TERecipeKwargs", "use_autocast_during_eval margin interval fp8_format amax_history_len amax_compute_algo "
                           "override_linear_precision use_mxfp8_block_scaling"),
        ("MSAMPRecipeKwargs", "opt_level"),
        ("FP8RecipeKwargs", "opt_level use_autocast_during_eval margin interval fp8_format amax_history_len "
                            "amax_compute_algo override_linear_precision use_mxfp8_block_scaling backend"),
    )),
    _row("ProfileKwargs", "library", "activities schedule_option on_trace_ready record_shapes profile_memory "
         "with_stack with_flops with_modules output_trace_dir", "applies to `accelerator.profile()`"),
    _row("GradientAccumulationPlugin", "library", "num_steps adjust_scheduler sync_with_dataloader sync_each_batch",
         "does not depend on how the model is sharded"),
    _row("TorchDynamoPlugin", "applied", "backend mode fullgraph dynamic options disable use_regional_compilation",
         "compiles the units of the wrap policy, which is what use_regional_compilation means"),
    _row("DataLoaderConfiguration", "library", "split_batches dispatch_batches even_batches use_seedable_sampler "
         "data_seed non_blocking use_stateful_dataloader", "does not depend on how the model is sharded"),

    _row("ParallelismConfig", "applied", "dp_replicate_size dp_shard_size", "is mesh.replicate or mesh.shard",
         elsewhere=True),
    _row("ParallelismConfig", "refused", "tp_size cp_size sp_size", _AXIS, code="FSDP-E122", elsewhere=True),
    _row("ParallelismConfig", "note", "tp_handler cp_handler sp_handler", "has no effect without its axis",
         code="FSDP-W026", elsewhere=True),
    _row("ParallelismConfig", "library", "cp_backend sp_backend", "has one value only"),

    _row("FullyShardedDataParallelPlugin", "applied", "fsdp_version sharding_strategy reshard_after_forward "
         "backward_prefetch mixed_precision_policy auto_wrap_policy cpu_offload ignored_modules state_dict_type "
         "limit_all_gathers use_orig_params sync_module_states forward_prefetch activation_checkpointing "
         "activation_checkpointing_offload cpu_ram_efficient_loading transformer_cls_names_to_wrap min_num_params",
         "is a setting; an unsupported value is refused (FSDP-E037)", elsewhere=True),
    _row("FullyShardedDataParallelPlugin", "note", "state_dict_config optim_state_dict_config",
         "selects the state dict type; its options have no effect", code="FSDP-N136", elsewhere=True),
    _row("FullyShardedDataParallelPlugin", "refused", "param_init_fn", "is a function", code="FSDP-E037",
         elsewhere=True),

    _row("TrainingArguments", "applied", "fsdp fsdp_config bf16 fp16 use_cpu parallelism_config gradient_checkpointing "
         "gradient_checkpointing_kwargs activation_checkpointing activation_checkpointing_kwargs torch_compile "
         "torch_compile_backend torch_compile_mode max_grad_norm ddp_timeout", "is a setting, or runs by the plan",
         elsewhere=True),
    _row("TrainingArguments", "applied", "save_only_model save_total_limit load_best_model_at_end "
         "resume_from_checkpoint", "controls checkpoints of this package", elsewhere=True),
    _row("TrainingArguments", "applied", "ddp_backend", "is refused (FSDP-E612) if a group with another one is started "
         "already", elsewhere=True),
    _row("TrainingArguments", "note", "ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers "
         "ddp_static_graph", _DDP),
    _row("TrainingArguments", "refused", "deepspeed", _ONE_ENGINE, code="FSDP-E120", fix="Keep one of them."),
    _row("TrainingArguments", "library", "", "the Trainer uses it"),  # all others; a test lists them
)
# fmt: on


def check_object(given: Any, *, source: str) -> Iterator[Problem]:
    """Yield a note or an error for each row of arguments of a dataclass that differ from their defaults.

    Args:
        source: the place for messages: ``Accelerator()`` or ``TrainingArguments``.
    """
    owner = next((kind.__name__ for kind in type(given).__mro__ if kind.__name__ in _OWNERS), "")
    yield from check_arguments(owner, given_fields(given), source=source)


def check_arguments(owner: str, given: Mapping[str, Any], *, source: str) -> Iterator[Problem]:
    """Yield a note or an error for each row of the table that has some of the given arguments."""
    for row in ROWS:
        shown = {name: _shown(given[name]) for name in sorted(row.names & given.keys())}
        if row.owner != owner or row.elsewhere or row.verdict not in ("note", "refused") or not shown:
            continue
        what = ", ".join(f"{name}={value}" for name, value in shown.items())
        first, text = next(iter(shown.items()))
        origin = Origin(source=source, spelling=first, text=text)
        message = f"{what if source.startswith(owner) else f'{owner}({what})'} {row.about}."
        yield Problem(code=row.code or "FSDP-N613", message=message, fix=row.fix, origin=origin)


def _shown(value: Any) -> str:
    return str(value) if isinstance(value, str | int | float | Enum) else type(value).__name__


def print_or_raise(problems: list[Problem]) -> None:
    """Print the notes, or raise ``SpecError`` if there are errors."""
    if has_errors(problems):
        raise SpecError(problems)
    for problem in problems:
        print_once(problem)


def given_fields(given: Any) -> dict[str, Any]:
    """Return the fields of a dataclass that differ from their defaults."""
    found = {}
    for field in fields(given) if is_dataclass(given) else ():
        default = field.default_factory() if field.default_factory is not MISSING else field.default
        value = getattr(given, field.name, default)
        neutral = (str(default), _NEUTRAL.get(field.name))
        if value is not default and value != default and not (isinstance(value, str | Enum) and str(value) in neutral):
            found[field.name] = value
    return found


_OWNERS: Final = frozenset(row.owner for row in ROWS)
_NEUTRAL: Final = {"init_method": "env://"}
"""Argument -> another value with the meaning of its default."""
