"""Contracts with other libraries: errors of names that do not exist, and what is off without them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from hf_fsdp_plugin.contracts import (
    Contract,
    ContractError,
    Missing,
    contracts_of,
    guard_functions,
    import_target,
    off_without,
)
from hf_fsdp_plugin.messages import printer

ROWS = (
    *contracts_of("torch.nn.modules.module:Module", "refused", "a test", "_renamed", "_new|_old"),
    *contracts_of("torch.nn", "off", "a test", "_no_such_function"),
)


class Stranger:
    """An object of a library without the private names."""

    def two(self, one: int, other: int) -> int:
        return one + other


def reads_renamed(obj: Any) -> Any:
    return obj._renamed


def reads_other(obj: Any) -> Any:
    return obj.other


def reads_later(obj: Any) -> Iterator[Any]:
    yield 1
    yield obj._renamed


@contextmanager
def renamed_value(obj: Any) -> Iterator[Any]:
    yield obj._renamed


def calls_user(function: Any) -> Any:
    return function()


@pytest.fixture
def guarded() -> dict[str, Any]:
    functions = (reads_renamed, reads_other, reads_later, renamed_value, calls_user)
    namespace = {"__file__": __file__, "__name__": __name__, **{each.__name__: each for each in functions}}
    guard_functions(namespace, ROWS)
    return namespace


def code_of(error: pytest.ExceptionInfo[ContractError]) -> str:
    return error.value.problems[0].code


def test_missing_name_is_refused_with_its_versions(guarded: dict[str, Any]) -> None:
    with pytest.raises(ContractError) as error:
        guarded["reads_renamed"](Stranger())
    assert code_of(error) == "FSDP-E620"
    assert error.value.contract is ROWS[0]
    assert "Module._renamed" in str(error.value) and "torch>=2.11,<2.16" in str(error.value)


def test_generator_and_context_manager_are_guarded(guarded: dict[str, Any]) -> None:
    values = guarded["reads_later"](Stranger())
    assert next(values) == 1
    with pytest.raises(ContractError):
        next(values)
    with pytest.raises(ContractError), guarded["renamed_value"](Stranger()):
        pass


def test_other_errors_are_not_changed(guarded: dict[str, Any]) -> None:
    with pytest.raises(AttributeError, match="other"):
        guarded["reads_other"](Stranger())
    of_user = eval("lambda: stranger._renamed", {"stranger": Stranger()})  # in another file than the guarded function
    with pytest.raises(AttributeError, match="_renamed"):
        guarded["calls_user"](of_user)


def test_missing_function_raises_when_it_is_used() -> None:
    function = import_target("torch.nn:_no_such_function", ROWS)
    assert isinstance(function, Missing)
    for use in (lambda: function(1), lambda: function.attribute, lambda: isinstance(1, function)):
        with pytest.raises(ContractError):
            use()

    class Derived(function):  # type: ignore[misc, valid-type]
        pass

    with pytest.raises(ContractError):
        Derived()


def test_optional_feature_is_off_with_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    printed: list[object] = []
    monkeypatch.setattr(printer(), "listener", printed.append)
    monkeypatch.setattr(printer(), "printed", set())

    @off_without(7)
    def feature() -> int:
        raise ContractError(ROWS[0], "has no such name")

    assert feature() == feature() == 7
    assert [problem.code for problem in printed] == ["FSDP-W621"]  # type: ignore[attr-defined]


def test_row_of_several_names_lists_the_older_ones() -> None:
    assert ROWS[1] == Contract(
        target="torch.nn.modules.module:Module._new", use="a test", without="refused", instead=("_old",)
    )
    assert (ROWS[1].name, ROWS[1].library) == ("_new", "torch")
