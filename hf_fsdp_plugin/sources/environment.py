"""Reads environment variables. No other module reads settings from ``os.environ``."""

from __future__ import annotations

import os
from collections.abc import Mapping

from hf_fsdp_plugin.sources.collector import Collector, entry_of
from hf_fsdp_plugin.sources.model import Sources
from hf_fsdp_plugin.sources.settings import ENVIRONMENT, SourceSettings
from hf_fsdp_plugin.spellings import FALSE_WORDS, NULL_WORDS, TRUE_WORDS
from hf_fsdp_plugin.vocabulary import Scope, find, suggest

SOURCE = ENVIRONMENT
PREFIXES: tuple[tuple[str, Scope], ...] = (("FSDP_", "fsdp"), ("PARALLELISM_CONFIG_", "parallelism"))
ACCELERATE: Mapping[str, str] = {
    "ACCELERATE_MIXED_PRECISION": "mixed_precision",
    "ACCELERATE_USE_CPU": "use_cpu",
    "ACCELERATE_DEBUG_MODE": "debug",
}
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
    upper = name.upper() if name.isascii() else name
    if upper == "ACCELERATE_USE_FSDP":
        if value.strip().lower() in TRUE_WORDS:
            out.mentions_fsdp = True
            out.add("launch.distributed_type", entry_of(name, value), value="FSDP", implied=True)
        elif value.strip().lower() not in FALSE_WORDS | {""}:
            message = f"{name} is {value!r}; expected true or false."
            out.report("FSDP-E036", entry_of(name, value), message, "Correct or unset it.")
        return
    if upper == "FSDP_MIN_NUM_PARAMS" and value.strip() == LAUNCHER_MIN_NUM_PARAMS and not _is_size_policy(variables):
        return
    if upper == "ACCELERATE_FP8_BACKEND" and value.strip().upper() not in ("", "NO"):
        out.add("launch.extra.fp8_config", entry_of(name, value))
        return
    if upper in ACCELERATE:
        if ACCELERATE[upper] != "use_cpu" or value.strip().lower() not in FALSE_WORDS:
            out.add_key("launch", ACCELERATE[upper], value, written=name)
        return
    for prefix, scope in PREFIXES:
        if not upper.startswith(prefix):
            continue
        key = upper.removeprefix(prefix)
        row = find(key, (scope,))
        if row is not None and not row.name.startswith("launch."):
            out.add_entry(row, entry_of(name, value))
        else:
            nearest = suggest(key, (scope,)).removeprefix(prefix.lower()).upper()
            fix = f"Did you mean {prefix}{nearest}?" if nearest else "Unset it."
            message = f"the environment variable {name} is not a setting and is ignored."
            out.report("FSDP-W035", entry_of(name, value), message, fix)


def _is_size_policy(variables: Mapping[str, str]) -> bool:
    return "size" in variables.get("FSDP_AUTO_WRAP_POLICY", "").lower()


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
