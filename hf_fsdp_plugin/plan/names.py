"""Names of modules and parameters: canonical names, which have no wrappers, and names as paths in the model."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import takewhile
from math import prod
from typing import TYPE_CHECKING, TypeVar

from hf_fsdp_plugin.torch_private.modules import WRAPPER_ATTRIBUTES, wrapped_module

if TYPE_CHECKING:  # checkpoint readers import this module without torch
    from torch import nn

T = TypeVar("T")


def canonical_name(name: str) -> str:
    """Return ``model.layers.0.mlp`` for ``model._orig_mod.layers.0._fsdp_wrapped_module.mlp``."""
    return ".".join(part for part in name.split(".") if part not in WRAPPER_ATTRIBUTES)


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the module inside all of its wrappers."""
    while (inner := wrapped_module(module)) is not None:
        module = inner
    return module


def named_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield canonical names and parameters. A tied parameter is yielded under each of its names."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        yield canonical_name(name), parameter


def parent_of(path: str) -> str:
    """Return ``a.b`` for ``a.b.c``, and the empty name of the root for ``a``."""
    return path.rpartition(".")[0]


def ancestors(path: str) -> Iterator[str]:
    """Yield ``a.b.c``, ``a.b`` and ``a`` for ``a.b.c``: the path itself and the modules around it, without the root."""
    while path:
        yield path
        path = parent_of(path)


def is_inside(path: str, outer: str) -> bool:
    """Whether ``path`` is ``outer`` or a module inside it."""
    return not outer or path == outer or path.startswith(outer + ".")


def below(entries: Mapping[str, T], prefix: str) -> dict[str, T]:
    """Return the entries whose names begin with a prefix, by their names without it."""
    return {name.removeprefix(prefix): value for name, value in entries.items() if name.startswith(prefix)}


def common_path(paths: Iterable[str]) -> str:
    """Return the innermost module that contains all paths."""
    levels = zip(*(path.split(".") if path else [] for path in paths), strict=False)
    return ".".join(parts[0] for parts in takewhile(lambda parts: len(set(parts)) == 1, levels))


def common_name(names: Sequence[str]) -> str:
    """Return ``model.layers.0–29`` for names that differ only in their numbers."""
    columns = [list(dict.fromkeys(parts)) for parts in zip(*(re.split(r"(\d+)", name) for name in names), strict=True)]
    if prod(map(len, columns)) != len(names):  # some combinations are missing, so ranges would be wrong
        return f"{names[0]} … {names[-1]}"
    return "".join(_ranges(values) if len(values) > 1 else values[0] for values in columns)


def _ranges(values: Iterable[str]) -> str:
    """Return ``0–3,7`` for 0, 1, 2, 3, 7."""
    ranges: list[list[int]] = []
    for number in sorted(map(int, values)):
        if ranges and number == ranges[-1][-1] + 1:
            ranges[-1].append(number)
        else:
            ranges.append([number])
    return ",".join(f"{span[0]}–{span[-1]}" if len(span) > 1 else str(span[0]) for span in ranges)
