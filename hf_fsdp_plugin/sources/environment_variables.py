"""Reads what a process inherits: environment variables, and the config of the ``accelerate launch`` that started it.

No other module reads settings from ``os.environ``.

Stock ``accelerate launch`` passes on only settings for which it has environment variables. The plugin therefore reads
the launcher's command line from the process table, and then the launcher's config file.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import hf_fsdp_plugin.vocabulary as vocabulary
from hf_fsdp_plugin.problems import Origin, Problem
from hf_fsdp_plugin.sources.command_line import flags_before_script, parse_flags
from hf_fsdp_plugin.sources.config_tree import ConfigFile
from hf_fsdp_plugin.sources.interface import ENVIRONMENT, Collector, Sources, SourceSettings, entry_of
from hf_fsdp_plugin.vocabulary import FALSE_WORDS, NULL_WORDS, TABLES, TRUE_WORDS, Scope

SOURCE = ENVIRONMENT
PREFIXES: Mapping[str, Scope] = {"FSDP_": "fsdp", "PARALLELISM_CONFIG_": "parallelism", "ACCELERATE_FP8_": "fp8"}
ACCELERATE: Mapping[str, str] = TABLES["accelerate_keys"]
TORCHRUN = "variables of torchrun"
"""Name of the level of the variables that replace flags of ``torchrun``."""
TORCHRUN_KEYS: Mapping[str, str] = TABLES["torchrun_keys"]
TORCHRUN_FLAGS: Mapping[str, str] = TABLES["torchrun_flags"]
AGENT_VARIABLE = "TORCHELASTIC_RUN_ID"
"""A variable that torch's agent sets in its ranks. In these, the variables of ``torchrun`` have no effect any more."""
LAUNCHER_MIN_NUM_PARAMS = "100000000"
"""Value that ``accelerate launch`` always sets by default, even without the size policy."""
CONFIG_NOT_FOUND = Problem(
    code="FSDP-W041",
    message="this process was started by accelerate launch, whose config file was not found. Only the environment "
    "is read, which contains fewer settings.",
    fix="Use hf-fsdp launch --config_file, or call hf_fsdp_plugin.install(config) in the script.",
    origin=Origin(source=SOURCE),
)


def read(sources: Sources) -> SourceSettings:
    """Read the ``FSDP_*``, ``PARALLELISM_CONFIG_*`` and ``ACCELERATE_*`` variables."""
    out = Collector(SOURCE, nulls=NULL_WORDS)  # stock launchers write None for a setting without a value
    variables = variables_of(sources)
    for name in sorted(variables):
        _add(out, name, variables[name], variables)
    return out.result("accelerate")


def _add(out: Collector, name: str, value: str, variables: Mapping[str, str]) -> None:
    upper, word = name.upper() if name.isascii() else name, value.strip().lower()
    is_size_policy = "size" in variables.get("FSDP_AUTO_WRAP_POLICY", "").lower()
    if upper == "ACCELERATE_USE_FSDP":
        if word in TRUE_WORDS:
            out.mentions_fsdp = True
            out.add("launch.distributed_type", entry_of(name, value), value="FSDP", implied=True)
        elif word not in FALSE_WORDS | {""}:
            out.expect(entry_of(name, value), "true or false", "Correct or unset it.")
    elif upper == "FSDP_MIN_NUM_PARAMS" and word == LAUNCHER_MIN_NUM_PARAMS and not is_size_policy:
        return
    elif upper in ACCELERATE and (ACCELERATE[upper] != "use_cpu" or word not in FALSE_WORDS):
        out.add_key("launch", ACCELERATE[upper], value, written=name)
    for prefix, scope in PREFIXES.items():
        if not upper.startswith(prefix):
            continue
        key = upper.removeprefix(prefix)
        row = vocabulary.find_row(key, (scope,))
        if row is not None and not row.name.startswith("launch."):
            out.add_entry(row, entry_of(name, value))
        else:
            nearest = vocabulary.similar_key(key, (scope,)).removeprefix(prefix.lower()).upper()
            fix = vocabulary.did_you_mean(nearest and f"{prefix}{nearest}", "Unset it.")
            message = f"the environment variable {name} is not a setting and is ignored."
            out.report("FSDP-W035", entry_of(name, value), message, fix)


def torchrun_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of ``torchrun`` that are set, outside of its ranks."""
    known = () if AGENT_VARIABLE in environ else (*TORCHRUN_KEYS, *TORCHRUN_FLAGS)
    return {name: environ[name].strip() for name in known if environ.get(name, "").strip()}


def variables_without_torchrun(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a rank that another launcher has started, without the variables of ``torchrun``."""
    return {name: value for name, value in environ.items() if name not in TORCHRUN_KEYS}


