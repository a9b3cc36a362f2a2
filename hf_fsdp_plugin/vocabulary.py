"""The table of settings: names, values and accepted keys. To support another key or value, add it to a row.

Keys are compared in lower case, with ``-`` replaced by ``_`` and without the prefix of their scope:
``fsdp_offload_params``, ``OFFLOAD_PARAMS`` and ``--fsdp-offload-params`` are the same key. ``spellings.py`` defines how
values are compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from hf_fsdp_plugin.spellings import lower, nearest_word
from hf_fsdp_plugin.strategies import STRATEGIES, strategy_of

Scope = Literal["fsdp", "parallelism", "dynamo", "precision", "launch", "training", "distributed"]
"""The scope in which a key is valid: in ``fsdp_config``, ``parallelism_config``, ``dynamo_config`` or the precision
policy, at the top level of Accelerate's file, among the arguments of a training script, or in a ``DistributedConfig``.
"""

ValueKind = Literal[
    "bool", "integer", "count", "size", "choice", "names", "mapping", "any",  # plain values
    "address", "devices", "identifier", "pattern",  # text with a prescribed form
    "reshard",  # true, false or a strategy
    "one",      # a degree of parallelism, which must be 1
    "section",  # a section with another scope
    "options",  # fsdp="full_shard auto_wrap"
    "mode",     # mixed_precision, which sets two settings
    "flag",     # bf16=True, fp16=True
]  # fmt: skip

PREFIXES: Mapping[Scope, str] = MappingProxyType(
    {
        "fsdp": "fsdp_", "parallelism": "parallelism_config_", "dynamo": "dynamo_",
        "precision": "", "launch": "", "training": "", "distributed": "",
    }
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class SettingRow:
    """One setting.

    Attributes:
        name: canonical name.
        about: meaning, for the documentation.
        spellings: keys without the prefix of the scope; the first one is recommended.
        choices: canonical value -> other spellings of it.
        prefixes: names of enumerations, or ``torch``, that may precede a choice: ``ShardingStrategy.FULL_SHARD``.
        opens: for sections, the scope of their keys.
        ignored: why the key has no effect. A value that is not in `stock` is reported.
        stock: the values that Accelerate's own questionnaire writes for an ignored key.
        internal: whether the setting has no field in ``FsdpSpec``. Other settings are derived from it.
    """

    name: str
    kind: ValueKind
    about: str
    scope: Scope = "fsdp"
    spellings: tuple[str, ...] = ()
    choices: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    prefixes: tuple[str, ...] = ()
    minimum: int | None = None
    maximum: int | None = None
    opens: Scope | None = None
    internal: bool = False
    ignored: str = ""
    stock: tuple[Any, ...] = ()

    @property
    def key(self) -> str:
        """The recommended key: ``fsdp_offload_params``."""
        return PREFIXES[self.scope] + self.spellings[0]


STRATEGY_CHOICES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        row.name: tuple(name for name in (str(row.number), row.torch_name.lower()) if name != row.name)
        for row in STRATEGIES.values()
    }
)
STRATEGY_PREFIXES = ("ShardingStrategy", "FSDPOption")
MODE_PREFIXES = ("torch", "PrecisionType")
DTYPES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "fp32": ("float32", "float", "32"),
        "bf16": ("bfloat16",),
        "fp16": ("float16", "half", "16"),
        "auto": ("no", "false", "none", "unchanged"),
    }
)
MODES = {
    "no": ("false", "none", "fp32", "float32", "32"),
    "fp16": ("float16", "16"),
    "bf16": ("bfloat16",),
    "fp8": (),
}

_DISTRIBUTED: dict[str, tuple[str, ...]] = dict.fromkeys(
    (
        "FSDP", "NO", "MULTI_CPU", "MULTI_GPU", "MULTI_NPU", "MULTI_MLU", "MULTI_SDAA", "MULTI_MUSA", "MULTI_XPU",
        "MULTI_HPU", "MULTI_NEURON", "MPS", "DEEPSPEED", "MEGATRON_LM", "XLA", "TPU", "TP", "DATA_PARALLEL",
        "MODEL_PARALLEL",
    ),
    (),
)  # fmt: skip
_DISTRIBUTED["NO"] = ("false", "none")
_DYNAMO_BACKENDS: dict[str, tuple[str, ...]] = dict.fromkeys(
    (
        "no", "eager", "aot_eager", "inductor", "aot_ts_nvfuser", "nvprims_nvfuser", "cudagraphs", "ofi", "fx2trt",
        "onnxrt", "tensorrt", "aot_torchxla_trace_once", "torchxla_trace_once", "tvm", "hpu_backend", "neuron",
    ),
    (),
)  # fmt: skip
"""The members of Accelerate's ``DynamoBackend``."""
_DYNAMO_BACKENDS["no"] = ("false",)
_DYNAMO_MODES = {"default": (), "reduce-overhead": ("reduce_overhead",), "max-autotune": ("max_autotune",)}

