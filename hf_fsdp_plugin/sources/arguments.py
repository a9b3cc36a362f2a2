"""Checks the types of the Python objects that a caller passes as sources, before they are read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

from hf_fsdp_plugin.problems import Origin, Problem
from hf_fsdp_plugin.sources.config_file import ConfigFile
from hf_fsdp_plugin.sources.model import Sources
from hf_fsdp_plugin.sources.tree import MAX_DEPTH, MAX_NODES, from_python


def check_arguments(sources: Sources) -> tuple[Problem, ...]:
    """Return an error for each source that has the wrong type, or that is nested too deeply or contains itself."""
    return tuple(_check(sources))


def _check(sources: Sources) -> Iterator[Problem]:
    config, given = sources.config, sources.distributed_config
    if config is not None and not isinstance(config, ConfigFile | Mapping):
        yield _wrong("config", config, "a path or a dict")
    if given is not None and not isinstance(given, ConfigFile | Mapping) and not hasattr(given, "to_dict"):
        yield _wrong("distributed_config", given, "a DistributedConfig, a dict or a path")
    mesh = sources.parallelism_config
    if mesh is not None and not isinstance(mesh, Mapping) and not hasattr(mesh, "dp_shard_size"):
        yield _wrong("parallelism_config", mesh, "a ParallelismConfig or a dict")
    for name in ("training_arguments", "plugin_object", "environ"):
        value = getattr(sources, name)
        if value is not None and not (isinstance(value, Mapping) and _are_texts(value)):
            yield _wrong(name, value, "a dict whose keys are names")
    if (
        isinstance(sources.environ, Mapping)
        and _are_texts(sources.environ)
        and not _are_texts(sources.environ.values())
    ):
        yield _wrong("environ", sources.environ, "a dict of text")
    if not _is_list_of_texts(sources.command_line):
        yield _wrong("command_line", sources.command_line, "a list of words, such as ['--fsdp', 'full_shard']")
    overrides = sources.overrides
    if not (isinstance(overrides, str) or _is_list_of_texts(overrides)) and not (
        isinstance(overrides, Mapping) and _are_texts(overrides)
    ):
        yield _wrong("overrides", overrides, "a dict whose keys are names, or a list of NAME=VALUE")
    for name in (
        "config",
        "training_arguments",
        "plugin_object",
        "distributed_config",
        "parallelism_config",
        "overrides",
    ):
        if isinstance(value := getattr(sources, name), Mapping) and _is_too_deep(value):
            message = f"{name} contains itself or is nested too deeply."
            fix = "Pass a dict of plain values."
            yield Problem(code="FSDP-E014", message=message, fix=fix, origin=Origin(source=name))


def _wrong(name: str, value: Any, expected: str) -> Problem:
    is_container = isinstance(value, Mapping | Set | list | tuple)
    shown = f"a {type(value).__name__} of other values" if is_container else from_python(value).text or repr(value)
    message = f"{name} is {shown}; expected {expected}."
    return Problem(code="FSDP-E055", message=message, fix=f"Pass {expected}.", origin=Origin(source=name))


def _are_texts(values: Any) -> bool:
    return all(isinstance(value, str) for value in values)


def _is_list_of_texts(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes) and _are_texts(value)


def _is_too_deep(value: Any) -> bool:
    waiting = [(value, 0)]
    num_nodes = 0
    while waiting:
        node, depth = waiting.pop()
        num_nodes += 1
        if isinstance(node, Mapping):
            node = tuple(node.values())
        if isinstance(node, list | tuple | Set):
            if depth >= MAX_DEPTH or num_nodes + len(waiting) + len(node) > MAX_NODES:
                return True
            waiting += [(item, depth + 1) for item in node]
    return False