def torchrun_options(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the options of ``hf-fsdp launch`` that variables of ``torchrun`` set, such as ``max_restarts``."""
    given = torchrun_variables(environ)
    return {flag: given[name] for name, flag in TORCHRUN_FLAGS.items() if name in given}


def read_torchrun(sources: Sources) -> SourceSettings | None:
    """Read the ``PET_*`` variables of a cluster: number and address of the machines, and ranks of each."""
    given = torchrun_variables(variables_of(sources))
    if not given.keys() & TORCHRUN_KEYS.keys():
        return None
    out = Collector(SOURCE)
    flags = [flag.text for flag in parse_flags(sources.command_line) if flag.name == "num_machines"]
    machines = flags[-1] if flags else given.get("PET_NNODES", "1")
    if "PET_RDZV_ENDPOINT" in given:  # it has precedence over PET_MASTER_ADDR, as in torchrun
        given = {name: value for name, value in given.items() if not name.startswith("PET_MASTER_")}
    for name, value in given.items():
        _add_torchrun(out, name, value, machines)
    return out.result(None)


def _add_torchrun(out: Collector, name: str, value: str, machines: str) -> None:
    entry = entry_of(name, value)
    if name == "PET_NNODES" and ":" in value:
        fix = "Start the script with torchrun -m hf_fsdp_plugin, which takes MIN:MAX, or pass --num_machines."
        out.expect(entry, "a number", fix, setting="launch.num_machines")
    elif name == "PET_NPROC_PER_NODE" and value.isdecimal():
        if machines.isdecimal():
            out.add("launch.num_processes", entry, value=int(value) * int(machines))
    elif name == "PET_NPROC_PER_NODE" and value in ("auto", "gpu"):
        out.add("launch.num_processes", entry, value="auto")
    elif name == "PET_RDZV_ENDPOINT":
        host, colon, port = value.rpartition(":")
        out.add("launch.main_process_ip", entry, value=(host if colon else value).strip("[]"))
        if colon:
            out.add("launch.main_process_port", entry, value=port)
    elif name in TORCHRUN_KEYS:
        out.add_key("launch", TORCHRUN_KEYS[name], value, written=name)


def variables_of(sources: Sources) -> Mapping[str, str]:
    """Return ``sources.environ``; if it is ``None``, the variables of this process."""
    return os.environ if sources.environ is None else sources.environ


def accelerate_cache(variables: Mapping[str, str]) -> str:
    """Return the folder of Accelerate's default config, in ``HF_HOME``, ``XDG_CACHE_HOME`` or ``~/.cache``."""
    home = variables.get("HF_HOME") or os.path.join(variables.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    if home.startswith("~") and "HOME" in variables:
        home = variables["HOME"] + home[1:]
    return os.path.join(os.path.expanduser(home), "accelerate")


def written_by_accelerate(variables: Mapping[str, str]) -> bool:
    """Whether ``accelerate launch`` started this process. It always sets ``ACCELERATE_MIXED_PRECISION``."""
    return "ACCELERATE_MIXED_PRECISION" in variables or "ACCELERATE_USE_FSDP" in variables


def locate_config(sources: Sources) -> tuple[Sources, list[Problem]]:
    """Return the sources with the config that ``as_launched`` and ``default_file`` select, and problems of that.

    If ``accelerate launch`` started this process, its flags are added to the command line, and the environment is
    ignored, because the launcher set the variables from the config.
    """
    problems: list[Problem] = []
    variables = variables_of(sources)
    if variables.get("ACCELERATE_USE_DEEPSPEED", "").lower() in TRUE_WORDS:
        sources = replace(sources, allows_deepspeed=True)  # accelerate launch has started DeepSpeed itself
    if sources.config is None and sources.as_launched:
        if (launch := find_launch(variables)) is not None:
            config, flags = launch
            shown = config.shown if config is not None else "the launcher's flags"
            message = f"this process was started by accelerate launch; its settings are read from {shown}."
            problems.append(Problem(code="FSDP-N040", message=message))
            command_line = (*flags, *sources.command_line)
            sources = replace(sources, config=config, command_line=command_line, environ={}, allows_deepspeed=True)
        elif written_by_accelerate(variables):
            problems.append(CONFIG_NOT_FOUND)
    if sources.config is None and sources.default_file:
        default = default_config_file(variables)
        sources = replace(sources, config=default)
        if default is None:
            message = f"no config is given, and {accelerate_cache(variables)} contains no default config."
            fix = "Give a config file, or write the default one with accelerate config."
            problems.append(Problem(code="FSDP-E042", message=message, fix=fix))
    return sources, problems


def find_launch(variables: Mapping[str, str]) -> tuple[ConfigFile | None, tuple[str, ...]] | None:
    """Return config and flags of the ``accelerate launch`` that is a parent of this process; ``None`` without one."""
    import psutil  # few processes need it

    default = default_config_file(variables)
    with contextlib.suppress(psutil.Error):  # a parent has ended, or belongs to another user
        for process in psutil.Process().parents():
            if (flags := launch_flags(process.cmdline())) is None:
                continue
            named = [flag.text for flag in parse_flags(flags) if flag.name == "config_file" and flag.text]
            if not named:
                return default, flags
            return ConfigFile(path=Path(process.cwd(), os.path.expanduser(named[-1])), shown=named[-1]), flags
    return (default, ()) if written_by_accelerate(variables) and default is not None else None


def launch_flags(words: Sequence[str]) -> tuple[str, ...] | None:
    """Return the flags in the command line of a process; ``None`` if it is not ``accelerate launch``."""
    for position, word in enumerate(words[:4]):
        name = os.path.basename(word)
        is_file = word.replace(os.sep, "/").endswith("accelerate/commands/launch.py")
        if is_file or name == "accelerate-launch" or word == "accelerate.commands.launch":
            return flags_before_script(words[position + 1 :])
        is_command = name == "accelerate" or word == "accelerate.commands.accelerate_cli"
        if is_command and words[position + 1 : position + 2] == ["launch"]:
            return flags_before_script(words[position + 2 :])
    return None


def default_config_file(variables: Mapping[str, str]) -> ConfigFile | None:
    """Return Accelerate's default config, YAML before JSON; ``None`` if neither exists."""
    folder = Path(accelerate_cache(variables))
    paths = (folder / f"default_config.{suffix}" for suffix in ("yaml", "json"))
    return next((ConfigFile(path=path, shown=str(path)) for path in paths if path.is_file()), None)


def absolute_path(path: str | None) -> str | None:
    """Make `path` absolute, so that it stays valid when the script changes its working directory."""
    return None if path is None else str(Path(path).expanduser().absolute())
