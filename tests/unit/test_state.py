"""The state of a process, and of an object: when parts are created, found, ended and copied."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from hf_fsdp_plugin.state import Parts, Process, find_part, own_parts, parts_of


class Older:
    pass


class Newer:
    pass


def recorded(name: str, closed: list[str], error: Exception | None = None) -> type:
    """A class of parts that records when one of it is closed."""

    class Part:
        def close(self) -> None:
            closed.append(name)
            if error is not None:
                raise error

    return Part


def test_part_is_created_at_the_first_call() -> None:
    process = Process()
    older = process.owns(Older)
    assert process.find(Older) is None
    assert older() is older() is process.get(Older) is process.find(Older)


def test_parts_are_closed_newest_first_and_created_anew() -> None:
    process, closed = Process(), list[str]()
    parts = [process.owns(recorded(name, closed)) for name in ("a", "b", "c")]
    before = [parts[position]() for position in (1, 0, 2)]
    process.close()
    assert closed == ["c", "a", "b"]
    assert not process._parts
    assert [parts[position]() for position in (1, 0, 2)] != before


def test_kept_part_is_closed_and_kept() -> None:
    process, closed = Process(), list[str]()
    kept = process.owns(recorded("kept", closed), kept=True)
    before = kept()
    process.close()
    assert closed == ["kept"] and kept() is before


def test_error_of_a_part_does_not_keep_the_others_open() -> None:
    process, closed = Process(), list[str]()
    for name, error in (("a", None), ("b", ValueError("of b")), ("c", None)):
        process.get(recorded(name, closed, error))
    with pytest.raises(ValueError, match="of b"):
        process.close()
    assert closed == ["c", "b", "a"] and not process._parts


def test_part_that_a_closed_one_asks_for_is_closed_too() -> None:
    process, closed = Process(), list[str]()
    newer = process.owns(recorded("newer", closed))

    class Asking:
        def close(self) -> None:
            newer()

    process.get(Asking)
    newer()
    process.close()
    assert closed == ["newer", "newer"] and not process._parts


def test_part_of_a_wrapped_object_is_found_through_the_wrapper() -> None:
    model = nn.Linear(2, 2)
    assert find_part(model, Older) is None and not hasattr(model, "_hf_fsdp_parts")
    older = parts_of(model).get(Older)
    compiled = torch.compile(model)
    assert find_part(compiled, Older) is older and parts_of(compiled) is parts_of(model)


def test_own_parts_of_a_wrapper_are_others() -> None:
    model = nn.Linear(2, 2)
    parts_of(model).get(Older)
    compiled: Any = torch.compile(model)
    own_parts(compiled).put(Newer())
    assert find_part(compiled, Older) is None and find_part(model, Newer) is None


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))])
def test_copies_begin_without_parts(copied: Any) -> None:
    model = nn.Linear(2, 2)
    older = parts_of(model).get(Older)
    other = copied(model)
    assert find_part(other, Older) is None
    assert parts_of(other).get(Older) is not older and find_part(model, Older) is older


def test_pickle_needs_no_module_of_this_package() -> None:
    assert b"hf_fsdp" not in pickle.dumps(Parts())
