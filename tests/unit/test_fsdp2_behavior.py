"""Facts about FSDP2 by torch's version, against the installed torch."""

import dataclasses

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard import _fsdp_param

from hf_fsdp_plugin.torch_private.fsdp2 import is_since_2_15


@pytest.mark.parametrize(
    ("version", "expected"),
    [("2.11.0", False), ("2.13.0+cpu", False), ("2.14.1", False), ("2.15.0", True), ("2.15.0a0+git1", True),
     ("2.16.0.dev20270101", True), ("3.0", True)],
)  # fmt: skip
def test_version_selects_the_behavior(version: str, expected: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch, "__version__", version)
    assert is_since_2_15() is expected


def test_facts_match_the_installed_torch():
    fields = {field.name for field in dataclasses.fields(MixedPrecisionPolicy)}
    assert is_since_2_15() == ("param_dtype_override_fn" in fields)
    assert is_since_2_15() == (not hasattr(_fsdp_param.FSDPParam, "to_accumulated_grad_if_needed"))
