"""The arguments ``fsdp_min_num_params`` and ``fsdp_transformer_layer_cls_to_wrap``, which Transformers 5 removed.

Commands and scripts for Transformers 4 pass them beside ``fsdp``. They become keys of ``fsdp_config``, as in
Transformers 4. A subclass of ``TrainingArguments`` that is a dataclass has a constructor of its own. It is replaced
when an instance is created, because a subclass may be defined before or after ``install``.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any, Final

from hf_fsdp_plugin.integrations.patching import install_in_subclass
from hf_fsdp_plugin.integrations.session import holding
from hf_fsdp_plugin.sources.training_arguments import OLD_KEYS
from hf_fsdp_plugin.vocabulary import find

_CONSTRUCTOR: Final = "transformers.training_args:TrainingArguments.__init__"
"""The target of the hook whose replacement is :func:`init_arguments`."""
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
    with holding(_given, {**_given.get(), **given}):
        original(*args, **kwargs)


def init_parser(original: Callable[..., None], parser: Any, dataclass_types: Any = None, **kwargs: Any) -> None:
    """Add the arguments to an ``HfArgumentParser`` for ``TrainingArguments``."""
    if dataclass_types is not None:
        given = dataclass_types if isinstance(dataclass_types, Iterable) else [dataclass_types]
        dataclass_types = [_with_old_fields(kind) for kind in given]
    original(dataclass_types, **kwargs)


@functools.cache
def _with_old_fields(kind: Any) -> Any:
    """Return a dataclass that has the arguments as fields, and that creates instances of ``kind``.

    A class other than a subclass of ``TrainingArguments``, or one with fields of these names, is returned itself.
    """
    from transformers import TrainingArguments

    if not isinstance(kind, type) or not issubclass(kind, TrainingArguments):
        return kind
    own = {field.name for field in dataclasses.fields(kind)}
    added = [name for name in OLD_KEYS if name not in own]

    def new(_: type, **given: Any) -> Any:
        return kind(**{name: value for name, value in given.items() if name not in added or value is not None})

    fields = [(name, str | None, dataclasses.field(default=None, metadata={"help": _help(name)})) for name in added]
    namespace = {"__new__": new, "__module__": kind.__module__, "__doc__": kind.__doc__}
    return dataclasses.make_dataclass(kind.__name__, fields, bases=(kind,), namespace=namespace) if added else kind


def _help(name: str) -> str:
    row = find(name, ("fsdp",))
    assert row is not None
    return row.about.replace("%", "%%")


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
