"""The text of a config for Accelerate: the lines that set FSDP's settings, in a new file or in an existing one."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import yaml

from hf_fsdp_plugin.cli.yaml_edit import Key, change_keys, in_block_style, keys_of, line_of
from hf_fsdp_plugin.spec.fsdp_spec import FsdpSpec
from hf_fsdp_plugin.strategies import STRATEGIES
from hf_fsdp_plugin.vocabulary import BY_NAME, PREFIXES, Scope, find_row, plain_key

STOCK_VALUES: Final[Mapping[str, Mapping[Any, Any]]] = {
    "wrap.policy": {"transformer": "TRANSFORMER_BASED_WRAP", "size": "SIZE_BASED_WRAP", "none": "NO_WRAP"},
    "prefetch.backward": {"pre": "BACKWARD_PRE", "post": "BACKWARD_POST", "none": "NO_PREFETCH"},
    "checkpoint.state_dict": {
        "sharded": "SHARDED_STATE_DICT", "full": "FULL_STATE_DICT", "local": "LOCAL_STATE_DICT",
    },
    "activation.checkpointing": {"none": False, "full": True},
}  # fmt: skip
"""Setting -> canonical value -> the value that stock Accelerate accepts."""
SYNC_EACH_BATCH: Final = {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
"""``accelerator_config`` of TrainingArguments that reduces gradients after every micro-batch."""
_SECTIONS: Final[Mapping[str, str]] = {"fsdp": "fsdp_config", "parallelism": "parallelism_config"}
"""Scope of a key -> its section in the file."""
_SCOPES: Final[Mapping[str, tuple[Scope, ...]]] = {
    "": ("launch", "training", "fsdp", "parallelism"),
    "fsdp_config": ("fsdp", "precision", "parallelism"),
    "parallelism_config": ("parallelism",),
}
"""Section -> the scopes whose keys it may contain."""
_SAME: Final[Mapping[str, Collection[str]]] = {
    "sharding.strategy": ("sharding.strategy", "sharding.reshard"),
    "launch.mixed_precision": ("launch.mixed_precision", "launch.fp16", "training.bf16", "training.fp16"),
    "activation.checkpointing": ("activation.checkpointing", "activation.trainer"),
}
"""Setting -> names of the rows whose keys set it."""
_OTHER_ENGINES: Final = ("deepspeed_config", "megatron_lm_config", "fp8_config")
"""Sections that FSDP refuses unless they are empty."""
_STOCK_LIMITS: Final = (
    ((1, 2), "launch.use_cpu", (True,), "does not shard on CPU ranks"),
    ((2,), "sharding.strategy", ("no_shard",), "ignores NO_SHARD under FSDP2 and runs full_shard"),
    ((2,), "checkpoint.state_dict", ("local",), "refuses LOCAL_STATE_DICT under FSDP2"),
    ((2,), "prefetch.backward", ("post", "none"), "ignores fsdp_backward_prefetch under FSDP2"),
    ((2,), "prefetch.forward", (True,), "ignores fsdp_forward_prefetch under FSDP2"),
    ((1, 2), "activation.checkpointing", ("selective",), "refuses selective activation checkpointing"),
    ((1,), "activation.offload", (True,), "refuses to offload activations under FSDP1"),
    ((1, 2), "checkpoint.asynchronous", (True,), f"ignores {BY_NAME['checkpoint.asynchronous'].key}"),
    ((1, 2), "offload.pin_memory", (False,), f"ignores {BY_NAME['offload.pin_memory'].key}"),
)
"""FSDP versions, setting, its values, and what stock ``accelerate launch`` does with them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SettingLine:
    """One line of the file.

    Attributes:
        name: canonical name of the setting.
        section: ``fsdp_config`` or ``parallelism_config``; empty at the top level.
        value: what is written: text, a number or a bool.
        means: the value of the setting.
        comment: why; without ``#``.
    """

    name: str
    section: str
    key: str
    value: Any
    means: Any
    comment: str = ""

    @property
    def text(self) -> str:
        return line_of(self.key, self.value, self.comment)


def setting_lines(settings: Mapping[str, Any], version: int, comments: Mapping[str, str]) -> list[SettingLine]:
    """Return the lines that set the settings for stock Accelerate. A setting whose value is "" has no line.

    Args:
        settings: canonical name -> value.
        version: the FSDP version, which determines the key of the strategy.
        comments: canonical name -> why the setting has its value.
    """
    lines = []
    for name, value in settings.items():
        row = BY_NAME[name]
        section, key = _SECTIONS.get(row.scope, ""), row.key
        written = STOCK_VALUES[name].get(value, value) if name in STOCK_VALUES else value
        if name == "sharding.strategy":
            key, written = strategy_key(value, version)
        elif name.startswith("mesh."):
            section, key = "parallelism_config", f"{PREFIXES['parallelism']}dp_{name.partition('.')[2]}_size"
        elif isinstance(written, tuple):
            written = ",".join(written)
        if written != "":
            comment = comments.get(name, "")
            lines.append(SettingLine(name=name, section=section, key=key, value=written, means=value, comment=comment))
    return lines


