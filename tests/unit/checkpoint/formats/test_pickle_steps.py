"""The instructions of a pickle are followed as Python's unpickler does, until they take too much."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from typing import Any

import pytest

from hf_fsdp_plugin.checkpoint.formats.pickles import MAX_TUPLE, read_pickle, refuse_excessive
from hf_fsdp_plugin.problems import CheckpointError
from tests.unit.checkpoint.hostile_pickles import ATTACKS


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_every_instruction_of_python_is_followed(protocol: int) -> None:
    shared = (1, (2, "x"))
    value: Any = [{str(i): (i, -i, i * 1.5, b"r" * i, "p9\n" * i, 7**i, None, True, {i}, [i])} for i in range(300)]
    value += [OrderedDict(a=shared), {shared: 1, (3, shared): frozenset([shared])}, [shared] * 3000]
    data = pickle.dumps(value, protocol)
    found = read_pickle(data, "x")
    assert found == value and found[-1][0] is found[-1][2999]
    refuse_excessive(data, "x")
    refuse_excessive(pickle.dumps({pickle.Pickler: bytearray(b"z")}, protocol) + data, "x")


def test_memo_does_not_grow_with_its_indices() -> None:
    for put in (b"r\xff\xff\xff\x7f", b"p2147483647\n"):
        assert read_pickle(b"\x80\x02N" + put + b".", "x") is None


def test_attribute_is_not_called_to_fill_a_container() -> None:
    made = b"\x80\x02ctorch\nTensor\n)\x81}X\x06\x00\x00\x00extendcbuiltins\nset\nsb(K\x01e."
    with pytest.raises(CheckpointError, match="FSDP-E453"):
        read_pickle(made, "x")


def test_key_of_a_storage_is_a_text() -> None:
    """Else its text is made, which takes as long as lists of shared lists are large."""
    key = b"]" + b"".join(b"q%c0(h%ch%cl" % (i, i, i) for i in range(60))
    with pytest.raises(CheckpointError, match="FSDP-E453"):
        read_pickle(b"\x80\x02(X\x07\x00\x00\x00storagectorch\nFloatStorage\n" + key + b"tQ.", "x")


@pytest.mark.parametrize(
    "data", [b"", b"\xff", b"\x80", b"X\xff\xff\xff\xff", b"cmodule", b"pabc\n.", b"0", b"t", b"u"]
)
def test_scan_stops_at_invalid_instructions(data: bytes) -> None:
    refuse_excessive(data, "x")


@pytest.mark.parametrize("name", ATTACKS)
def test_pickle_that_exhausts_time_or_stack_is_refused(name: str) -> None:
    with pytest.raises(CheckpointError, match=r"FSDP-E455"):
        read_pickle(ATTACKS[name], "x")


def test_scan_goes_on_after_unknown_attributes() -> None:
    build = b"\x80\x02}ctorch\nTensor\n)\x81K\x05\x85b0"
    bomb = ATTACKS["a key of shared tuples"].removeprefix(b"\x80\x02}")
    with pytest.raises(CheckpointError, match="FSDP-E455"):
        refuse_excessive(build + bomb, "x")


def test_scan_of_a_later_pickle_refuses_it() -> None:
    with pytest.raises(CheckpointError, match=r"x: .*FSDP-E455"):
        refuse_excessive(pickle.dumps([1], 2) + ATTACKS["a key of shared tuples"], "x")


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_largest_tuple_is_read(protocol: int) -> None:
    value = {"params": tuple(range(MAX_TUPLE - 1))}
    assert read_pickle(pickle.dumps(value, protocol), "x") == value
