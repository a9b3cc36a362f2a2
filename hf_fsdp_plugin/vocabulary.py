"""Every setting that is understood: its name, its values, and how people spell it. Data; it is read elsewhere.

One ``Row`` a setting. A key is compared in lower case, with ``-`` as ``_`` and without the prefix of its scope, so
``fsdp_offload_params``, ``OFFLOAD_PARAMS`` and ``--fsdp-offload-params`` are one spelling.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

from hf_fsdp_plugin.strategies import STRATEGIES, strategy_of

Scope = Literal["fsdp", "parallelism", "dynamo", "precision", "launch", "training"]
"""Where a key may stand: in ``fsdp_config``, ``parallelism_config``, ``dynamo_config`` or the precision policy, at the
top of Accelerate's file, or among the arguments of a training script."""

Kind = Literal[
    "bool", "integer", "size", "choice", "names", "text", "mapping", "any",  # plain values
    "reshard",  # true, false or the name of a strategy
    "one",      # a parallel degree that has to be 1 here
    "section",  # opens another scope
    "options",  # fsdp="full_shard auto_wrap"
    "mode",     # mixed_precision, which speaks for two settings
    "flag",     # bf16=True, fp16=True
]  # fmt: skip

PREFIXES: Mapping[Scope, str] = MappingProxyType(
    {
        "fsdp": "fsdp_",
        "parallelism": "parallelism_config_",
        "dynamo": "dynamo_",
        "precision": "",
        "launch": "",
        "training": "",
    }
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One setting.

    Attributes:
        name: canonical name. Names of ``internal`` rows have no field in ``FsdpSpec``; they are folded into others.
        spellings: keys without the scope's prefix; the first is the one to recommend.
        choices: canonical value -> other ways to write it.
        opens: the scope of the keys inside, for sections.
    """

    name: str
    kind: Kind
    about: str
    scope: Scope = "fsdp"
    spellings: tuple[str, ...] = ()
    choices: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    minimum: int | None = None
    opens: Scope | None = None
    internal: bool = False

    @property
    def key(self) -> str:
        """The key to recommend: ``fsdp_offload_params``."""
        return PREFIXES[self.scope] + self.spellings[0]


STRATEGY_CHOICES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {row.name: (str(row.number), *row.spellings) for row in STRATEGIES.values()}
)
DTYPES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "fp32": ("float32", "float", "32"),
        "bf16": ("bfloat16",),
        "fp16": ("float16", "half", "16"),
        "auto": ("no", "false", "none", "null", "unchanged"),
    }
)
_MODES = {
    "no": ("false", "none", "null", "fp32", "float32", "32"),
    "fp16": ("float16", "16"),
    "bf16": ("bfloat16",),
    "fp8": (),
}

_DISTRIBUTED: dict[str, tuple[str, ...]] = {
    name: (name.lower(),)
    for name in (
        "FSDP", "NO", "MULTI_CPU", "MULTI_GPU", "MULTI_NPU", "MULTI_MLU", "MULTI_SDAA", "MULTI_MUSA", "MULTI_XPU",
        "MULTI_HPU", "MULTI_NEURON", "MPS", "DEEPSPEED", "MEGATRON_LM", "XLA", "TPU", "TP", "DATA_PARALLEL",
        "MODEL_PARALLEL",
    )
}  # fmt: skip
_DISTRIBUTED["NO"] = ("no", "false", "none")

_FSDP_ROWS = (
    Row(name="fsdp.version", kind="choice", spellings=("version",), choices={"1": ("fsdp1",), "2": ("fsdp2",)},
        about="1 for FullyShardedDataParallel, 2 for fully_shard."),
    Row(name="sharding.strategy", kind="choice", choices=STRATEGY_CHOICES, spellings=("sharding_strategy", "strategy"),
        about="What is sharded between forward and backward. "
              + "; ".join(row.about for row in STRATEGIES.values()) + "."),
    Row(name="sharding.reshard", kind="reshard", internal=True, spellings=("reshard_after_forward",),
        about="Whether gathered parameters are freed after forward: true is "
              + " and false is ".join(strategy_of(sharded=True, hybrid=False, reshard=flag).name
                                      for flag in (True, False)) + "; or the name of a strategy."),
    Row(name="mesh.shard", kind="size", scope="fsdp", minimum=1, spellings=("size", "dp_shard_size"),
        about="Ranks over which one copy of the model is sharded, or auto."),
    Row(name="mesh.replicate", kind="size", scope="fsdp", minimum=1, spellings=("dp_replicate_size",),
        about="Number of sharded copies of the model, or auto."),
    Row(name="wrap.policy", kind="choice", spellings=("auto_wrap_policy", "wrap_policy"),
        choices={"transformer": ("transformer_based_wrap", "transformer_based", "transformer_auto_wrap_policy"),
                 "size": ("size_based_wrap", "size_based", "size_based_auto_wrap_policy"),
                 "none": ("no_wrap", "null", "false")},
        about="How units are found: layers by class, modules by size, or the root alone."),
    Row(name="wrap.classes", kind="names",
        spellings=("transformer_layer_cls_to_wrap", "transformer_cls_names_to_wrap", "transformer_cls_to_wrap",
                   "transformer_layer_cls_names_to_wrap", "transformer_layer_cls"),
        about="Class names of the layers that become units; left out, the model names its own."),
    Row(name="wrap.min_num_params", kind="integer", minimum=0, spellings=("min_num_params", "min_num_param"),
        about="The size policy's threshold, in parameters; 1e8 and 100M are read."),
    Row(name="wrap.ignored_modules", kind="text", spellings=("ignored_modules",),
        about="Regular expression on the names of modules that stay whole on every rank."),
    Row(name="offload.params", kind="bool", spellings=("offload_params", "cpu_offload", "offload"),
        about="Keep parameters, gradients and optimizer state in host memory."),
    Row(name="offload.pin_memory", kind="bool",
        spellings=("pin_memory", "cpu_offload_pin_memory", "offload_pin_memory"),
        about="Pin the offloaded memory."),
    Row(name="precision.policy", kind="section", internal=True, opens="precision",
        spellings=("mixed_precision_policy", "mixed_precision"),
        about="Dtypes one by one."),
    Row(name="precision.param", kind="choice", scope="precision", choices=DTYPES, spellings=("param_dtype", "param"),
        about="Dtype of computation and of gathered parameters."),
    Row(name="precision.reduce", kind="choice", scope="precision", choices=DTYPES, spellings=("reduce_dtype", "reduce"),
        about="Dtype in which gradients are reduced; fp32 unless said."),
    Row(name="precision.output", kind="choice", scope="precision", choices=DTYPES, spellings=("output_dtype", "output"),
        about="Dtype of a unit's outputs."),
    Row(name="precision.buffer", kind="choice", scope="precision", choices=DTYPES, spellings=("buffer_dtype", "buffer"),
        about="Dtype of buffers."),
    Row(name="prefetch.backward", kind="choice", spellings=("backward_prefetch", "backward_prefetch_policy"),
        choices={"pre": ("1", "backward_pre"), "post": ("2", "backward_post"),
                 "none": ("no_prefetch", "null", "no", "false")},
        about="When the next unit is gathered in backward: before or after this unit's gradients, or not ahead."),
    Row(name="prefetch.forward", kind="bool", spellings=("forward_prefetch",),
        about="Gather the next unit during forward."),
    Row(name="prefetch.limit_all_gathers", kind="bool", spellings=("limit_all_gathers",),
        about="Keep the host from queueing more gathers than memory allows."),
    Row(name="checkpoint.state_dict", kind="choice", spellings=("state_dict_type", "state_dict"),
        choices={"full": ("1", "full_state_dict"), "local": ("2", "local_state_dict"),
                 "sharded": ("3", "sharded_state_dict")},
        about="What a checkpoint holds: one whole state dict, or a shard a rank."),
    Row(name="checkpoint.asynchronous", kind="bool", spellings=("async_save",),
        about="Write checkpoints beside the training, which is held only for the copy out of the model."),
    Row(name="activation.checkpointing", kind="choice", spellings=("activation_checkpointing",),
        choices={"none": ("false", "no", "off", "0", "null"), "full": ("true", "yes", "on", "1"), "selective": ()},
        about="Recompute activations in backward instead of keeping them."),
    Row(name="activation.trainer", kind="bool", internal=True, scope="training",
        spellings=("gradient_checkpointing", "activation_checkpointing"), about="Transformers' own checkpointing."),
    Row(name="activation.offload", kind="bool",
        spellings=("activation_checkpointing_offload", "activation_cpu_offload", "activation_offload"),
        about="Keep the checkpointed activations in host memory."),
    Row(name="loading.ram_efficient", kind="bool", spellings=("cpu_ram_efficient_loading",),
        about="Only rank 0 reads the weights; the others receive theirs."),
    Row(name="loading.sync_module_states", kind="bool", spellings=("sync_module_states",),
        about="Broadcast rank 0's weights before sharding."),
    Row(name="params.use_orig", kind="bool", spellings=("use_orig_params",),
        about="Keep the model's own parameters visible to the optimizer."),
    Row(name="xla.enabled", kind="bool", spellings=("xla",), about="PyTorch/XLA's FSDP."),
    Row(name="xla.v2", kind="bool", spellings=("xla_fsdp_v2",), about="PyTorch/XLA's FSDP through SPMD."),
    Row(name="xla.grad_ckpt", kind="bool", spellings=("xla_fsdp_grad_ckpt",), about="Checkpointing of XLA's units."),
    Row(name="xla.settings", kind="mapping", spellings=("xla_fsdp_settings",), about="Arguments of XLA's wrapper."),
)  # fmt: skip

_PARALLELISM_ROWS = (
    Row(name="mesh.shard", kind="size", scope="parallelism", minimum=1, spellings=("dp_shard_size",),
        about="Ranks over which one copy of the model is sharded, or auto."),
    Row(name="mesh.replicate", kind="size", scope="parallelism", minimum=1, spellings=("dp_replicate_size",),
        about="Number of sharded copies of the model, or auto."),
    *(Row(name=f"mesh.{axis}", kind="one", scope="parallelism", internal=True,
          spellings=(f"{axis}_size", f"{what.lower()}_parallel_size"),
          about=f"{what} parallel degree: 1, as the work here is data parallel.")
      for axis, what in (("tp", "Tensor"), ("cp", "Context"), ("sp", "Sequence"), ("pp", "Pipeline"))),
    *(Row(name=f"mesh.{key}", kind="any", scope="parallelism", internal=True, spellings=(key,),
          about="A detail of a parallel axis of degree 1.")
      for key in ("cp_backend", "cp_comm_strategy", "cp_handler", "sp_backend", "sp_seq_length",
                  "sp_seq_length_is_variable", "sp_attn_implementation", "sp_handler", "tp_handler")),
)  # fmt: skip

_LAUNCH_ROWS = (
    Row(name="launch.compute_environment", kind="choice", scope="launch", spellings=("compute_environment",),
        choices={n: (n.lower(),) for n in ("LOCAL_MACHINE", "CUSTOM_CLUSTER", "AMAZON_SAGEMAKER")},
        about="Where it runs."),
    Row(name="launch.distributed_type", kind="choice", scope="launch", spellings=("distributed_type",),
        choices=_DISTRIBUTED,
        about="FSDP for everything in this file to take effect."),
    Row(name="launch.num_processes", kind="size", scope="launch", minimum=1, spellings=("num_processes",),
        about="Ranks on all machines together."),
    Row(name="launch.num_machines", kind="integer", scope="launch", minimum=1, spellings=("num_machines",),
        about="Machines."),
    Row(name="launch.machine_rank", kind="integer", scope="launch", minimum=0, spellings=("machine_rank",),
        about="This machine's rank, from 0."),
    Row(name="launch.main_process_ip", kind="text", scope="launch", spellings=("main_process_ip",),
        about="Address of machine 0."),
    Row(name="launch.main_process_port", kind="integer", scope="launch", minimum=0, spellings=("main_process_port",),
        about="Port on machine 0; 0 takes a free one."),
    Row(name="launch.mixed_precision", kind="mode", scope="launch", spellings=("mixed_precision",), choices=_MODES,
        about="no, bf16 or fp16; gradients are reduced in fp32 unless the precision policy says otherwise."),
    Row(name="launch.use_cpu", kind="bool", scope="launch", spellings=("use_cpu",), about="Run on CPU ranks."),
    Row(name="launch.debug", kind="bool", scope="launch", spellings=("debug",),
        about="Accelerate's collective checks."),
    Row(name="launch.downcast_bf16", kind="bool", scope="launch", spellings=("downcast_bf16",), about="For TPUs."),
    Row(name="launch.rdzv_backend", kind="text", scope="launch", spellings=("rdzv_backend",),
        about="Rendezvous: static, c10d."),
    Row(name="launch.same_network", kind="bool", scope="launch", spellings=("same_network",),
        about="Machines share a network."),
    Row(name="launch.gpu_ids", kind="text", scope="launch", spellings=("gpu_ids",),
        about="all, or numbers with commas."),
    Row(name="launch.main_training_function", kind="text", scope="launch", spellings=("main_training_function",),
        about="Function to call, for notebooks and TPUs."),
    Row(name="launch.enable_cpu_affinity", kind="bool", scope="launch", spellings=("enable_cpu_affinity",),
        about="NUMA pinning."),
    Row(name="launch.dynamo_config", kind="section", opens="dynamo", scope="launch", spellings=("dynamo_config",),
        about="torch.compile."),
    *(Row(name=f"launch.dynamo_config.{key}", kind="text" if key in ("backend", "mode") else "bool",
          scope="dynamo", internal=True, spellings=(key,), about=f"torch.compile: {key}.")
      for key in ("backend", "mode", "use_fullgraph", "use_dynamic", "use_regional_compilation")),
    Row(name="launch.fp16", kind="flag", scope="launch", internal=True, spellings=("fp16",),
        about="mixed_precision: fp16."),
    Row(name="launch.fsdp_config", kind="section", opens="fsdp", scope="launch", internal=True,
        spellings=("fsdp_config",),
        about="The FSDP settings."),
    Row(name="launch.parallelism_config", kind="section", opens="parallelism", scope="launch", internal=True,
        spellings=("parallelism_config",), about="The device mesh."),
    *(Row(name=f"launch.extra.{key}", kind="any", scope="launch", internal=True, spellings=(key,), about="Passed on.")
      for key in (
          "deepspeed_config", "megatron_lm_config", "fp8_config", "mpirun_config", "tpu_name", "tpu_zone",
          "tpu_use_cluster", "tpu_use_sudo", "tpu_cluster", "tpu_vm", "tpu_env", "command_file", "commands",
          "num_cpu_threads_per_process", "use_mps_device", "max_restarts", "monitor_interval", "rdzv_conf", "tee",
          "log_dir", "role", "mpirun_hostfile", "ec2_instance_type", "iam_role_name", "image_uri", "profile",
          "region", "base_job_name", "pytorch_version", "transformers_version", "py_version", "sagemaker_inputs_file",
          "sagemaker_metrics_file", "additional_args")),
)  # fmt: skip

_TRAINING_ROWS = (
    Row(name="training.fsdp", kind="options", scope="training", internal=True, spellings=("fsdp",),
        about="Words: a strategy, auto_wrap, offload; or true."),
    Row(name="training.fsdp_config", kind="section", opens="fsdp", scope="training", internal=True,
        spellings=("fsdp_config",),
        about="The FSDP settings."),
    Row(name="training.bf16", kind="flag", scope="training", internal=True, spellings=("bf16",),
        about="mixed_precision: bf16."),
    Row(name="training.fp16", kind="flag", scope="training", internal=True, spellings=("fp16",),
        about="mixed_precision: fp16."),
    Row(name="launch.use_cpu", kind="bool", scope="training", spellings=("use_cpu", "no_cuda"),
        about="Run on CPU ranks."),
)  # fmt: skip

ROWS: tuple[Row, ...] = (*_FSDP_ROWS, *_PARALLELISM_ROWS, *_LAUNCH_ROWS, *_TRAINING_ROWS)

TRAINING_FILE_MARKS = frozenset(
    {
        "base_model",
        "model_name_or_path",
        "output_dir",
        "learning_rate",
        "datasets",
        "dataset",
        "num_train_epochs",
        "num_epochs",
    }
)
"""Keys that tell a training script's own YAML (axolotl's, LLaMA-Factory's, TRL's) from a file of Accelerate."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UnsupportedKey:
    """A key of another tool that has no setting here: the code of its problem, the reason, and what to do instead."""

    why: str
    fix: str
    code: str = "FSDP-E025"


