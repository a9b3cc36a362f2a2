"""The table of settings in ``vocabulary.yaml``: names, values and accepted keys.

To support another key or value, add it to a row there. Keys are compared in lower case, with ``-`` replaced by ``_``
and without the prefix of their scope: ``fsdp_offload_params``, ``OFFLOAD_PARAMS`` and ``--fsdp-offload-params`` are the
same key. ``spellings.py`` defines how values are compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import yaml

from hf_fsdp_plugin.spellings import lower, nearest_word
from hf_fsdp_plugin.strategies import STRATEGIES

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
        ignored: why the key has no effect. A value that is neither empty nor in `stock` is reported.
        stock: the values that Accelerate's own questionnaire writes for an ignored key, as lower-case text.
        internal: whether the setting has no field in ``FsdpSpec``. Other settings are derived from it.
    """

    name: str
    kind: ValueKind
    about: str
    scope: Scope
    spellings: tuple[str, ...]
    choices: Mapping[str, tuple[str, ...]]
    prefixes: tuple[str, ...] = ()
    minimum: int | None = None
    maximum: int | None = None
    opens: Scope | None = None
    internal: bool = False
    ignored: str = ""
    stock: tuple[str, ...] = ()

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


def _read_rows() -> Iterator[SettingRow]:
    """Yield the rows of ``vocabulary.yaml``."""
    text = Path(__file__).with_name("vocabulary.yaml").read_text(encoding="utf-8")
    text = text.replace("{strategies}", "; ".join(row.about for row in STRATEGIES.values()))
    # All values are read as text: otherwise "no" and "off" would be bools.
    table: Any = yaml.load(text, Loader=getattr(yaml, "CBaseLoader", yaml.BaseLoader))
    for scope, rows in table.items():
        for pattern, fields in rows.items():
            for word in fields.get("each", "-").split():
                yield _row_of(
                    scope, pattern.replace("{}", word), {**fields, "about": fields["about"].replace("{}", word)}
                )


def _row_of(scope: Scope, name: str, fields: Mapping[str, Any]) -> SettingRow:
    choices: Any = fields.get("choices", {})
    if choices == "strategies":
        choices = STRATEGY_CHOICES
    else:
        choices = MappingProxyType({value: tuple(others.split()) for value, others in choices.items()})
    return SettingRow(
        name=name,
        kind=fields["kind"],
        about=fields["about"],
        scope=scope,
        spellings=tuple(fields.get("keys", name.rpartition(".")[2]).split()),
        choices=choices,
        prefixes=tuple(fields.get("prefixes", "").split()),
        minimum=int(fields["minimum"]) if "minimum" in fields else None,
        maximum=int(fields["maximum"]) if "maximum" in fields else None,
        opens=fields.get("opens"),
        internal="internal" in fields,
        ignored=fields.get("ignored", ""),
        stock=tuple(fields.get("stock", "").split()),
    )


ROWS: tuple[SettingRow, ...] = tuple(_read_rows())
BY_NAME: Mapping[str, SettingRow] = MappingProxyType({row.name: row for row in reversed(ROWS)})
BY_KEY: Mapping[tuple[Scope, str], SettingRow] = MappingProxyType(
    {(row.scope, spelling): row for row in ROWS for spelling in row.spellings}
)
TRAINING_FILE_MARKS = frozenset(
    {
        "base_model", "model_name_or_path", "output_dir", "learning_rate", "datasets", "dataset", "num_train_epochs",
        "num_epochs",
    }
)  # fmt: skip
"""Keys that distinguish the config of a training script (axolotl, LLaMA-Factory, TRL) from Accelerate's file."""


class UnsupportedKey(NamedTuple):
    """A known key or value that is not supported: the code of the problem, the reason and the remedy."""

    code: str
    why: str
    fix: str


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
UNSUPPORTED_KEYS: Mapping[tuple[str, str], UnsupportedKey] = MappingProxyType(
    {
        (scope, key): UnsupportedKey(code, why, fix)
        for scope, key, code, why, fix in (
            ("fsdp", "final_state_dict_type", "FSDP-W026", "is a setting of axolotl, not of FSDP, and has no effect.",
             "Use fsdp_state_dict_type for the checkpoints of a run."),
            ("precision", "cast_forward_inputs", "FSDP-W026",
             "has no effect: the activations of a unit are always cast.", "Remove it."),
            ("fsdp", "state_dict_config", "FSDP-E025", _NO_OBJECTS, _STATE_DICTS),
            ("fsdp", "optim_state_dict_config", "FSDP-E025", _NO_OBJECTS, _STATE_DICTS),
            ("fsdp", "param_init_fn", "FSDP-E025", _NO_OBJECTS,
             "Remove it: the plugin initializes modules on the meta device."),
            ("fsdp", "ignored_params", "FSDP-E025", _NO_OBJECTS,
             "Select modules with fsdp_ignored_modules, a regular expression on their names."),
            *(("launch", flag, "FSDP-E052", "is a flag of the launcher, not a key of the config.", f"Remove it. {fix}.")
              for flag, fix in _LAUNCHER_FLAGS.items()),
        )
    }
)  # fmt: skip
"""Scope and key -> why the key is not supported."""
_OFFLOADS = UnsupportedKey(
    "FSDP-E053",
    "is a value of another library. FSDP offloads the activations that it checkpoints itself.",
    "Set fsdp_activation_checkpointing: true and fsdp_activation_checkpointing_offload: true instead of "
    "gradient_checkpointing.",
)
UNSUPPORTED_VALUES: Mapping[tuple[str, str], UnsupportedKey] = MappingProxyType(
    {("activation.trainer", value): _OFFLOADS for value in ("offload", "offload_disk", "unsloth")}
)
"""Setting and value -> why the value is not supported."""


def plain_key(key: str, scope: Scope) -> str:
    """Normalize a key: lower case, ``_`` for ``-`` and spaces, without the prefix of the scope."""
    plain = lower(key).replace("-", "_").replace(" ", "_")
    return plain.removeprefix(PREFIXES[scope])


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