_EMPTY: tuple[Any, ...] = (None, "", [], {})
_SHARD_SIZE = "Number of ranks that one copy of the model is sharded over, or auto."
_REPLICATE_SIZE = "Number of sharded copies of the model, or auto."

_FP32_MODULES = (
    "Regular expression on the full names of modules that compute in fp32 in mixed precision, such as norms, routers "
    "or embeddings. Needs FSDP2 and torch 2.15."
)
_FSDP_ROWS = (
    SettingRow(name="fsdp.version", kind="choice", spellings=("version",), choices={"1": ("fsdp1",), "2": ("fsdp2",)},
        about="FSDP version: 1 is FullyShardedDataParallel, 2 is fully_shard."),
    SettingRow(name="sharding.strategy", kind="choice", choices=STRATEGY_CHOICES, prefixes=STRATEGY_PREFIXES,
        spellings=("sharding_strategy", "strategy"),
        about="What is sharded between forward and backward. "
              + "; ".join(row.about for row in STRATEGIES.values()) + "."),
    SettingRow(name="sharding.reshard", kind="reshard", internal=True, prefixes=STRATEGY_PREFIXES,
        spellings=("reshard_after_forward",),
        about="Whether gathered parameters are freed after forward: true is "
              + " and false is ".join(strategy_of(sharded=True, hybrid=False, reshard=flag).name
                                      for flag in (True, False)) + "; or a strategy."),
    SettingRow(name="mesh.shard", kind="size", minimum=1, spellings=("size", "dp_shard_size"), about=_SHARD_SIZE),
    SettingRow(name="mesh.replicate", kind="size", minimum=1, spellings=("dp_replicate_size",), about=_REPLICATE_SIZE),
    SettingRow(name="wrap.policy", kind="choice", spellings=("auto_wrap_policy", "wrap_policy"),
        choices={"transformer": ("transformer_based_wrap", "transformer_based", "transformer_auto_wrap_policy"),
                 "size": ("size_based_wrap", "sized_based_wrap", "size_based", "size_based_auto_wrap_policy"),
                 "none": ("no_wrap", "false")},
        about="How the model is divided into units: by layer class, by module size, or the root module alone. If not "
              "set, min_num_params selects size, and layer classes select transformer."),
    SettingRow(name="wrap.classes", kind="names",
        spellings=("transformer_layer_cls_to_wrap", "transformer_cls_names_to_wrap", "transformer_cls_to_wrap",
                   "transformer_layer_cls_names_to_wrap", "transformer_layer_cls"),
        about="Class names of the layers that become units; by default the model's own _no_split_modules."),
    SettingRow(name="wrap.min_num_params", kind="count", minimum=0, spellings=("min_num_params", "min_num_param"),
        about="Threshold of the size policy, in parameters."),
    SettingRow(name="wrap.ignored_modules", kind="pattern", spellings=("ignored_modules",),
        about="Regular expression on the full names of modules that are not sharded."),
    SettingRow(name="offload.params", kind="bool", spellings=("offload_params", "cpu_offload", "offload"),
        about="Offload parameters, gradients and optimizer state to CPU memory."),
    SettingRow(name="offload.pin_memory", kind="bool",
        spellings=("pin_memory", "cpu_offload_pin_memory", "offload_pin_memory"),
        about="Use pinned memory for offloaded parameters."),
    SettingRow(name="precision.policy", kind="section", internal=True, opens="precision",
        spellings=("mixed_precision_policy", "mixed_precision"),
        about="Section with one dtype per key, or one dtype for param."),
    *(SettingRow(name=f"precision.{field}", kind="choice", scope="precision", choices=DTYPES, prefixes=("torch",),
                 spellings=(f"{field}_dtype", field), about=f"Dtype of {what}.")
      for field, what in (("param", "gathered parameters and of the computation"), ("reduce", "the gradient reduction"),
                          ("output", "a unit's outputs"), ("buffer", "buffers"))),
    SettingRow(name="precision.fp32_modules", kind="pattern", spellings=("fp32_modules",), about=_FP32_MODULES),
    SettingRow(name="precision.fp32_modules", kind="pattern", scope="precision", spellings=("fp32_modules",),
        about=_FP32_MODULES),
    SettingRow(name="prefetch.backward", kind="choice", prefixes=("BackwardPrefetch",),
        spellings=("backward_prefetch", "backward_prefetch_policy"),
        choices={"pre": ("1", "backward_pre"), "post": ("2", "backward_post"),
                 "none": ("no_prefetch", "no", "false")},
        about="When the next unit is all-gathered in backward: before (pre) or after (post) the gradients of the "
              "current unit, or without prefetch (none)."),
    SettingRow(name="prefetch.forward", kind="bool", spellings=("forward_prefetch",),
        about="All-gather the next unit during the forward of the current one."),
    SettingRow(name="prefetch.limit_all_gathers", kind="bool", spellings=("limit_all_gathers",),
        about="Limit the number of all-gathers in flight, to save memory."),
    SettingRow(name="checkpoint.state_dict", kind="choice", prefixes=("StateDictType",),
        spellings=("state_dict_type", "state_dict"),
        choices={"full": ("1", "full_state_dict"), "local": ("2", "local_state_dict"),
                 "sharded": ("3", "sharded_state_dict")},
        about="Content of checkpoints: one full state dict, or DCP shards; local writes the files of sharded."),
    SettingRow(name="checkpoint.asynchronous", kind="bool", spellings=("async_save",),
        about="Write checkpoints in the background; training pauses only for the copy."),
    SettingRow(name="checkpoint.verify", kind="bool", spellings=("verify_checkpoint",),
        about="Compare all bytes that a resume reads with the hashes of the checkpoint's manifest."),
    SettingRow(name="activation.checkpointing", kind="choice", spellings=("activation_checkpointing",),
        choices={"none": ("false", "no", "off", "0"), "full": ("true", "yes", "on", "1"), "selective": ()},
        about="Recompute activations in backward instead of storing them."),
    SettingRow(name="activation.trainer", kind="bool", internal=True, scope="training",
        spellings=("gradient_checkpointing", "activation_checkpointing"),
        about="Gradient checkpointing of Transformers."),
    SettingRow(name="activation.offload", kind="bool",
        spellings=("activation_checkpointing_offload", "activation_cpu_offload", "activation_offload"),
        about="Offload checkpointed activations to CPU memory."),
    SettingRow(name="loading.ram_efficient", kind="bool", spellings=("cpu_ram_efficient_loading",),
        about="RAM-efficient loading: the ranks of a machine share the memory of the weights that they load."),
    SettingRow(name="loading.sync_module_states", kind="bool", spellings=("sync_module_states",),
        about="Broadcast the weights of rank 0 before sharding, except those that all ranks map from the same files."),
    SettingRow(name="params.use_orig", kind="bool", spellings=("use_orig_params",),
        about="Keep the original parameters instead of flat ones."),
    SettingRow(name="xla.enabled", kind="bool", spellings=("xla",), about="FSDP of PyTorch/XLA."),
    SettingRow(name="xla.v2", kind="bool", spellings=("xla_fsdp_v2",), about="FSDP of PyTorch/XLA with SPMD."),
    SettingRow(name="xla.grad_ckpt", kind="bool", spellings=("xla_fsdp_grad_ckpt",),
        about="Activation checkpointing with PyTorch/XLA."),
    SettingRow(name="xla.settings", kind="mapping", spellings=("xla_fsdp_settings",),
        about="Arguments of PyTorch/XLA's FSDP."),
)  # fmt: skip

