"""Reads environment variables. No other module reads settings from ``os.environ``."""

from __future__ import annotations

import os
from collections.abc import Mapping

from hf_fsdp_plugin.sources.collector import Collector, entry_of
from hf_fsdp_plugin.sources.command_line import machine_range, parse_flags
from hf_fsdp_plugin.sources.interface import ENVIRONMENT, Sources, SourceSettings
from hf_fsdp_plugin.spellings import FALSE_WORDS, NULL_WORDS, TRUE_WORDS, did_you_mean
from hf_fsdp_plugin.vocabulary import Scope, find_row, similar_key

SOURCE = ENVIRONMENT
PREFIXES: tuple[tuple[str, Scope], ...] = (("FSDP_", "fsdp"), ("PARALLELISM_CONFIG_", "parallelism"))
ACCELERATE: Mapping[str, str] = {
    "ACCELERATE_MIXED_PRECISION": "mixed_precision",
    "ACCELERATE_USE_CPU": "use_cpu",
    "ACCELERATE_DEBUG_MODE": "debug",
}
TORCHRUN = "variables of torchrun"
"""Name of the level of the variables that replace flags of ``torchrun``."""
TORCHRUN_KEYS: Mapping[str, str] = {
    "PET_NNODES": "num_machines",
    "PET_NPROC_PER_NODE": "num_processes",
    "PET_NODE_RANK": "machine_rank",
    "PET_MASTER_ADDR": "main_process_ip",
    "PET_MASTER_PORT": "main_process_port",
    "PET_RDZV_ENDPOINT": "main_process_ip",
    "PET_RDZV_BACKEND": "rdzv_backend",
}
"""Variable -> the key that it sets. The training operator of Kubernetes sets them in each pod of a PyTorchJob."""
TORCHRUN_FLAGS: Mapping[str, str] = {"PET_MAX_RESTARTS": "max_restarts", "PET_RDZV_CONF": "rdzv_conf"}
"""Variable -> the flag of ``hf-fsdp launch`` that it sets, which is not a setting."""
_AGENT = "TORCHELASTIC_RUN_ID"
"""A variable that torch's agent sets in its ranks. In these, the variables of ``torchrun`` have no effect any more."""
LAUNCHER_MIN_NUM_PARAMS = "100000000"
"""Value that ``accelerate launch`` always sets by default, even without the size policy."""


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
            message = f"{name} is {value!r}; expected true or false."
            out.report("FSDP-E036", entry_of(name, value), message, "Correct or unset it.")
    elif upper == "FSDP_MIN_NUM_PARAMS" and word == LAUNCHER_MIN_NUM_PARAMS and not is_size_policy:
        return
    elif upper == "ACCELERATE_FP8_BACKEND" and word not in ("", "no"):
        out.add("launch.extra.fp8_config", entry_of(name, value))
    elif upper in ACCELERATE and (ACCELERATE[upper] != "use_cpu" or word not in FALSE_WORDS):
        out.add_key("launch", ACCELERATE[upper], value, written=name)
    for prefix, scope in PREFIXES:
        if not upper.startswith(prefix):
            continue
        key = upper.removeprefix(prefix)
        row = find_row(key, (scope,))
        if row is not None and not row.name.startswith("launch."):
            out.add_entry(row, entry_of(name, value))
        else:
            nearest = similar_key(key, (scope,)).removeprefix(prefix.lower()).upper()
            fix = did_you_mean(nearest and f"{prefix}{nearest}", "Unset it.")
            message = f"the environment variable {name} is not a setting and is ignored."
            out.report("FSDP-W035", entry_of(name, value), message, fix)


def torchrun_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of ``torchrun`` that are set, outside of its ranks."""
    known = () if _AGENT in environ else (*TORCHRUN_KEYS, *TORCHRUN_FLAGS)
    return {name: environ[name].strip() for name in known if environ.get(name, "").strip()}


def rank_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a rank that another launcher has started, without the variables of ``torchrun``."""
    return {name: value for name, value in environ.items() if name not in TORCHRUN_KEYS}


def torchrun_options(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the options of ``hf-fsdp launch`` that variables of ``torchrun`` set, such as ``max_restarts``."""
    given = torchrun_variables(environ)
    options = {flag: given[name] for name, flag in TORCHRUN_FLAGS.items() if name in given}
    machines = machine_range(given.get("PET_NNODES", ""))
    return {**options, "min_machines": machines[0]} if machines and machines[0] != machines[1] else options


def read_torchrun(sources: Sources) -> SourceSettings | None:
    """Read the ``PET_*`` variables of a cluster: number and address of the machines, and ranks of each."""
    given = torchrun_variables(variables_of(sources))
    if not given.keys() & TORCHRUN_KEYS.keys():
        return None
    out = Collector(SOURCE)
    flags = [flag.text for flag in parse_flags(sources.command_line) if flag.name == "num_machines"]
    machines = machine_range(flags[-1] if flags else given.get("PET_NNODES", "1"))
    if "PET_RDZV_ENDPOINT" in given:  # it has precedence over PET_MASTER_ADDR, as in torchrun
        given = {name: value for name, value in given.items() if not name.startswith("PET_MASTER_")}
    for name, value in given.items():
        _add_torchrun(out, name, value, machines)
    return out.result(None)


def _add_torchrun(out: Collector, name: str, value: str, machines: tuple[str, str] | None) -> None:
    entry = entry_of(name, value)
    if name == "PET_NNODES":
        if (found := machine_range(value)) is None:
            message = f"{name} is {value!r}; expected a number, or MIN:MAX with MIN from 1 to MAX."
            fix = "Correct it, or pass --num_machines."
            out.report("FSDP-E101", entry, message, fix, setting="launch.num_machines")
        else:
            out.add("launch.num_machines", entry, value=found[1])
    elif name == "PET_NPROC_PER_NODE" and value.isdecimal():
        if machines is not None:
            out.add("launch.num_processes", entry, value=int(value) * int(machines[1]))
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
