"""Reads the environment variables of a process. No other module reads settings from ``os.environ``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import hf_fsdp_plugin.vocabulary as vocabulary
from hf_fsdp_plugin.sources.command_line import parse_flags
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


def absolute_path(path: str | None) -> str | None:
    """Make `path` absolute, so that it stays valid when the script changes its working directory."""
    return None if path is None else str(Path(path).expanduser().absolute())
