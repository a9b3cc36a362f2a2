"""Contracts: what this package relies on in other libraries without a promise of theirs.

Each private name, attribute or behavior is one row of data, in the file that uses it: what is relied on, for what, and
what happens without it. The files are ``torch_private/*.py`` and ``integrations/<library>/private.py``; replaced
functions are rows of :mod:`hf_fsdp_plugin.integrations.hooks`. ``hf-fsdp doctor`` probes all rows on the installed
versions.

A row that does not hold ends neither in an ``AttributeError`` nor in a wrong result: the functions of these files raise
:class:`ContractError`. The report catches it and shows the value as unobservable; optional features catch it and are
off, with a warning; otherwise it ends the run with the code FSDP-E620. This module imports no other library.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import linecache
import traceback
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from types import MappingProxyType
from typing import Any, Final, Literal, TypeVar

from hf_fsdp_plugin.messages import printer
from hf_fsdp_plugin.problems import Problem, SpecError

Without = Literal["off", "unobservable", "refused"]
"""Without a contract, a feature is off with a warning, a value of the report is unobservable, or what needs the contract
is refused with FSDP-E620."""

SUPPORTED: Final[Mapping[str, tuple[str, str]]] = MappingProxyType(
    {
        "torch": ("2.11", "2.15"),
        "transformers": ("5.17", "5.23"),
        "accelerate": ("1.15", "1.15"),
        "peft": ("0.21", "0.21"),
        "trl": ("1.16", "1.16"),
    }
)
"""Library -> the oldest supported and the newest tested version. ``setup.cfg`` requires the oldest ones."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Contract:
    """One name or behavior of another library that this package relies on.

    Attributes:
        target: ``module:name`` or ``module:Class.attribute``; for a behavior, ``module:name`` of what behaves.
        use: what needs it, as a noun phrase.
        without: what happens if it does not hold.
        instead: names that other supported versions have in place of the target's last name.
        behavior: the behavior, as one sentence; empty for a name, which only has to exist.
        probe: ``module:function`` of this package that returns whether the behavior holds; only for behaviors.
    """

    target: str
    use: str
    without: Without
    instead: tuple[str, ...] = ()
    behavior: str = ""
    probe: str = ""

    @property
    def library(self) -> str:
        return self.target.partition(".")[0].partition(":")[0]

    @property
    def name(self) -> str:
        """The last name of the target."""
        return self.target.rpartition(":")[2].rpartition(".")[2]

    def to_json(self) -> dict[str, Any]:
        return {name: value for name in self.__slots__ if (value := getattr(self, name)) not in ("", ())}


def contracts_of(owner: str, without: Without, use: str, *names: str) -> tuple[Contract, ...]:
    """Return one row for each name.

    Args:
        owner: ``module`` or ``module:Class`` that has the names.
        names: a name, or ``"new|old"`` if other supported versions have another name in its place.
    """
    separator = "." if ":" in owner else ":"
    split = [name.split("|") for name in names]
    return tuple(
        Contract(target=f"{owner}{separator}{name}", use=use, without=without, instead=tuple(instead))
        for name, *instead in split
    )


class ContractError(SpecError):
    """A contract does not hold on the installed versions.

    Attributes:
        contract: the row; ``None`` if it cannot be told which one.
    """

    def __init__(self, contract: Contract | None, detail: str) -> None:
        library = contract.library if contract is not None else "torch"
        oldest, newest = SUPPORTED.get(library, ("", ""))
        remedy = f"Install {library}>={oldest},<{_next_minor(newest)}, or a newer hf_fsdp_plugin." if oldest else ""
        use = f", which {contract.use} needs" if contract is not None else ""
        self.contract = contract
        message = f"{library} {installed_version(library) or ''} {detail}{use}."
        super().__init__([Problem(code="FSDP-E620", message=message, fix=f"{remedy} `hf-fsdp doctor` lists all.")])

    @property
    def reason(self) -> str:
        """The message without remedy, for the report."""
        return self.problems[0].message


def missing(contract: Contract) -> ContractError:
    """Return the error of a name that does not exist."""
    return ContractError(contract, f"has no {contract.target.partition(':')[2]} in {contract.target.partition(':')[0]}")


def installed_version(library: str) -> str | None:
    """Return the version of an installed distribution; ``None`` if it is not installed."""
    try:
        return version(library)
    except PackageNotFoundError:
        return None


def release_of(text: str) -> tuple[int, ...]:
    """Return the release of a version as numbers: ``(2, 13, 0)`` for ``2.13.0+cpu`` and for ``2.13.0rc1``."""
    numbers = []
    for part in text.partition("+")[0].split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        numbers.append(int(digits))
        if digits != part:
            break
    return tuple(numbers)


def _next_minor(text: str) -> str:
    major, minor, *_ = release_of(text)
    return f"{major}.{minor + 1}"