_NO_OBJECTS = "takes Python objects, which a config cannot contain."
_STATE_DICTS = "Set fsdp_state_dict_type to full, sharded or local."

UNSUPPORTED_KEYS: Mapping[tuple[Scope, str], UnsupportedKey] = MappingProxyType(
    {
        ("fsdp", "final_state_dict_type"): UnsupportedKey(
            code="FSDP-W026",
            why="is a setting of axolotl, not of FSDP, and has no effect.",
            fix="Use fsdp_state_dict_type for the checkpoints of a run.",
        ),
        ("precision", "cast_forward_inputs"): UnsupportedKey(
            code="FSDP-W026", why="has no effect: the inputs of a unit are always cast.", fix="Remove it."
        ),
        ("fsdp", "state_dict_config"): UnsupportedKey(why=_NO_OBJECTS, fix=_STATE_DICTS),
        ("fsdp", "optim_state_dict_config"): UnsupportedKey(why=_NO_OBJECTS, fix=_STATE_DICTS),
        ("fsdp", "param_init_fn"): UnsupportedKey(
            why=_NO_OBJECTS, fix="Remove it: the plugin initializes modules on the meta device."
        ),
        ("fsdp", "ignored_params"): UnsupportedKey(
            why=_NO_OBJECTS, fix="Select modules with fsdp_ignored_modules, a regular expression on their names."
        ),
    }
)


