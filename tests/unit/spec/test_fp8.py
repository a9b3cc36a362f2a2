"""The settings of fp8 in every source: keys of Accelerate, their values, and what they imply."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import hf_fsdp_plugin as hfp
from hf_fsdp_plugin.spec import rules
from hf_fsdp_plugin.spec.fsdp_spec import FsdpSpec

CONFIG = {"distributed_type": "FSDP", "mixed_precision": "fp8", "fsdp_config": {"fsdp_version": 2}}


@pytest.fixture(autouse=True)
def both_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchao and Transformer Engine are installed."""
    monkeypatch.setattr(rules, "_is_installed", lambda backend: backend in ("ao", "te"))


def spec_of(fp8_config: dict[str, Any] | None = None, **sources: Any) -> FsdpSpec:
    return hfp.load_spec({**CONFIG, "fp8_config": fp8_config}, **{"environ": {}, **sources})


def test_fp8_computes_everything_else_in_bf16() -> None:
    spec = spec_of()
    assert (spec.launch.mixed_precision, spec.precision.param, spec.precision.reduce) == ("fp8", "bf16", "fp32")
    assert spec.uses_fp8 and rules.fp8_backend(spec) == "ao"


@pytest.mark.parametrize(("version", "gathers"), [(1, False), (2, True)])
def test_default_of_all_gather_depends_on_version(version: int, gathers: bool) -> None:
    config = {**CONFIG, "fsdp_config": {"fsdp_version": version}}
    assert hfp.load_spec(config, environ={}).fp8.all_gather is gathers


@pytest.mark.parametrize(
    "sources",
    [
        {"fp8_config": {"backend": "AO", "enable_fsdp_float8_all_gather": False, "pad_inner_dim": False}},
        {"fp8_config": {"fp8_backend": "torchao", "all_gather": "no", "fp8_pad_inner_dim": "false"}},
        {"command_line": ("--fp8_backend=ao", "--fp8_enable_fsdp_float8_all_gather", "false", "--fp8_pad_inner_dim=0")},
        {"overrides": ("fp8.backend=ao", "fp8.all_gather=false", "fp8.pad_inner_dim=false")},
        {"environ": {"ACCELERATE_FP8_BACKEND": "AO", "ACCELERATE_FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER": "False",
                     "ACCELERATE_FP8_PAD_INNER_DIM": "False"}},
    ],
    ids=["config", "other spellings", "flags", "--set", "environment"],
)  # fmt: skip
def test_settings_are_read_from_each_source(sources: dict[str, Any]) -> None:
    section = spec_of(**sources).fp8
    assert (section.backend, section.all_gather, section.pad_inner_dim) == ("ao", False, False)


def test_options_of_transformer_engine_are_passed_on() -> None:
    """Accelerate's questionnaire writes two keys that its launcher does not read."""
    given = {
        "backend": "TE",
        "fp8_format": "e4m3",
        "margin": 1,
        "amax_history_length": 16,
        "amax_compute_algorithm": "max",
    }
    spec = spec_of(given, environ={"ACCELERATE_FP8_OVERRIDE_WGRAD": "True"})
    assert rules.fp8_backend(spec) == "te"
    assert spec.fp8.te_options == {
        "fp8_format": "E4M3", "margin": 1, "amax_history_len": 16, "amax_compute_algo": "max", "override_wgrad": True,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("backend", "torch", "ao, te or msamp"),
        ("enable_fsdp_float8_all_gather", "sometimes", "true or false"),
        ("margin", "wide", "an integer"),
        ("fp8_format", "E3M4", "HYBRID, E4M3 or E5M2"),
    ],
)
def test_invalid_value_is_one_error(
    problems: Callable[[Any], list[hfp.Problem]], key: str, value: str, expected: str
) -> None:
    (problem,) = problems({**CONFIG, "fp8_config": {key: value}})
    assert problem.code == "FSDP-E101" and key in problem.message and expected in problem.message


def test_rules_do_not_apply_without_fsdp(codes: Callable[[Any], list[str]]) -> None:
    off = {"distributed_type": "MULTI_GPU", "mixed_precision": "fp8", "fp8_config": {"backend": "MSAMP"}}
    assert codes(off) == []
