"""Facts about FSDP2 by torch's version, against the installed torch."""

import dataclasses

import pytest
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard import _fsdp_param

from hf_fsdp_plugin.contracts import SUPPORTED, release_of
from hf_fsdp_plugin.torch_private.fsdp2 import BEHAVIORS, behavior_of, installed_behavior


@pytest.mark.parametrize(
    ("version", "since"),
    [("2.11.0", "2.11"), ("2.13.0+cpu", "2.11"), ("2.14.1", "2.11"), ("2.15.0", "2.15"), ("2.15.0a0+git1", "2.15"),
     ("2.16.0.dev20270101", "2.15"), ("3.0", "2.15")],
)  # fmt: skip
def test_version_selects_the_behavior(version: str, since: str):
    assert behavior_of(version).since == since


def test_rows_ascend_from_the_oldest_supported_torch():
    releases = [release_of(row.since) for row in BEHAVIORS]
    assert releases == sorted(releases)
    assert BEHAVIORS[0].since == SUPPORTED["torch"][0]


def test_facts_match_the_installed_torch():
    facts = installed_behavior()
    fields = {field.name for field in dataclasses.fields(MixedPrecisionPolicy)}
    assert facts.dtype_per_parameter == ("param_dtype_override_fn" in fields)
    assert facts.accumulates_in_place == (not hasattr(_fsdp_param.FSDPParam, "to_accumulated_grad_if_needed"))
