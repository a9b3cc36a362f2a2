"""The scan of a pickle's instructions, compared with Python's disassembler and its unpickler."""

from __future__ import annotations

import pickle
import pickletools
from collections import OrderedDict
from typing import Any

import pytest
from hostile_pickles import ATTACKS

from hf_fsdp_plugin.checkpoint.formats.pickle_scan import MAX_TUPLE, _scan, _Sizes, excessive
from hf_fsdp_plugin.checkpoint.formats.pickles import read_pickle
from hf_fsdp_plugin.problems import CheckpointError


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_scan_follows_every_instruction(protocol: int) -> None:
    shared = (1, (2, "x"))
    value: Any = [{str(i): (i, -i, i * 1.5, b"r" * i, "p9\n" * i, 7**i, None, True, {i}, [i])} for i in range(300)]
    value += [OrderedDict(a=shared), {shared: 1, (3, shared): frozenset([shared])}, [shared] * 3000, bytearray(b"z")]
    data = pickle.dumps(value, protocol)
    sizes = _Sizes(len(data))
    assert _scan(data, sizes) == len(data)
    memoized = [op for op, _, _ in pickletools.genops(data) if op.name in ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE")]
    assert len(sizes.memo) == len(memoized) > 600 and sizes.stack == [1] and not sizes.marks
    assert excessive(data) is None


@pytest.mark.parametrize("put", [b"r\xff\xff\xff\x7f", b"p2147483647\n", b"p+2_147_483_647 \n"])
def test_large_memo_index_is_refused(put: bytes) -> None:
    with pytest.raises(CheckpointError, match=r"x: .*FSDP-E455"):
        read_pickle(b"\x80\x02N" + put + b".", "x")


@pytest.mark.parametrize(
    "data", [b"", b"\xff", b"\x80", b"X\xff\xff\xff\xff", b"cmodule", b"pabc\n.", b"0", b"t", b"u"]
)
def test_scan_stops_at_invalid_instructions(data: bytes) -> None:
    assert excessive(data) is None


@pytest.mark.parametrize("name", ATTACKS)
def test_pickle_that_exhausts_time_or_stack_is_refused(name: str) -> None:
    with pytest.raises(CheckpointError, match=r"FSDP-E455"):
        read_pickle(ATTACKS[name], "x")


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_largest_tuple_is_read(protocol: int) -> None:
    value = {"params": tuple(range(MAX_TUPLE - 1))}
    assert read_pickle(pickle.dumps(value, protocol), "x") == value
