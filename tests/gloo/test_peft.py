"""Adapters of PEFT match training in one process, with and without ``use_orig_params``, or are refused."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from ranks import RankError, Ranks
from tiny import parallel_config
from training import assert_same_training, differing, reference, sgd

pytest.importorskip("peft")

import cases_peft as cases

BACKENDS = {
    "fsdp1": {"version": 1},
    "flat": {"version": 1, "fsdp_use_orig_params": False},
    "fsdp2": {"version": 2},
}
QUICK = ("lora", "dora", "ia3", "modules", "prompt")
OTHERS = ("rslora", "embedding", "prefix", "ptuning", "loha", "vera", "two")


@cache
def reference_of(kind: str) -> dict[str, Any]:
    return reference(f"peft-{kind}", sgd, cases.NUM_STEPS)


def config_of(backend: str, **settings: Any) -> dict[str, Any]:
    return parallel_config("full_shard", world_size=2, **{**BACKENDS[backend], **settings})


def train_kind(ranks: Ranks, kind: str, backend: str, **settings: Any) -> dict[str, Any]:
    return ranks.run(cases.train_adapter, config_of(backend, **settings), kind)[0]


def codes(run: dict[str, Any]) -> list[str]:
    return [problem["code"] for problem in run["report"]["problems"]]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", [*QUICK, *(pytest.param(kind, marks=pytest.mark.slow) for kind in OTHERS)])
def test_adapter_trains_as_in_one_process(two_ranks: Ranks, kind: str, backend: str) -> None:
    run = train_kind(two_ranks, kind, backend)
    assert_same_training(run, reference_of(kind))
    assert differing(run["report"]) == []
    assert ("FSDP-W265" in codes(run)) == (backend == "flat")


@pytest.mark.parametrize("kind", ["bias", "tokens"])
def test_bare_adapter_parameters_need_original_parameters(two_ranks: Ranks, kind: str) -> None:
    with pytest.raises(RankError, match=r"(?s)fsdp_use_orig_params: true.*FSDP-E222"):
        train_kind(two_ranks, kind, "flat")
    for backend in ("fsdp1", "fsdp2"):
        assert_same_training(train_kind(two_ranks, kind, backend), reference_of(kind))