_PARALLELISM_ROWS = (
    SettingRow(name="mesh.shard", kind="size", scope="parallelism", minimum=1, spellings=("dp_shard_size",),
        about=_SHARD_SIZE),
    SettingRow(name="mesh.replicate", kind="size", scope="parallelism", minimum=1, spellings=("dp_replicate_size",),
        about=_REPLICATE_SIZE),
    *(SettingRow(name=f"mesh.{axis}", kind="one", scope="parallelism", internal=True,
          spellings=(f"{axis}_size", f"{what.lower()}_parallel_size"),
          about=f"{what} parallel degree; only 1 is supported.")
      for axis, what in (("tp", "Tensor"), ("cp", "Context"), ("sp", "Sequence"), ("pp", "Pipeline"),
                         ("ep", "Expert"))),
    *(SettingRow(name=f"mesh.{key}", kind="any", scope="parallelism", internal=True, spellings=(key,), about="Ignored.",
          ignored=f"has no effect: {key.partition('_')[0]}_size must be 1.", stock=_EMPTY)
      for key in ("cp_backend", "cp_comm_strategy", "cp_handler", "sp_backend", "sp_seq_length",
                  "sp_seq_length_is_variable", "sp_attn_implementation", "sp_handler", "tp_handler")),
)  # fmt: skip