def strategy_key(name: str, version: int) -> tuple[str, Any]:
    """Return the key that stock Accelerate reads under this FSDP version, and its value."""
    row = STRATEGIES[name]
    if version == 2 and row.is_sharded and not (row.hybrid and row.reshards_after_forward):
        return "fsdp_reshard_after_forward", row.reshards_after_forward
    return "fsdp_sharding_strategy", name.upper()


def stock_limits(settings: Mapping[str, Any], version: int, *, gpus: int = 0) -> Iterator[str]:
    """Yield the limits of stock ``accelerate launch`` with these settings, one sentence each.

    Args:
        gpus: the size of the shard axis with which FSDP1 needs no mesh.
    """
    for versions, name, values, text in _STOCK_LIMITS:
        if version in versions and settings.get(name) in values:
            yield f"Stock Accelerate {text}."
    if version == 1 and settings.get("mesh.shard", gpus) != gpus:
        yield "Stock Accelerate refuses parallelism_config under FSDP1."


def script_arguments(micro_batch: int, accumulation: int, sync_each_batch: bool) -> list[str]:
    """Return the arguments of a script with TrainingArguments that the file does not contain."""
    sync = f"--accelerator_config '{json.dumps(SYNC_EACH_BATCH)}'"
    sizes = [f"--per_device_train_batch_size {micro_batch}", f"--gradient_accumulation_steps {accumulation}"]
    return [*sizes, sync] if sync_each_batch else sizes


def new_text(lines: Sequence[SettingLine], header: Iterable[str] = (), *, is_json: bool = False) -> str:
    """Return the text of a new file.

    Args:
        header: the comment at its beginning.
    """
    texts = list(header)
    for section in dict.fromkeys(line.section for line in lines):
        own = [line.text for line in lines if line.section == section]
        texts += [f"{section}:", *(f"  {text}" for text in own)] if section else own
    text = "\n".join(texts) + "\n"
    return _as_json(text) if is_json else text


def changed_text(
    text: str, lines: Sequence[SettingLine], unused: Collection[str], present: FsdpSpec, *, is_json: bool = False
) -> str:
    """Return the text of an existing file in which only settings with another value are changed.

    Args:
        lines: the settings that the file shall have.
        unused: canonical names whose keys are removed.
        present: the settings that the file has.
    """
    new = [line for line in lines if not (present.asked(line.name) and present.get(line.name) == line.means)]
    is_json |= _is_json(text)
    if is_json or text.lstrip().startswith("{"):  # in flow style, which has no comments
        tree = yaml.safe_load(text.replace("\t", " "))
        if not tree:
            return new_text(new, is_json=is_json)
        text = yaml.safe_dump(tree, sort_keys=False, allow_unicode=True, width=1 << 20)
    if any(_changes(text, new, unused)):
        newline = "\r\n" if "\r\n" in text else "\n"
        text = in_block_style(text, _SECTIONS.values())
        text = change_keys(text, *_changes(text, new, unused)).replace("\n", newline)
    return _as_json(text) if is_json else text


def _changes(
    text: str, new: Sequence[SettingLine], unused: Collection[str]
) -> tuple[dict[Key, list[str]], dict[str, list[str]]]:
    """Return the other lines of keys, and the lines that are added to each section (see :func:`change_keys`)."""
    keys = keys_of(text)
    known = {key: find_row(key.name, _SCOPES[key.section]) for key in keys if key.section in _SCOPES}
    rows = {key: row for key, row in known.items() if row is not None}
    replaced: dict[Key, list[str]] = {}
    added: dict[str, list[str]] = {}
    for key in keys:
        if not key.section and plain_key(key.name, "launch") in _OTHER_ENGINES and getattr(key.value, "value", None):
            lines = text.splitlines()[key.start : key.stop]
            replaced[key] = ["# Not used with distributed_type: FSDP:", *(f"# {line}" for line in lines)]
    set_by = {
        name: [key for key, row in rows.items() if row.name in _SAME.get(name, (name,))]
        for name in (*unused, *(line.name for line in new))
    }
    replaced |= {key: [] for found in set_by.values() for key in found}
    for line in new:
        old = next((key for key in set_by[line.name] if key.section == line.section), None)
        if old is None:
            added.setdefault(line.section, []).append(line.text)
        else:
            spelling = old.name if rows[old] == find_row(line.key, _SCOPES[line.section]) else line.key
            replaced[old] = [old.indent + line_of(spelling, line.value, line.comment)]
    return replaced, added


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _as_json(text: str) -> str:
    return json.dumps(yaml.safe_load(text), indent=2, ensure_ascii=False) + "\n"
