"""The forms of a converted config: Accelerate's YAML and arguments of ``TrainingArguments``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from hf_fsdp_plugin.sources.config_tree import ConfigFile
from hf_fsdp_plugin.sources.interface import Sources
from hf_fsdp_plugin.spec.fsdp_spec import FsdpSpec
from hf_fsdp_plugin.spec.load import assess
from hf_fsdp_plugin.spec.value_parsers import setting_to_json
from hf_fsdp_plugin.tools.config.text import new_text, setting_lines

_ALWAYS: Final = ("launch.distributed_type", "fsdp.version", "sharding.strategy", "wrap.policy")
_DTYPES: Final = ("precision.param", "precision.reduce", "precision.output", "precision.buffer")
_FP8: Final = ("fp8.backend", "fp8.all_gather", "fp8.pad_inner_dim")
_IMPLIED_DTYPE: Final = {"no": "auto", "fp8": "bf16"}
"""Mixed precision mode -> ``precision.param`` that it implies, if that has another name."""
_NOT_IN_FILES: Final = frozenset({"launch.extra", "activation.native"})
_ARGUMENT_NAMES: Final = {"offload_params": "cpu_offload", "mixed_precision": "mixed_precision_policy"}
"""Key of ``fsdp_config`` in Accelerate's file -> its name in ``TrainingArguments``."""
_LAUNCHED: Final = frozenset({"launch.distributed_type", "launch.mixed_precision", "launch.use_cpu"})
"""Settings of the launcher that ``TrainingArguments`` have, too."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Converted:
    """A config in its new form.

    Attributes:
        text: what is written.
        sources: the new form as a source, which must give the same spec.
        script: arguments of the script that the form does not contain: name -> value.
        launcher: settings of the launcher that the form does not contain, by canonical name.
    """

    text: str
    sources: Sources
    script: Mapping[str, Any] = field(default_factory=dict)
    launcher: Mapping[str, Any] = field(default_factory=dict)

    def changed_settings(self, spec: FsdpSpec) -> list[str]:
        """Return the names of the settings of `spec` that the new form does not set to the same value."""
        new = assess(self.sources)
        ignored = _NOT_IN_FILES | self.launcher.keys()
        given = ((name, value) for name, value, _ in spec.settings() if name not in ignored and value != "auto")
        return [name for name, value in given if new.spec.get(name) != value]


def to_accelerate(spec: FsdpSpec, arguments: Mapping[str, Any]) -> Converted:
    """Return Accelerate's YAML."""
    lines = setting_lines(_settings_of(spec), spec.fsdp.version, {})
    text = new_text(sorted(lines, key=lambda line: (line.section, line.key)))
    native = {"gradient_checkpointing": True} if spec.activation.native else {}
    file = ConfigFile(path=ConfigFile.at("converted.yaml").path, shown="converted.yaml", data=text.encode())
    sources = Sources(config=file, training_arguments=native, environ={})
    return Converted(text=text, sources=sources, script={**native, **arguments})


def to_training_arguments(spec: FsdpSpec, arguments: Mapping[str, Any]) -> Converted:
    """Return Python code with the arguments of ``TrainingArguments``."""
    lines = [line for line in setting_lines(_settings_of(spec), spec.fsdp.version, {}) if line.section]
    keys = {line.key.removeprefix("fsdp_").removeprefix("parallelism_config_"): line.value for line in lines}
    given: dict[str, Any] = {"fsdp": True, "fsdp_config": {_ARGUMENT_NAMES.get(key, key): v for key, v in keys.items()}}
    given |= {name: True for name in (spec.launch.mixed_precision,) if name != "no"}
    given |= {"use_cpu": True} if spec.launch.use_cpu else {}
    given |= {"gradient_checkpointing": True} if spec.activation.native else {}
    given |= {name: value for name, value in arguments.items() if name not in given}
    text = "".join(f"    {name}={_python(value)},\n" for name, value in given.items())
    sources = Sources(training_arguments=given, environ={})
    return Converted(text=f"TrainingArguments(\n{text})\n", sources=sources, launcher=_of_launcher(spec), script=given)


TARGETS: Final[Mapping[str, Callable[[FsdpSpec, Mapping[str, Any]], Converted]]] = {
    "accelerate": to_accelerate,
    "training-arguments": to_training_arguments,
}
"""Value of ``--to`` -> the function that returns the new form, from a spec and arguments of the script."""


def _python(value: Any) -> str:
    """Return the Python code of a value, a dict with one line for each key."""
    if not isinstance(value, dict):
        return repr(value)
    lines = [f"        {key!r}: {inner!r},\n" for key, inner in value.items()]
    return f"{{\n{''.join(lines)}    }}"


def _of_launcher(spec: FsdpSpec) -> dict[str, Any]:
    """Return the launcher's settings that are set, and that are no settings of a script."""
    names = [name for name, _, _ in spec.settings() if name.startswith("launch.") and spec.asked(name)]
    return {name: _plain(spec.get(name)) for name in names if name not in _LAUNCHED | _NOT_IN_FILES}


def _settings_of(spec: FsdpSpec) -> dict[str, Any]:
    """Return the settings that a new file has: those that are set, and those whose default depends on the file."""
    asked = {name: value for name, value, _ in spec.settings() if name in _ALWAYS or spec.asked(name)}
    settings = {name: _plain(value) for name, value in asked.items() if name not in _NOT_IN_FILES}
    dtypes = {name.rpartition(".")[2]: settings.pop(name) for name in _DTYPES if name in settings}
    mode = settings.get("launch.mixed_precision", "no")
    if dtypes.get("param") == _IMPLIED_DTYPE.get(mode, mode):
        del dtypes["param"]
    if dtypes:
        settings["precision.policy"] = {f"{name}_dtype": dtype for name, dtype in dtypes.items()}
    fp8 = {name.partition(".")[2]: settings.pop(name) for name in _FP8 if name in settings}
    fp8 |= settings.pop("fp8.te_options", {})
    if fp8:
        settings["launch.fp8_config"] = fp8
    if spec.activation.native:
        del settings["activation.checkpointing"]
    return settings


def _plain(value: Any) -> Any:
    return setting_to_json(value) if isinstance(value, Mapping) else value