def _launch(key: str, kind: ValueKind, about: str, **options: Any) -> SettingRow:
    """Return the row of a key at the top level of Accelerate's file."""
    return SettingRow(name=f"launch.{key}", kind=kind, scope="launch", spellings=(key,), about=about, **options)


_LAUNCH_ROWS = (
    _launch("compute_environment", "choice", "Environment of the run.",
            choices=dict.fromkeys(("LOCAL_MACHINE", "CUSTOM_CLUSTER", "AMAZON_SAGEMAKER"), ()),
            prefixes=("ComputeEnvironment",)),
    _launch("distributed_type", "choice", "Kind of parallelism. FSDP settings require FSDP.", choices=_DISTRIBUTED,
            prefixes=("DistributedType",)),
    _launch("num_processes", "size", "World size: the number of ranks on all machines.", minimum=1),
    _launch("num_machines", "integer", "Number of machines.", minimum=1),
    _launch("machine_rank", "integer", "Rank of this machine, from 0.", minimum=0),
    _launch("main_process_ip", "address", "IP address or host name of machine 0."),
    _launch("main_process_port", "integer", "Port on machine 0; 0 selects a free port.", minimum=0,
            maximum=65535),
    _launch("mixed_precision", "mode",
            "Mixed precision mode. It sets precision.param; gradients are still reduced in fp32. fp8 is refused: it is "
            "implemented inside the model.", choices=MODES,
            prefixes=MODE_PREFIXES),
    _launch("use_cpu", "bool", "Run on CPU ranks."),
    _launch("debug", "bool", "Enable the collective checks of Accelerate."),
    _launch("downcast_bf16", "bool", "Use bf16 on TPUs."),
    _launch("rdzv_backend", "choice", "Rendezvous of several machines; with c10d they may join in any order.",
            choices={"static": (), "c10d": ()}),
    _launch("same_network", "bool", "Whether all machines are in one network. They meet at main_process_ip anyway."),
    _launch("gpu_ids", "devices", "Devices of this machine."),
    _launch("main_training_function", "identifier", "Function to call on TPUs.",
            ignored="has no effect: only the launcher for TPUs calls a function of the script.", stock=("main",)),
    _launch("enable_cpu_affinity", "bool", "Pin each rank to the CPU cores of its NUMA node."),
    _launch("dynamo_config", "section", "Settings of torch.compile.", opens="dynamo"),
    SettingRow(name="launch.dynamo_config.backend", kind="choice", scope="dynamo", internal=True,
        spellings=("backend",), choices=_DYNAMO_BACKENDS, prefixes=("DynamoBackend",),
        about="Backend of torch.compile."),
    SettingRow(name="launch.dynamo_config.mode", kind="choice", scope="dynamo", internal=True, spellings=("mode",),
        choices=_DYNAMO_MODES, about="Mode of torch.compile."),
    *(SettingRow(name=f"launch.dynamo_config.{key}", kind="bool", scope="dynamo", internal=True, spellings=(key,),
          about=f"Option {key} of torch.compile.")
      for key in ("use_fullgraph", "use_dynamic", "use_regional_compilation")),
    _launch("fp16", "flag", "Same as mixed_precision: fp16.", internal=True),
    _launch("fsdp_config", "section", "Section with the FSDP settings.", opens="fsdp", internal=True),
    _launch("parallelism_config", "section", "Section with the sizes of the device mesh.", opens="parallelism",
            internal=True),
    *(SettingRow(name=f"launch.extra.{key}", kind="any", scope="launch", internal=True, spellings=(key,),
          about="Section of another engine: refused unless it is empty.")
      for key in ("deepspeed_config", "megatron_lm_config", "fp8_config")),
    *(SettingRow(name=f"launch.extra.{key}", kind="any", scope="launch", internal=True, spellings=(key,),
          about="Ignored.", ignored=reason, stock=(*stock, *_EMPTY))
      for reason, stock, keys in (
          ("has no effect: hf-fsdp launch starts the ranks itself, without mpirun.", (), ("mpirun_config",)),
          ("has no effect: it belongs to the launcher for TPUs.", (False,),
           ("tpu_name", "tpu_zone", "tpu_use_cluster", "tpu_use_sudo", "tpu_vm", "tpu_env", "command_file",
            "commands")),
          ("has no effect: FSDP does not run on MPS.", (False,), ("use_mps_device",)),
          ("has no effect: it belongs to the SageMaker launcher.", (),
           ("ec2_instance_type", "iam_role_name", "image_uri", "profile", "region", "base_job_name",
            "pytorch_version", "transformers_version", "py_version", "sagemaker_inputs_file",
            "sagemaker_metrics_file", "additional_args"))) for key in keys),
)  # fmt: skip

