"""The scan of a pickle's instructions, compared with Python's disassembler."""

from __future__ import annotations

import pickle
import pickletools

import pytest

from hf_fsdp_plugin.checkpoint.formats.pickle_scan import largest_memo
from hf_fsdp_plugin.checkpoint.formats.pickles import read_pickle
from hf_fsdp_plugin.problems import CheckpointError


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_largest_memo_index_matches_the_disassembler(protocol: int) -> None:
    value = [{str(i): (i, -i, i * 1.5, b"r" * i, "p9\n" * i, 7**i, None, True, {i}, [i])} for i in range(300)]
    data = pickle.dumps(value, protocol)
    explicit = [int(number) for op, number, _ in pickletools.genops(data) if op.name in ("LONG_BINPUT", "PUT")]
    assert largest_memo(data) == max(explicit, default=0)
    assert len(explicit) == 0 or max(explicit) > 600
    assert read_pickle(data, "x") == value


@pytest.mark.parametrize("put", [b"r\xff\xff\xff\x7f", b"p2147483647\n", b"p+2_147_483_647 \n"])
def test_large_memo_index_is_refused(put: bytes) -> None:
    with pytest.raises(CheckpointError, match=r"x: .*FSDP-E455"):
        read_pickle(b"\x80\x02N" + put + b".", "x")


@pytest.mark.parametrize("data", [b"", b"\xff", b"\x80", b"X\xff\xff\xff\xff", b"cmodule", b"pabc\n."])
def test_scan_stops_at_invalid_instructions(data: bytes) -> None:
    assert largest_memo(data) == 0
