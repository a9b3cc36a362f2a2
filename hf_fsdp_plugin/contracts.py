"""Contracts: what this package relies on in other libraries without a promise of theirs.

Each private name, attribute or behavior is one row of data: what is relied on, for what, and what happens without it.
The rows are in ``torch_private/contracts.yaml``, and in ``integrations/<library>/private.py``; replaced functions are
rows of :mod:`hf_fsdp_plugin.integrations.hooks`. ``hf-fsdp doctor`` probes all rows on the installed
versions.

A row that does not hold ends neither in an ``AttributeError`` nor in a wrong result: the functions of these files raise
:class:`ContractError`. The report catches it and shows the value as unobservable; optional features catch it and are
off, with a warning; otherwise it ends the run with the code FSDP-E620. This module imports no other library.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import traceback
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ContextDecorator, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal, ParamSpec, TypeVar

import yaml

from hf_fsdp_plugin.messages import print_once
from hf_fsdp_plugin.problems import Problem, SpecError
from hf_fsdp_plugin.supported import SUPPORTED, installed_versions, release_of

Without = Literal["off", "unobservable", "refused"]
"""What happens without a contract: a feature is off with a warning, a value of the report is unobservable, or an error.

The code of the warning is FSDP-W621, that of the error FSDP-E620.
"""

_LOADER: Final = getattr(yaml, "CBaseLoader", yaml.BaseLoader)
"""All values are text: other loaders read ``off`` as false."""
_DOCTOR: Final = "`hf-fsdp doctor` lists what does not hold."


@dataclass(frozen=True, kw_only=True, slots=True)
class Contract:
    """One name or behavior of another library that this package relies on.

    Attributes:
        target: ``module:name`` or ``module:Class.attribute``; for a behavior, ``module:name`` of what behaves.
        use: what needs it, as a noun phrase.
        without: what happens if it does not hold.
        instead: names that other supported versions have in place of the target's last name.
        behavior: what the library does with the name, as one sentence; empty for a name that only has to exist. The
            probe of a behavior checks that the source of the module contains the name.
        since: the release of the library that added the name, if it is not needed with older supported releases.
    """

    target: str
    use: str
    without: Without
    instead: tuple[str, ...] = ()
    behavior: str = ""
    since: str = ""

    @property
    def library(self) -> str:
        return self.target.partition(".")[0].partition(":")[0]

    @property
    def name(self) -> str:
        """The last name of the target."""
        return self.target.rpartition(":")[2].rpartition(".")[2]


def contracts_of(owner: str, without: Without, use: str, *names: str, **fields: str) -> tuple[Contract, ...]:
    """Return one row for each name.

    Args:
        owner: ``module`` or ``module:Class`` that has the names.
        names: a name, or ``"new|old"`` if other supported versions have another name in its place.
        fields: ``behavior`` and ``since`` of all rows.
    """
    separator = "." if ":" in owner else ":"
    split = [name.split("|") for name in names]
    return tuple(
        Contract(target=f"{owner}{separator}{name}", use=use, without=without, instead=tuple(instead), **fields)
        for name, *instead in split
    )


@functools.cache
def _read_table(path: Path) -> Any:
    return yaml.load(path.read_text(encoding="utf-8"), Loader=_LOADER)


def contracts_in(file: str) -> tuple[Contract, ...]:
    """Return the rows of a file in ``contracts.yaml`` of its folder, which describes the groups of rows."""
    path = Path(file)
    found: list[Contract] = []
    for group in _read_table(path.with_name("contracts.yaml"))[path.stem]:
        fields = {name: group[name] for name in ("behavior", "since") if name in group}
        for owner, names in group["names"].items():
            found += contracts_of(owner, group["without"], group["use"], *names.split(), **fields)
    return tuple(found)


class ContractError(SpecError):
    """A contract does not hold on the installed versions.

    Attributes:
        contract: the row.
    """

    def __init__(self, contract: Contract, detail: str) -> None:
        self.contract, library = contract, contract.library
        remedy = ""
        if library in SUPPORTED:
            oldest, newest = SUPPORTED[library]
            major, minor, *_ = release_of(newest)
            remedy = f"Install {library}>={oldest},<{major}.{minor + 1}, or a newer hf_fsdp_plugin. "
        name = " ".join(filter(None, (library, installed_versions().get(library))))
        message = f"{name} {detail}, which is needed for {contract.use}."
        super().__init__([Problem(code="FSDP-E620", message=message, fix=remedy + _DOCTOR)])

    @property
    def reason(self) -> str:
        """The message without remedy, for the report."""
        return self.problems[0].message


def missing_name_error(contract: Contract) -> ContractError:
    """Return the error of a name that does not exist."""
    return ContractError(contract, f"has no {contract.target.partition(':')[2]} in {contract.target.partition(':')[0]}")


def missing_attribute_error(error: AttributeError, rows: Sequence[Contract]) -> ContractError | None:
    """Return the error of the row whose name, or class with the name, an object lacks; ``None`` if there is no row."""
    found = (row for row in rows if error.name in (*row.target.partition(":")[2].split("."), *row.instead))
    return next(map(missing_name_error, found), None)


def import_target(target: str, rows: Sequence[Contract]) -> Any:
    """Import the target of one of ``rows``, or a module that has targets.

    If it does not exist, return an object that raises when it is used.
    """
    row = next(row for row in rows if row.target == target or row.target.startswith(f"{target}:"))
    module, _, path = target.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for name in path.split(".") if path else ():
            found = getattr(found, name)
    except (ImportError, AttributeError):
        return Missing(row)
    return found


class Missing:
    """Stands for a name that does not exist. Every use of it raises :class:`ContractError`."""

    def __init__(self, contract: Contract) -> None:
        self.__dict__["contract"] = contract

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise missing_name_error(self.__dict__["contract"])

    __getattr__ = __call__ = __instancecheck__ = _refuse

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        """Let a class be derived from it. Creating an instance of that class raises the error."""
        return (type("MissingBase", (), {"__init__": lambda *args, **kwargs: self._refuse()}),)


def guard_functions(
    namespace: dict[str, Any], rows: Sequence[Contract], off: Mapping[str, Any] = MappingProxyType({})
) -> None:
    """Make the public functions of a module raise :class:`ContractError` for names that do not exist.

    Call it at the end of a file that uses private names. An error that is not about a row is not changed.

    Args:
        namespace: ``globals()`` of the module.
        rows: the rows of the module.
        off: name of a function -> what it returns instead of the error, after a warning.
    """
    guard = _Guard(namespace["__file__"], rows)
    for name, function in list(namespace.items()):
        own = inspect.isfunction(function) and function.__module__ == namespace["__name__"]
        if own and not name.startswith("_"):
            guarded = _guarded(function, guard)
            namespace[name] = off_without(off[name])(guarded) if name in off else guarded


def _guarded(function: Callable[..., Any], guard: _Guard) -> Callable[..., Any]:
    inner = getattr(function, "__wrapped__", None)
    if inspect.isgeneratorfunction(inner):  # decorated by contextmanager
        return contextmanager(_guarded(inner, guard))
    if not inspect.isgeneratorfunction(function):
        return guard(function)

    @functools.wraps(function)
    def generate(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
        with guard:
            return (yield from function(*args, **kwargs))

    return generate


class _Guard(ContextDecorator):
    """Raises the error of a contract in place of an exception that is about its row.

    Args:
        file: the file whose functions use the names of the rows. An exception from elsewhere is not changed.
    """

    def __init__(self, file: str, rows: Sequence[Contract]) -> None:
        self._folder, self._rows = os.path.dirname(file), rows

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, (AttributeError, ImportError)) and (broken := self._broken_contract(error)):
            raise broken from error

    def _broken_contract(self, error: AttributeError | ImportError) -> ContractError | None:
        """Return the error of the row that an exception is about; ``None`` if a library's or user's code raised it."""
        code = [
            frame.f_code
            for frame, _ in traceback.walk_tb(error.__traceback__)
            if frame.f_code.co_name not in ("__get__", "__getattr__", "__getattribute__")
        ][-1]
        if os.path.dirname(code.co_filename) != self._folder:
            return None
        if isinstance(error, AttributeError):
            return missing_attribute_error(error, self._rows)
        found = (row for row in self._rows if any(f"'{name}'" in str(error) for name in (row.name, *row.instead)))
        return next(map(missing_name_error, found), None)


_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")
_Default = TypeVar("_Default")


def off_without(
    default: _Default,
) -> Callable[[Callable[_Arguments, _Result]], Callable[_Arguments, _Result | _Default]]:
    """Decorator of an optional feature: if a contract does not hold, warn once and return ``default``."""

    def decorate(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result | _Default]:
        @functools.wraps(function)
        def call(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result | _Default:
            try:
                return function(*args, **kwargs)
            except ContractError as error:
                print_once(off_warning(error))
                return default

        return call

    return decorate


def off_warning(error: ContractError) -> Problem:
    """Return the warning that a feature is off, or a fact unknown, because a contract does not hold."""
    return Problem(code="FSDP-W621", message=f"A feature is off. {error.reason}", fix=_DOCTOR)