_TRAINING_ROWS = (
    SettingRow(name="training.fsdp", kind="options", scope="training", internal=True, spellings=("fsdp",),
        about="Options: a strategy, auto_wrap, offload; or true."),
    SettingRow(name="training.fsdp_config", kind="section", opens="fsdp", scope="training", internal=True,
        spellings=("fsdp_config",), about="Section with the FSDP settings."),
    *(SettingRow(name=f"training.{dtype}", kind="flag", scope="training", internal=True, spellings=(dtype,),
          about=f"Same as mixed_precision: {dtype}.") for dtype in ("bf16", "fp16", "fp8")),
    SettingRow(name="launch.use_cpu", kind="bool", scope="training", spellings=("use_cpu", "no_cuda"),
        about="Run on CPU ranks."),
)  # fmt: skip

_DISTRIBUTED_ROWS = (
    SettingRow(name="mesh.shard", kind="size", scope="distributed", minimum=1, spellings=("fsdp_size",),
        about=_SHARD_SIZE),
    SettingRow(name="mesh.replicate", kind="size", scope="distributed", minimum=1, spellings=("dp_replicate_size",),
        about=_REPLICATE_SIZE),
    SettingRow(name="offload.params", kind="bool", scope="distributed", spellings=("fsdp_cpu_offload",),
        about="Offload parameters, gradients and optimizer state to CPU memory."),
    SettingRow(name="distributed.mixed_precision", kind="bool", scope="distributed", internal=True,
        spellings=("fsdp_mixed_precision",), about="If true: precision.param is bf16 and precision.reduce is fp32."),
    *(SettingRow(name=f"mesh.{axis}", kind="one", scope="distributed", internal=True, spellings=(f"{axis}_size",),
          about=f"{what} parallel degree; only 1 is supported.")
      for axis, what in (("tp", "Tensor"), ("pp", "Pipeline"), ("ep", "Expert"))),
    *(SettingRow(name=f"distributed.{key}", kind="any", scope="distributed", internal=True, spellings=(key,),
          about="Not a setting: reported with the reason if it is set.")
      for key in ("tp_plan", "ep_plan", "ep_implementation", "enable_expert_parallel", "enable_sequence_parallel",
                  "fsdp_plan")),
)  # fmt: skip

ROWS: tuple[SettingRow, ...] = (*_FSDP_ROWS, *_PARALLELISM_ROWS, *_LAUNCH_ROWS, *_TRAINING_ROWS, *_DISTRIBUTED_ROWS)

TRAINING_FILE_MARKS = frozenset(
    {
        "base_model", "model_name_or_path", "output_dir", "learning_rate", "datasets", "dataset", "num_train_epochs",
        "num_epochs",
    }
)  # fmt: skip
"""Keys that distinguish the config of a training script (axolotl, LLaMA-Factory, TRL) from Accelerate's file."""


class UnsupportedKey(NamedTuple):
    """A known key or value that is not supported: the reason, the remedy and the code of the problem."""

    why: str
    fix: str
    code: str = "FSDP-E025"


