"""The arguments ``fsdp_min_num_params`` and ``fsdp_transformer_layer_cls_to_wrap``, which Transformers 5 removed.

Commands and scripts for Transformers 4 pass them beside ``fsdp``. They become keys of ``fsdp_config``, as in
Transformers 4. A subclass of ``TrainingArguments`` that is a dataclass has a constructor of its own. It is replaced
when an instance is created, because a subclass may be defined before or after ``install``.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any, Final

from hf_fsdp_plugin.integrations.patching import install_in_subclass
from hf_fsdp_plugin.sources.training_arguments import OLD_KEYS
from hf_fsdp_plugin.vocabulary import find

_CONSTRUCTOR: Final = "transformers.training_args:TrainingArguments.__init__"
"""The target of the hook whose replacement is :func:`init_arguments`."""
_ADDED: Final = "_hf_fsdp_added"
"""Attribute of a parser: the names of the arguments that were added to it."""
_given: ContextVar[Mapping[str, Any]] = ContextVar("hf_fsdp_old_arguments", default=MappingProxyType({}))
"""The arguments of the ``TrainingArguments`` that are being constructed."""


def new_arguments(original: Callable[..., Any], kind: type, *args: Any, **kwargs: Any) -> Any:
    """Replace the constructors of a subclass of ``TrainingArguments`` and of its bases that are dataclasses."""
    from transformers import TrainingArguments

    for each in kind.__mro__[: kind.__mro__.index(TrainingArguments)]:
        if {"__init__", "__dataclass_fields__"} <= vars(each).keys() and issubclass(each, TrainingArguments):
            install_in_subclass(_CONSTRUCTOR, each)
    return original(kind) if original is object.__new__ else original(kind, *args, **kwargs)


def init_arguments(original: Callable[..., None], arguments: Any, *args: Any, **kwargs: Any) -> None:
    """Accept the arguments as keyword arguments of ``TrainingArguments``, or of a subclass."""
    own = {field.name for field in dataclasses.fields(arguments)}
    given = {name: kwargs.pop(name) for name in OLD_KEYS if name in kwargs and name not in own}
    with _giving({**_given.get(), **given}):
        original(*args, **kwargs)


def init_parser(original: Callable[..., None], parser: Any, *args: Any, **kwargs: Any) -> None:
    """Add the arguments to an ``HfArgumentParser`` for ``TrainingArguments``."""
    original(*args, **kwargs)
    setattr(parser, _ADDED, ())
    if not _has_training_arguments(parser):
        return
    own = {field.name for kind in parser.dataclass_types for field in dataclasses.fields(kind)}
    added = tuple(name for name in OLD_KEYS if name not in own)
    for name in added:
        row = find(name, ("fsdp",))
        assert row is not None
        parser.add_argument(
            f"--{name}", f"--{name.replace('_', '-')}", default=argparse.SUPPRESS, help=row.about.replace("%", "%%")
        )
    setattr(parser, _ADDED, added)


def parse_args_into_dataclasses(original: Callable[..., Any], parser: Any, *args: Any, **kwargs: Any) -> Any:
    """Take the arguments out of the parsed ones, and pass them to the ``TrainingArguments``."""
    given: dict[str, Any] = {}

    def parse_known_args(*args: Any, **kwargs: Any) -> Any:
        namespace, rest = type(parser).parse_known_args(parser, *args, **kwargs)
        given.update({name: vars(namespace).pop(name) for name in _added(parser) if name in vars(namespace)})
        return namespace, rest

    parser.parse_known_args = parse_known_args
    try:
        with _giving(given):
            return original(*args, **kwargs)
    finally:
        del parser.parse_known_args


def parse_dict(original: Callable[..., Any], parser: Any, args: Mapping[str, Any], *more: Any, **kwargs: Any) -> Any:
    """Take the arguments out of the dict, and pass them to the ``TrainingArguments``."""
    added = _added(parser)
    with _giving({name: args[name] for name in added if name in args}):
        return original({name: value for name, value in args.items() if name not in added}, *more, **kwargs)


def apply_old_arguments(arguments: Any) -> None:
    """Add the arguments of the ``TrainingArguments`` that are being constructed to its ``fsdp_config``."""
    given = {name: value for name, value in _given.get().items() if value}
    if not given:
        return
    if arguments.fsdp_config is None or isinstance(arguments.fsdp_config, Mapping):
        arguments.fsdp_config = {**(arguments.fsdp_config or {}), **given}
    else:  # a path or JSON text
        for name, value in given.items():
            setattr(arguments, name, value)


@contextmanager
def _giving(given: Mapping[str, Any]) -> Iterator[None]:
    token = _given.set(given)
    try:
        yield
    finally:
        _given.reset(token)


def _added(parser: Any) -> tuple[str, ...]:
    added: tuple[str, ...] = getattr(parser, _ADDED, ())
    return added


def _has_training_arguments(parser: Any) -> bool:
    from transformers import TrainingArguments

    return any(isinstance(kind, type) and issubclass(kind, TrainingArguments) for kind in parser.dataclass_types)