def check_versions() -> list[Problem]:
    """Return an error for each installed library below the supported range, and a warning for each above it.

    Reads package metadata only. A library that is not installed is skipped.
    """
    problems = []
    for library, (oldest, newest) in SUPPORTED.items():
        found = installed_version(library)
        if found is None:
            continue
        if release_of(found) < release_of(oldest):
            message = f"{library} {found} is installed, but hf_fsdp_plugin needs {library} {oldest} or newer."
            problems.append(
                Problem(code="FSDP-E623", message=message, fix=f"Run: pip install --upgrade '{library}>={oldest}'")
            )
        elif release_of(found)[:2] > release_of(newest):
            message = f"{library} {found} is newer than the newest tested version, {newest}."
            fix = "`hf-fsdp doctor` shows which features are off with it."
            problems.append(Problem(code="FSDP-W622", message=message, fix=fix))
    return problems


def load(target: str, rows: Sequence[Contract]) -> Any:
    """Import the target of one of ``rows``. If it does not exist, return an object that raises when it is used."""
    row = next(row for row in rows if row.target == target)
    module, _, path = target.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for name in path.split("."):
            found = getattr(found, name)
    except (ImportError, AttributeError):
        return Missing(row)
    return found


class Missing:
    """Stands for a name that does not exist. Every use of it raises :class:`ContractError`."""

    def __init__(self, contract: Contract) -> None:
        self.__dict__["contract"] = contract

    def __getattr__(self, name: str) -> Any:
        raise missing(self.__dict__["contract"])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise missing(self.__dict__["contract"])

    def __instancecheck__(self, instance: object) -> bool:
        raise missing(self.__dict__["contract"])

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        """Let a class be derived from it. Creating an instance of that class raises the error."""

        def refuse(*args: Any, **kwargs: Any) -> Any:
            raise missing(self.__dict__["contract"])

        return (type("MissingBase", (), {"__init__": refuse}),)


def guard(namespace: dict[str, Any], rows: Sequence[Contract]) -> None:
    """Make the public functions of a module raise :class:`ContractError` for names and signatures that have changed.

    Call it at the end of a file that uses private names. An error that is not about a row is not changed.

    Args:
        namespace: ``globals()`` of the module.
        rows: the rows of the module.
    """
    by_name = {name: row for row in rows for name in (row.name, *row.instead)}
    file = namespace["__file__"]
    for name, function in list(namespace.items()):
        own = inspect.isfunction(function) and function.__module__ == namespace["__name__"]
        if own and not name.startswith("_"):
            namespace[name] = _guarded(function, file, by_name)


def _guarded(function: Callable[..., Any], file: str, rows: Mapping[str, Contract]) -> Callable[..., Any]:
    inner = getattr(function, "__wrapped__", None)
    if inspect.isgeneratorfunction(inner):  # decorated by contextmanager
        return contextmanager(_guarded(inner, file, rows))
    if inspect.isgeneratorfunction(function):

        @functools.wraps(function)
        def generate(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
            try:
                return (yield from function(*args, **kwargs))
            except (AttributeError, ImportError, TypeError) as error:
                raise _as_contract_error(error, file, rows) from error

        return generate

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except (AttributeError, ImportError, TypeError) as error:
            raise _as_contract_error(error, file, rows) from error

    return call


def _as_contract_error(error: Exception, file: str, rows: Mapping[str, Contract]) -> Exception:
    """Return the error of the row that an exception is about, or else the exception.

    Errors that a function of the library or of the user has raised are not changed.
    """
    place = [
        (frame.f_code.co_filename, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if frame.f_code.co_name not in ("__getattr__", "__getattribute__")
    ][-1]
    if place[0] != file:
        return error
    if isinstance(error, AttributeError):
        row = rows.get(error.name or "")
        return error if row is None else missing(row)
    # The line that imports a name that does not exist, or that calls a function that has other parameters.
    source = linecache.getline(*place)
    named = next((row for name, row in rows.items() if name in source), None)
    if named is None:
        return error
    return missing(named) if isinstance(error, ImportError) else ContractError(named, f"has changed: {error}")


Result = TypeVar("Result")


def off_without(feature: str, default: Result) -> Callable[[Callable[..., Result]], Callable[..., Result]]:
    """Decorator of an optional feature: if a contract does not hold, warn once and return ``default``.

    Args:
        feature: what is off, as a noun phrase in the plural or an uncountable one: ``names of units in messages``.
    """

    def decorate(function: Callable[..., Result]) -> Callable[..., Result]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Result:
            try:
                return function(*args, **kwargs)
            except ContractError as error:
                warn_off(feature, error)
                return default

        return call

    return decorate


@contextmanager
def off_if_missing(feature: str) -> Iterator[None]:
    """Leave the block if a contract does not hold, and warn once."""
    try:
        yield
    except ContractError as error:
        warn_off(feature, error)


def warn_off(feature: str, error: ContractError) -> None:
    """Warn once that a feature is off."""
    printer.print_once(off_warning(feature, error.reason))


def off_warning(feature: str, reason: str) -> Problem:
    """Return the warning that a feature is off."""
    return Problem(
        code="FSDP-W621", message=f"{feature}: off. {reason}", fix="`hf-fsdp doctor` lists what else is off."
    )