_NO_OBJECTS = "takes Python objects, which a config cannot contain."
_STATE_DICTS = "Set fsdp_state_dict_type to full, sharded or local."

_LAUNCHER_FLAGS = {
    **{
        flag: f"Pass hf-fsdp launch --{flag}"
        for flag in ("log_dir", "tee", "role", "rdzv_conf", "num_cpu_threads_per_process", "max_restarts")
    },
    "monitor_interval": "hf-fsdp launch does not need it",
    "tpu_cluster": "hf-fsdp launch does not support it",
    "mpirun_hostfile": "hf-fsdp launch starts the ranks itself",
}
"""Flag of a launcher that stock Accelerate rejects in a config -> what to do."""

UNSUPPORTED_KEYS: Mapping[tuple[Scope, str], UnsupportedKey] = MappingProxyType(
    {
        ("fsdp", "final_state_dict_type"): UnsupportedKey(
            code="FSDP-W026",
            why="is a setting of axolotl, not of FSDP, and has no effect.",
            fix="Use fsdp_state_dict_type for the checkpoints of a run.",
        ),
        ("precision", "cast_forward_inputs"): UnsupportedKey(
            code="FSDP-W026", why="has no effect: the activations of a unit are always cast.", fix="Remove it."
        ),
        **{
            ("launch", flag): UnsupportedKey(
                code="FSDP-E052", why="is a flag of the launcher, not a key of the config.", fix=f"Remove it. {fix}."
            )
            for flag, fix in _LAUNCHER_FLAGS.items()
        },
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

_NOT_NATIVE = (
    "Set fsdp_activation_checkpointing: true and fsdp_activation_checkpointing_offload: true instead of "
    "gradient_checkpointing."
)
UNSUPPORTED_VALUES: Mapping[tuple[str, str], UnsupportedKey] = MappingProxyType(
    {
        ("activation.trainer", value): UnsupportedKey(
            code="FSDP-E053",
            why="is a value of another library. FSDP offloads the activations that it checkpoints itself.",
            fix=_NOT_NATIVE,
        )
        for value in ("offload", "offload_disk", "unsloth")
    }
)
"""Setting and value -> why the value is not supported."""


def plain_key(key: str, scope: Scope) -> str:
    """Normalize a key: lower case, ``_`` for ``-`` and spaces, without the prefix of the scope."""
    plain = lower(key).replace("-", "_").replace(" ", "_")
    return plain.removeprefix(PREFIXES[scope])


BY_NAME: Mapping[str, SettingRow] = MappingProxyType({row.name: row for row in reversed(ROWS)})
BY_KEY: Mapping[tuple[Scope, str], SettingRow] = MappingProxyType(
    {(row.scope, spelling): row for row in ROWS for spelling in row.spellings}
)


_DERIVED = {
    "sharding.reshard": "sharding.strategy",
    "wrap.auto": "wrap.policy",
    "precision.off.bf16": "launch.mixed_precision",
    "precision.off.fp16": "launch.mixed_precision",
    "activation.trainer": "activation.checkpointing",
}


def canonical_setting(name: str) -> str | None:
    """Return the setting of ``FsdpSpec`` for an internal name, for messages; ``None`` if there is none."""
    name = _DERIVED.get(name, name)
    for gathered in ("launch.extra", "launch.dynamo_config"):
        if name.startswith(f"{gathered}."):
            return gathered
    row = BY_NAME.get(name)
    return None if row is None or row.internal else name


def find_row(key: str, scopes: Iterable[Scope]) -> SettingRow | None:
    """Return the row of a key in the first scope that has it, or of a canonical name; ``None`` if there is none."""
    for scope in scopes:
        if row := BY_KEY.get((scope, plain_key(key, scope))):
            return row
    row = BY_NAME.get(lower(key))
    return row if row is not None and not row.internal else None


def similar_key(key: str, scopes: Iterable[Scope]) -> str:
    """Return the known key most similar to a misspelled one, with its prefix; empty if none is similar."""
    known: dict[str, str] = {}
    for row in (row for scope in scopes for row in ROWS if row.scope == scope):
        for spelling in row.spellings:
            known.setdefault(spelling, PREFIXES[row.scope] + spelling)
            known.setdefault(PREFIXES[row.scope] + spelling, PREFIXES[row.scope] + spelling)
    return known.get(nearest_word(key.strip().lower().replace("-", "_"), known, cutoff=0.7), "")
