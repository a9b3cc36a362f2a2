"""Pickles with names of checkpoints are read; all others are refused without being executed."""

from __future__ import annotations

import builtins
import os
import pickle
import subprocess
from collections import OrderedDict
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import TensorProperties

from hf_fsdp_plugin.checkpoint.formats.pickles import read_pickle
from hf_fsdp_plugin.problems import CheckpointError


class Call:
    """An object that is pickled as a function call."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
@pytest.mark.parametrize(
    ("function", "arguments", "name"),
    [
        (os.system, ("touch {marker}",), r"posix\.system"),
        (builtins.eval, ("open('{marker}', 'w')",), r"\w*builtin\w*\.eval"),
        (builtins.exec, ("open('{marker}', 'w')",), r"\w*builtin\w*\.exec"),
        (builtins.__import__, ("os",), r"\w*builtin\w*\.__import__"),
        (subprocess.check_call, (["touch", "{marker}"],), r"\w+\.check_call"),
        (open, ("{marker}", "w"), r"io\.open"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_hostile_name_is_refused_and_not_executed(
    tmp_path: Path, protocol: int, function: Any, arguments: tuple[Any, ...], name: str
) -> None:
    marker = tmp_path / "run"
    filled = tuple(
        a.format(marker=marker) if isinstance(a, str) else [p.format(marker=marker) for p in a] for a in arguments
    )
    data = pickle.dumps({"state": [Call(function, *filled)]}, protocol)
    with pytest.raises(CheckpointError, match=rf"weights\.bin: .*refers to {name},.*FSDP-E454"):
        read_pickle(data, "weights.bin")
    assert not marker.exists()


def test_getattr_returns_the_name_only() -> None:
    data = pickle.dumps(Call(getattr, OrderedDict, "fromkeys"))
    assert read_pickle(data, "x") == "fromkeys"


def test_call_of_a_dtype_is_refused() -> None:
    # torch.float32("touch run"), which torch never writes.
    data = b"ctorch\nfloat32\n(Vtouch run\ntR."
    with pytest.raises(CheckpointError, match="FSDP-E453"):
        read_pickle(data, "x")


@pytest.mark.parametrize("data", [b"", b"\x80\x04", b"not a pickle", pickle.dumps([1, 2, 3])[:-3]])
def test_damaged_pickle_is_not_reported_as_hostile(data: bytes) -> None:
    with pytest.raises(CheckpointError, match="FSDP-E453"):
        read_pickle(data, "x")


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_plain_values_are_read(protocol: int) -> None:
    value = {
        "lr": 1e-3,
        "betas": (0.9, 0.95),
        "params": ["a"],
        "none": None,
        "set": {1, 2},
        "raw": b"\x00\xff",
        "z": 1j,
    }
    assert read_pickle(pickle.dumps(value, protocol), "x") == value
    assert read_pickle(pickle.dumps(PurePosixPath("a/b"), protocol), "x").strip("/") == "a/b"


def test_attributes_in_a_tuple_are_read() -> None:
    properties = TensorProperties(dtype=torch.float16, requires_grad=True, pin_memory=True)
    assert read_pickle(pickle.dumps(properties), "x").dtype == "float16"