def plain_key(key: str, scope: Scope) -> str:
    """A key as it is compared: lower case, ``_`` for ``-`` and blanks, without the scope's prefix."""
    plain = key.strip().lower().replace("-", "_").replace(" ", "_")
    return plain.removeprefix(PREFIXES[scope])


BY_NAME: Mapping[str, Row] = MappingProxyType({row.name: row for row in reversed(ROWS)})
BY_KEY: Mapping[tuple[Scope, str], Row] = MappingProxyType(
    {(row.scope, spelling): row for row in ROWS for spelling in row.spellings}
)


_FOLDED = {
    "sharding.reshard": "sharding.strategy",
    "wrap.auto": "wrap.policy",
    "activation.trainer": "activation.checkpointing",
}


def canonical(name: str) -> str | None:
    """The setting of a spec that a name belongs to, for messages; ``None`` where it belongs to none."""
    name = _FOLDED.get(name, name)
    for gathered in ("launch.extra", "launch.dynamo_config"):
        if name.startswith(f"{gathered}."):
            return gathered
    row = BY_NAME.get(name)
    return None if row is None or row.internal else name


def find(key: str, scopes: Iterable[Scope]) -> Row | None:
    """The row that a key means in the first of these scopes that knows it, or under its canonical name."""
    for scope in scopes:
        if row := BY_KEY.get((scope, plain_key(key, scope))):
            return row
    row = BY_NAME.get(key.strip().lower())
    return row if row is not None and not row.internal else None


def suggest(key: str, scopes: Iterable[Scope]) -> str:
    """The known key nearest to a misspelt one, as it would be written; empty where none is near."""
    known: dict[str, str] = {}
    for row in (row for scope in scopes for row in ROWS if row.scope == scope):
        for spelling in row.spellings:
            known.setdefault(spelling, PREFIXES[row.scope] + spelling)
            known.setdefault(PREFIXES[row.scope] + spelling, PREFIXES[row.scope] + spelling)
    near = difflib.get_close_matches(key.strip().lower().replace("-", "_"), known, n=1, cutoff=0.7)
    return known[near[0]] if near else ""
