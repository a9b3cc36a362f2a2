"""Builds cases: sources with generated keys and values, and what the document states about each of them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from tests.unit.generated import making
from tests.unit.generated.making import pick
from tests.unit.generated.oracle import BLANKS, NOT_SET, REFUSED, Oracle, Verdict, yaml_value
from tests.unit.generated.settings_document import Documented

FSDP_SECTIONS = ("fsdp", "precision", "parallelism")
COMPANIONS: Mapping[str, Mapping[str, Any]] = {
    "wrap.policy": {"wrap.min_num_params": 1000},
    "activation.offload": {"activation.checkpointing": True},
    "launch.machine_rank": {"launch.num_machines": 2**63 - 1},
}
"""Setting -> other settings without which some of its values conflict with defaults."""
RULES: Mapping[str, frozenset[str]] = {
    "launch.distributed_type": frozenset({"FSDP-E120", "FSDP-E123", "FSDP-E126"}),
    "launch.machine_rank": frozenset({"FSDP-E131"}),
    **dict.fromkeys(("mesh.context", "mesh.tensor", "mesh.expert"), frozenset({"FSDP-E137", "FSDP-E138"})),
    "xla.enabled": frozenset({"FSDP-E126"}),
    "xla.v2": frozenset({"FSDP-E126"}),
    "launch.extra.deepspeed_config": frozenset({"FSDP-E120"}),
    "launch.extra.megatron_lm_config": frozenset({"FSDP-E120"}),
    "launch.mixed_precision": frozenset({"FSDP-E166"}),  # the library of fp8 may not be installed
    "training.fp8": frozenset({"FSDP-E166"}),
}
"""Setting -> errors of rules between settings, which an accepted value may cause."""
INDEPENDENT = (
    "fsdp.version", "sharding.strategy", "offload.params", "offload.pin_memory", "prefetch.backward",
    "prefetch.forward", "prefetch.limit_all_gathers", "checkpoint.state_dict", "checkpoint.asynchronous",
    "activation.checkpointing", "loading.ram_efficient", "params.use_orig", "precision.param", "precision.reduce",
    "precision.output", "precision.buffer", "launch.num_machines", "launch.debug", "launch.downcast_bf16",
    "launch.enable_cpu_affinity", "launch.dynamo_config.use_dynamic", "launch.dynamo_config.use_fullgraph",
    "wrap.min_num_params", "launch.gpu_ids", "launch.main_process_ip",
)  # fmt: skip
"""Settings that conflict with no other of them, whatever their values are."""


@dataclass(frozen=True)
class Expected:
    """What the document states about one key of a case.

    Attributes:
        setting: ``None`` for a key that is not documented at its place.
        key: the key as written, which is the spelling of the origin.
        line: the line of the key in a file.
    """

    setting: Documented | None
    key: str
    verdict: Verdict
    line: int | None = None


@dataclass
class Case:
    """Sources and expectations.

    Attributes:
        kind: group of the case, for the table of the long run.
        sources: arguments of ``Sources``; ``file`` is the text or the bytes of a config file.
        codes: codes of errors that may occur in addition.
        whole: the code of the only problem, if the source is refused as a whole.
        overridden: the key of a weaker source whose value must be reported.
    """

    kind: str
    sources: dict[str, Any]
    expected: list[Expected] = field(default_factory=list)
    codes: frozenset[str] = frozenset()
    whole: frozenset[str] = frozenset()
    overridden: str = ""
    unchecked: bool = False


class Builder:
    """Builds cases with one random generator."""

    def __init__(self, random: Random, oracle: Oracle) -> None:
        self.random, self.oracle = random, oracle
        self.settings = oracle.document.settings
        self._in_sections: dict[tuple[str, ...], list[Documented]] = {}
        self.named = {setting.name: setting for setting in reversed(self.settings)}

    def case(self, kind: str) -> Case:
        return BUILDERS[kind](self)

    def setting(self, *sections: str) -> Documented:
        if sections not in self._in_sections:
            found = [setting for setting in self.settings if setting.section in sections and setting.kind != "options"]
            self._in_sections[sections] = found
        return pick(self.random, self._in_sections[sections])

    def value(self, setting: Documented) -> Any:
        value = making.value(self.random, setting, self.settings)
        return {} if setting.kind == "section" and isinstance(value, Mapping) else value

    def key(self, key: str, sections: Sequence[str]) -> Documented | None:
        """The setting that a key means if the keys of these sections are valid at its place."""
        return next((found for section in sections if (found := self.oracle.key(key, section)) is not None), None)

    def accepted(self, setting: Documented) -> tuple[Any, Verdict]:
        """A value that is accepted as text too, so that every source may have it."""
        while True:
            raw = making.valid(self.random, setting)
            verdict = self.oracle.decide(setting, as_text(raw), "environment")
            if verdict.answer == "accepted" and verdict == self.oracle.decide(setting, raw):
                return raw, verdict

    def single(self, kind: str, source: str, setting: Documented, key: str, raw: Any, sources: dict[str, Any]) -> Case:
        verdict = self.oracle.decide(setting, raw, source)
        return Case(kind, sources, [Expected(setting, key, verdict)], RULES.get(setting.name, frozenset()))


def value_in_config(self: Builder) -> Case:
    setting = self.setting("fsdp", "precision", "parallelism", "dynamo", "fp8", "launch")
    key, raw = making.written_key(self.random, setting), self.value(setting)
    case = self.single("value in a dict", "config", setting, key, raw, {"config": config_of(setting, key, raw)})
    if too_deep(raw):
        case.whole = frozenset({"FSDP-E055"})
    return case


def config_of(setting: Documented, key: str, raw: Any) -> dict[str, Any]:
    """A config with one key, and with the companions of its setting."""
    config: dict[str, Any] = {} if setting.name == "launch.distributed_type" else {"distributed_type": "FSDP"}
    others = COMPANIONS.get(setting.name, {})
    if setting.section == "launch":
        return config | {key: raw, **{name.partition(".")[2]: value for name, value in others.items()}}
    if setting.section == "fsdp":
        return config | {"fsdp_config": {key: raw, **others}}
    if setting.section == "precision":
        return config | {"fsdp_config": {"fsdp_mixed_precision_policy": {key: raw}}}
    return config | {f"{setting.section}_config": {key: raw}}


def value_in_file(self: Builder) -> Case:
    setting = self.setting("fsdp", "precision", "parallelism", "dynamo", "fp8", "launch")
    key, raw = making.written_key(self.random, setting), self.value(setting)
    is_json = self.random.random() < 0.3
    text, raw = scalar(self.random, raw, is_json=is_json)
    config = config_of(setting, key, Raw(text))
    file = json_text(config) if is_json else yaml_text(self.random, config)[0]
    kind = "value in a JSON file" if is_json else "value in a YAML file"
    return self.single(kind, "config", setting, key, raw, {"file": file, "suffix": "json" if is_json else "yaml"})


def value_of_set(self: Builder) -> Case:
    setting = pick(
        self.random, [s for s in self.settings if s.section not in ("distributed", "training") and s.kind != "section"]
    )
    setting = self.oracle.name(setting.name) or setting
    name = pick(self.random, (setting.name, setting.name.upper(), setting.name))
    raw = as_text(self.value(setting))
    given = self.random.randrange(3)
    sources: dict[str, Any] = {"overrides": [f"{name}={raw}"]}
    if given == 1:
        sources = {"overrides": {name: raw}}
    elif given == 2:
        sources = {"command_line": ["--set", f"{name}={raw}"]}
    sources["config"] = companions(setting)
    return self.single("value of --set", "--set", setting, name, raw, sources)


def value_of_flag(self: Builder) -> Case:
    sections = ("fsdp", "parallelism", "dynamo", "fp8", "launch")
    kinds = ("section", "options")
    setting = pick(self.random, [s for s in self.settings if s.section in sections and s.kind not in kinds])
    if setting.kind in ("bool", "any") and setting.section in (
        "launch",
        "dynamo",
        "fp8",
    ):  # switches, and flags of launchers
        setting = self.named["launch.num_processes"]
    key = "--" + making.written_key(self.random, setting, prefixed=True).lower()
    raw = as_text(self.value(setting))
    if not raw or raw.startswith("-") or setting.kind == "bool" or self.random.random() < 0.5:
        line = [f"{key}={raw}"]
    else:
        line = [key, raw]
    sources = {"command_line": [*line, "train.py"], "config": companions(setting)}
    return self.single("value of a flag", "command line", setting, key, raw, sources)


def value_of_variable(self: Builder) -> Case:
    setting = self.setting("fsdp", "parallelism", "fp8")
    while setting.kind in ("section", "mapping"):
        setting = self.setting("fsdp", "parallelism", "fp8")
    key = ("accelerate_" * (setting.section == "fp8") + setting.prefix + pick(self.random, setting.keys)).upper()
    if self.random.random() < 0.1:
        key = pick(self.random, ("ACCELERATE_MIXED_PRECISION", "ACCELERATE_DEBUG_MODE"))
        setting = self.named["launch.debug" if key.endswith("MODE") else "launch.mixed_precision"]
    raw = as_text(self.value(setting)).replace("\0", "")
    if setting.name == "wrap.min_num_params" and raw.strip() == "100000000":
        raw = "1000"  # the value that accelerate launch always sets is not a setting
    sources = {"environ": {key: raw}, "config": companions(setting)}
    return self.single("value of a variable", "environment", setting, key, raw, sources)


def value_in_arguments(self: Builder) -> Case:
    setting = self.setting("fsdp", "precision", "parallelism")
    key, raw = making.written_key(self.random, setting), self.value(setting)
    inner: Any = {key: raw} if setting.section != "precision" else {"mixed_precision_policy": {key: raw}}
    inner |= COMPANIONS.get(setting.name, {})
    if self.random.random() < 0.3 and not too_deep(raw):
        text, raw = scalar(self.random, raw, is_json=True)
        inner = {key: Raw(text)} if setting.section != "precision" else {"mixed_precision_policy": {key: Raw(text)}}
        inner = json_text(inner | dict(COMPANIONS.get(setting.name, {})))
    sources = {"training_arguments": {"fsdp": True, "fsdp_config": inner}}
    case = self.single("value in TrainingArguments", "TrainingArguments", setting, key, raw, sources)
    if too_deep(raw):
        case.whole = frozenset({"FSDP-E055"})
    return case


def value_in_script_config(self: Builder) -> Case:
    """A value in the config of a training script, in its ``fsdp_config`` or at its top level."""
    setting = self.setting("fsdp", "parallelism", "training")
    while setting.name == "training.fsdp_config" or (setting.section == "training" and setting.kind == "section"):
        setting = self.setting("fsdp", "parallelism", "training")
    is_inner = setting.section == "fsdp" and self.random.random() < 0.5
    key = making.written_key(self.random, setting, prefixed=True if setting.section == "fsdp" else None)
    text, raw = scalar(self.random, self.value(setting), is_json=True)
    others = {f"fsdp_{self.named[name].keys[0]}": value for name, value in COMPANIONS.get(setting.name, {}).items()}
    config = {"output_dir": "x", "fsdp": True}
    config |= {"fsdp_config": {key: Raw(text), **others}} if is_inner else {key: Raw(text), **others}
    sources = {"file": json_text(config), "suffix": "json"}
    return self.single("value in a script's config", "config", setting, key, raw, sources)


def value_in_distributed(self: Builder) -> Case:
    setting = self.setting("distributed")
    key, raw = pick(self.random, setting.keys), self.value(setting)
    other = "dp_replicate_size" if key == "fsdp_size" else "fsdp_size"
    config = {other: 2, key: raw}
    case = self.single(
        "value in a DistributedConfig", "DistributedConfig", setting, key, raw, {"distributed_config": config}
    )
    if too_deep(raw):
        case.whole = frozenset({"FSDP-E055"})
    case.unchecked = raw is None  # the field has the default of a DistributedConfig, which is a setting
    return case


def argument(self: Builder) -> Case:
    """A keyword argument of ``TrainingArguments`` other than ``fsdp_config``."""
    setting = self.setting("training")
    while setting.kind == "section":
        setting = self.setting("training")
    key, raw = pick(self.random, setting.keys), self.value(setting)
    sources = {"training_arguments": {key: raw}, "config": {"distributed_type": "FSDP", "fsdp_config": {}}}
    case = self.single("value in TrainingArguments", "TrainingArguments", setting, key, raw, sources)
    if too_deep(raw):
        case.whole = frozenset({"FSDP-E055"})
    if raw is None or raw is False:  # the default of the argument
        case.expected = [Expected(setting, key, NOT_SET)]
    return case


def options(self: Builder) -> Case:
    """A value of ``fsdp`` as an argument, a flag or with --set."""
    setting = self.named["training.fsdp"]
    chance = self.random.random()
    raw = making.options(self.random)
    if chance < 0.4:
        raw = making.mutated(self.random, " ".join(map(str, raw)) if isinstance(raw, list) else str(raw))
    elif chance < 0.5:
        raw = self.value(self.setting("fsdp"))
    if raw is None or isinstance(raw, (Mapping, set, frozenset)) or too_deep(raw):
        raw = "full_shard auto_wrap"
    place = self.random.randrange(3)
    if place == 0:
        return self.single("fsdp=", "TrainingArguments", setting, "fsdp", raw, {"training_arguments": {"fsdp": raw}})
    raw = " ".join(map(as_text, raw)) if isinstance(raw, list) else as_text(raw)
    if place == 1:
        sources: dict[str, Any] = {"command_line": [f"--fsdp={raw}"]}
        return self.single("fsdp=", "command line", setting, "--fsdp", raw, sources)
    return self.single("fsdp=", "--set", setting, "training.fsdp", raw, {"overrides": {"training.fsdp": raw}})


def wrong_key(self: Builder) -> Case:
    """A mutated key. If it is another documented key by chance, it must be that one, and is not checked further."""
    place = pick(self.random, list(_PLACES))
    sections, is_prefixed = _PLACES[place]
    setting = self.setting(*sections)
    raw = making.valid(self.random, setting)
    key = setting.name if place == "--set" else making.written_key(self.random, setting, prefixed=is_prefixed or None)
    key = making.mutated(self.random, key)
    if place == "file":
        key = _encodable(key)
    case = Case(f"wrong key: {place}", {})
    if place == "--set":
        key = key.partition("=")[0].strip() or "x"
        meant = self.oracle.name(key) or self.key(key, (*FSDP_SECTIONS, "launch", "dynamo", "fp8", "training"))
        case.sources = {"overrides": {key: as_text(raw)}}
    elif place == "flag":
        key = "--" + key.lstrip("-").partition("=")[0]
        meant = self.key(key[2:], (*sections, "training"))
        case.sources = {"command_line": [f"{key}={as_text(raw)}"]}
        if meant is None and not re.match("fsdp|parallelism_config", key[2:].strip(BLANKS).lower().replace("-", "_")):
            case.expected = [Expected(None, key, NOT_SET)]  # an argument of the script
            return case
    elif place == "DistributedConfig":
        meant = self.key(key, sections)
        case.sources = {"distributed_config": {"fsdp_size": 2, key: raw}}
    elif place == "variable":
        key = _encodable(key).upper().replace("=", "")
        beginning = setting.prefix.upper()
        key = beginning + key.removeprefix(beginning)
        meant = self.oracle.key(key[len(beginning) :], setting.section)
        case.sources = {"environ": {key: as_text(raw)}}
        case.expected = [Expected(None, key, NOT_SET)]
        case.unchecked = meant is not None
        return case
    elif place == "TrainingArguments":
        meant = self.key(key, FSDP_SECTIONS)
        case.sources = {"training_arguments": {"fsdp": True, "fsdp_config": {key: raw}}}
    else:
        meant = self.key(key, sections_at(setting.section))
        case.sources = {"config": config_of(setting, key, raw)}
        if place == "file":
            case.sources = {"file": json_text(config_of(setting, key, Raw(scalar(self.random, raw, is_json=True)[0])))}
            case.sources["suffix"] = "json"
    if meant is not None:
        case.unchecked = True
    else:
        is_comment = key.startswith("_") and place in ("dict", "file", "TrainingArguments", "DistributedConfig")
        case.expected = [Expected(None, key, NOT_SET if is_comment else REFUSED)]
    return case


_ALL = ("fsdp", "precision", "parallelism", "dynamo", "fp8", "launch")
_PLACES: Mapping[str, tuple[tuple[str, ...], bool]] = {
    "dict": (_ALL, False),
    "file": (_ALL, False),
    "TrainingArguments": (("fsdp",), False),
    "--set": (("fsdp", "precision", "parallelism", "launch"), False),
    "flag": (("fsdp", "parallelism"), True),
    "variable": (("fsdp", "parallelism"), True),
    "DistributedConfig": (("distributed",), False),
}
"""Place of a wrong key -> sections of the keys that are mutated, and whether their prefix is required."""


def sections_at(section: str) -> tuple[str, ...]:
    """The sections whose keys are valid at the place of a section."""
    if section in ("fsdp", "parallelism", "precision"):
        return FSDP_SECTIONS if section == "fsdp" else (section,)
    return ("launch", "training", "dynamo", "fsdp", "parallelism") if section == "launch" else (section,)


def pair_of_sources(self: Builder) -> Case:
    """One setting in two sources with valid values: the stronger one is used, the weaker one is reported."""
    setting = self.named[pick(self.random, PAIRED)]
    values = [self.accepted(setting) for _ in range(2)]
    places = sorted(self.random.sample(range(len(_STRENGTH)), 2))
    case = Case("pair of sources", {})
    keys = []
    for place, (raw, _) in zip(places, values, strict=True):
        key, sources = _STRENGTH[place](setting, raw)
        keys.append(key)
        case.sources |= sources
    case.expected = [Expected(setting, keys[0], values[0][1])]
    case.overridden = keys[1]
    return case


PAIRED = (
    "fsdp.version", "offload.params", "offload.pin_memory", "prefetch.backward", "prefetch.forward",
    "prefetch.limit_all_gathers", "checkpoint.state_dict", "checkpoint.asynchronous", "activation.checkpointing",
    "loading.ram_efficient", "params.use_orig", "sharding.strategy", "wrap.classes", "mesh.shard",
)  # fmt: skip


def _in_set(setting: Documented, raw: Any) -> tuple[str, dict[str, Any]]:
    return setting.name, {"overrides": {setting.name: as_text(raw)}}


def _in_flag(setting: Documented, raw: Any) -> tuple[str, dict[str, Any]]:
    key = f"--{setting.prefix}{setting.keys[0]}"
    return key, {"command_line": [f"{key}={as_text(raw)}"]}


def _in_arguments(setting: Documented, raw: Any) -> tuple[str, dict[str, Any]]:
    return setting.keys[0], {"training_arguments": {"fsdp": True, "fsdp_config": {setting.keys[0]: raw}}}


def _in_plugin(setting: Documented, raw: Any) -> tuple[str, dict[str, Any]]:
    return setting.keys[0], {"plugin_object": {setting.keys[0]: raw}}


def _in_config(setting: Documented, raw: Any) -> tuple[str, dict[str, Any]]:
    key = setting.prefix + setting.keys[-1]
    return key, {"config": {"distributed_type": "FSDP", "fsdp_config": {key: raw}}}


def _in_variable(setting: Documented, raw: Any) -> tuple[str, dict[str, Any]]:
    key = f"{setting.prefix}{setting.keys[0]}".upper()
    return key, {"environ": {key: as_text(raw)}}


_STRENGTH = (_in_set, _in_flag, _in_arguments, _in_plugin, _in_config, _in_variable)
"""The sources that accept all these settings, strongest first."""


def whole_file(self: Builder) -> Case:
    """A file with many settings in any order, some of them wrong: one problem for each wrong one, at its line."""
    names = self.random.sample(INDEPENDENT, self.random.randrange(1, len(INDEPENDENT)))
    config: dict[str, Any] = {"distributed_type": "FSDP", "fsdp_config": {}, "dynamo_config": {}}
    policy: dict[str, Any] = {}
    expected: list[Expected] = []
    is_json = self.random.random() < 0.2
    for name in names:
        setting = self.named[name]
        text, raw = scalar(self.random, self.value(setting), is_json=is_json)
        key = making.written_key(self.random, setting)
        into = {"fsdp": config["fsdp_config"], "dynamo": config["dynamo_config"], "precision": policy}
        into.get(setting.section, config)[key] = Raw(text)
        expected.append(Expected(setting, key, self.oracle.decide(setting, raw)))
    for _ in range(self.random.randrange(3)):
        key = "zz_" + _encodable(making.mutated(self.random, "unknown"))
        config["fsdp_config"][key] = Raw("1")
        expected.append(Expected(None, key, REFUSED))
    if policy:
        config["fsdp_config"]["fsdp_mixed_precision_policy"] = policy
    config = {key: value for key, value in config.items() if value != {}}
    kind = "whole JSON file" if is_json else "whole YAML file"
    if is_json:
        return Case(kind, {"file": json_text(config), "suffix": "json"}, expected)
    text, lines = yaml_text(self.random, config)
    expected = [Expected(e.setting, e.key, e.verdict, lines[e.key]) for e in expected]
    encoding = pick(self.random, ("utf-8", "utf-8", "utf-8-sig"))
    return Case(kind, {"file": text.encode(encoding)}, expected)


def whole_dict(self: Builder) -> Case:
    """A dict with many settings, as the config or as ``fsdp_config`` of ``TrainingArguments``."""
    is_config = self.random.random() < 0.6
    sections = ("fsdp", "precision", "launch") if is_config else ("fsdp", "precision")
    names = [name for name in INDEPENDENT if self.named[name].section in sections]
    inner: dict[str, Any] = {}
    policy: dict[str, Any] = {}
    top: dict[str, Any] = {"distributed_type": "FSDP", "fsdp_config": inner}
    source = "config" if is_config else "TrainingArguments"
    case = Case(f"whole dict: {source}", {})
    for name in self.random.sample(names, self.random.randrange(1, len(names))):
        setting = self.named[name]
        raw = self.value(setting)
        if too_deep(raw):
            continue
        key = making.written_key(self.random, setting)
        {"fsdp": inner, "precision": policy, "launch": top}[setting.section][key] = raw
        case.expected.append(Expected(setting, key, self.oracle.decide(setting, raw, source)))
    if policy:
        inner["mixed_precision_policy"] = policy
    arguments = {"training_arguments": {"fsdp": True, "fsdp_config": inner}}
    case.sources = {"config": top} if is_config else arguments
    return case


def variables(self: Builder) -> Case:
    """Many environment variables."""
    names = [name for name in INDEPENDENT if self.named[name].section == "fsdp"]
    case = Case("environment", {"environ": {"ACCELERATE_USE_FSDP": "true"}})
    for name in self.random.sample(names, self.random.randrange(1, len(names))):
        setting = self.named[name]
        key = (setting.prefix + pick(self.random, setting.keys)).upper()
        raw = as_text(self.value(setting)).replace("100000000", "100000001")  # accelerate launch always sets that value
        case.sources["environ"][key] = raw
        case.expected.append(Expected(setting, key, self.oracle.decide(setting, raw, "environment")))
    return case


def broken_file(self: Builder) -> Case:
    """A valid file made invalid as a whole: exactly one problem with a known code."""
    file = whole_file(self).sources["file"]
    text = file if isinstance(file, str) else file.decode("utf-8-sig")
    breaks: Mapping[str, tuple[str | bytes, str]] = {
        "twice": (f"{text}\ndebug: true\nmachine_rank: 0\nmachine_rank: 0\n", "FSDP-E013"),
        "documents": (f"{text}\n---\n{text}", "FSDP-E006"),
        "tag": ("use_cpu: !!python/object:os.system x\n", "FSDP-E011"),
        "latin": ("# é\n".encode("latin-1") + text.encode(), "FSDP-E005"),
        "utf-16": (text.encode("utf-16"), "FSDP-E005"),
        "zero": (text.encode() + b"\0", "FSDP-E006"),
        "empty": (pick(self.random, ("", " ", "\n\n", "# comment\n", "---\n")), "FSDP-E008"),
        "list": ("- a\n- b\n", "FSDP-E009"),
        "deep": ("a: " + "[" * 40 + "]" * 40, "FSDP-E004"),
        "long": (text + "#" * (1 << 20), "FSDP-E004"),
    }
    way = pick(self.random, list(breaks))
    content, code = breaks[way]
    if way == "twice" and text.lstrip().startswith("{"):
        content, code = text.rstrip()[:-1] + ', "zz": 1, "zz": 1}', "FSDP-E013"
    if way == "documents" and text.lstrip().startswith("{"):
        content, code = f"use_cpu: true\n---\n{text}", "FSDP-E006"
    return Case("broken file", {"file": content, "suffix": "yaml"}, whole=frozenset({code}))


def damaged_file(self: Builder) -> Case:
    """A file with random changes of characters or bytes. Only the absence of a traceback is checked."""
    case = whole_file(self)
    file = case.sources["file"]
    data = bytearray(file.encode() if isinstance(file, str) else file)
    for _ in range(self.random.randrange(1, 6)):
        place, way = self.random.randrange(len(data)), self.random.randrange(4)
        if way == 0:
            data[place] = self.random.randrange(256)
        elif way == 1:
            data[place:place] = making.pick(self.random, making.AFFIXES).encode()
        elif way == 2:
            del data[place : place + self.random.randrange(1, 20)]
        else:
            data[place:place] = making.pick(self.random, making.WORDS).encode("utf-8", "replace")
    return Case("damaged file", {**case.sources, "file": bytes(data)}, unchecked=True)


def command_line(self: Builder) -> Case:
    """Several flags and --set at once."""
    flags = [name for name in INDEPENDENT if self.named[name].section == "fsdp"]
    case = Case("command line", {"command_line": []})
    for name in self.random.sample(flags, self.random.randrange(1, len(flags))):
        setting = self.named[name]
        raw = as_text(self.value(setting))
        if self.random.random() < 0.5:
            key, words = name, ["--set", f"{name}={raw}"]
            verdict = self.oracle.decide(setting, raw, "--set")
        else:
            key = "--" + making.written_key(self.random, setting, prefixed=True)
            words, verdict = [f"{key}={raw}"], self.oracle.decide(setting, raw, "command line")
        case.sources["command_line"] += words
        case.expected.append(Expected(setting, key, verdict))
    case.sources["command_line"] += ["train.py", "--learning_rate", "1e-4"]
    return case


class Raw:
    """Text that is written to a file as it is."""

    def __init__(self, text: str) -> None:
        self.text = text


def scalar(random: Random, raw: Any, *, is_json: bool) -> tuple[str, Any]:
    """Text of a value in a file, and the value that YAML reads from it."""
    if isinstance(raw, str):
        raw = _encodable(raw)
        if not is_json and random.random() < 0.6 and _PLAIN.fullmatch(raw):
            return raw, yaml_value(raw)
        if not is_json and random.random() < 0.3 and raw.isascii() and raw.isprintable():
            return "'" + raw.replace("'", "''") + "'", raw
        return json.dumps(raw), raw
    try:
        text = json.dumps(raw)
    except (TypeError, ValueError, RecursionError):
        text = json.dumps(_encodable(ascii(raw))) if not isinstance(raw, int) else "9" * 5000
    if too_deep(raw):
        text = "[[[]]]"
    if not is_json and isinstance(raw, float):
        text = {"NaN": ".nan", "Infinity": ".inf", "-Infinity": "-.inf"}.get(text, text)
    if text.startswith(("[", "{", '"')):
        return text, json.loads(text)
    return text, yaml_value(text)


_PLAIN = re.compile(r"(?!-(?:--| |$))[\w.+~-](?:[\w.+,/~%$()=;<>^ -]*[\w.+,/~%$()=;<>^-])?", re.ASCII)


def _encodable(text: str) -> str:
    """Text that JSON and YAML can both contain in escaped form."""
    return "".join(c if (c.isprintable() and ord(c) < 0x10000) or c in "\t\n" else "?" for c in text)


def json_text(config: Mapping[str, Any]) -> str:
    def text_of(value: Any) -> str:
        if isinstance(value, Raw):
            return value.text
        return json_text(value) if isinstance(value, Mapping) else json.dumps(value)

    return "{" + ", ".join(f"{json.dumps(key)}: {text_of(value)}" for key, value in config.items()) + "}"


def yaml_text(random: Random, config: Mapping[str, Any]) -> tuple[str, dict[str, int]]:
    """A YAML file with the keys in random order and with comments, and the line of each key."""
    lines: list[str] = []
    found: dict[str, int] = {}

    def add(mapping: Mapping[str, Any], indent: str) -> None:
        for key in random.sample(list(mapping), len(mapping)):
            value = mapping[key]
            if random.random() < 0.1:
                lines.append(pick(random, ("", "  # comment", "#fsdp_version: 2")))
            plain = re.fullmatch(r"[A-Za-z_][\w-]*", key) is not None
            lines.append(f"{indent}{key if plain else json.dumps(key)}:")
            found[key] = len(lines)
            if isinstance(value, Mapping):
                add(value, indent + "  ")
                if not value:
                    lines[-1] += " {}"
                continue
            text = value.text if isinstance(value, Raw) else json.dumps(value)
            lines[-1] += f" {text}{' # comment' if random.random() < 0.05 else ''}"

    add(config, "")
    return "\n".join(lines) + "\n", found


def companions(setting: Documented) -> dict[str, Any]:
    """A config with the companions of a setting that another source sets."""
    others = COMPANIONS.get(setting.name, {})
    if setting.name == "launch.machine_rank":
        return {"distributed_type": "FSDP", "num_machines": 2**63 - 1}
    if setting.name == "launch.distributed_type":
        return {"compute_environment": "LOCAL_MACHINE"}
    return {"distributed_type": "FSDP", "fsdp_config": dict(others)}


def as_text(raw: Any) -> str:
    try:
        return raw if isinstance(raw, str) else ("true" if raw is True else "false" if raw is False else ascii(raw))
    except (ValueError, RecursionError):
        return "9" * 5000


def too_deep(raw: Any) -> bool:
    return raw is making.DEEP


BUILDERS: dict[str, Callable[[Builder], Case]] = {
    "value in a dict": value_in_config,
    "value in a file": value_in_file,
    "value of --set": value_of_set,
    "value of a flag": value_of_flag,
    "value of a variable": value_of_variable,
    "value in TrainingArguments": value_in_arguments,
    "value in a DistributedConfig": value_in_distributed,
    "argument": argument,
    "value in a script's config": value_in_script_config,
    "fsdp": options,
    "wrong key": wrong_key,
    "pair of sources": pair_of_sources,
    "whole file": whole_file,
    "whole dict": whole_dict,
    "environment": variables,
    "broken file": broken_file,
    "damaged file": damaged_file,
    "command line": command_line,
}
