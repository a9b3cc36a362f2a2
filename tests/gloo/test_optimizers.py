"""Each optimizer trains as in one process, saves and resumes, or is refused before the first step."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.gloo import cases_optimizers as cases
from tests.support.ranks import Ranks

SAME = 1e-4
"""Relative difference of losses to one process in fp32."""
BLOCKS = {"8bit": 1e-3, "fp8": 5e-3, "4bit": 2e-2}
"""The same for quantized state: its blocks begin at other elements in a shard, and torchao quantizes only shards whose
size is a multiple of the block size.
"""
RESUMED = 1e-6

E320, E321, E322, E411 = ["FSDP-E320"], ["FSDP-E321"], ["FSDP-E322"], ["FSDP-E411"]
FORMS = {"FSDP1": (1, True), "FSDP1 flat": (1, False), "FSDP2": (2, True)}

EXPECTED: dict[str, tuple[list[str], list[str], list[str] | str]] = {
    "adamw": ([], [], "unchanged"),
    "adamw-foreach": ([], [], "unchanged"),
    "adamw-fused": ([], [], "unchanged"),
    "adamw-amsgrad": ([], [], "unchanged"),
    "adam": ([], [], "unchanged"),
    "sgd": ([], [], "unchanged"),
    "sgd-fused": ([], [], "local"),
    "adagrad": ([], [], "unchanged"),
    "adagrad-fused": ([], [], "local"),
    "adadelta": ([], [], "unchanged"),
    "rmsprop": ([], [], "unchanged"),
    "nadam": ([], [], "unchanged"),
    "radam": ([], [], "unchanged"),
    "adamax": ([], [], "unchanged"),
    "asgd": ([], [], "unchanged"),
    "rprop": ([], [], "local"),
    "lbfgs": (E321, E321, E321),
    "torch-adafactor": (E320, E320, "whole"),
    "muon": (E320, E320, "unchanged"),
    "hf-adafactor": (E320, E320, "whole"),
    "hf-adafactor-relative": (E320, E320, "whole"),
    "bnb-adamw8bit": ([], E322, "local"),
    "bnb-adamw32bit": ([], [], "local"),
    "bnb-paged-adamw8bit": ([], E322, "local"),
    "bnb-lion8bit": ([], E322, "local"),
    "bnb-lion32bit": ([], [], "local"),
    "bnb-rmsprop32bit": ([], [], "local"),
    "bnb-ademamix": ([], E322, "local"),
    "bnb-lamb": (E320, E320, "whole"),
    "lion": ([], [], "local"),
    "schedulefree-adamw": ([], [], "unchanged"),
    "schedulefree-radam": ([], [], "unchanged"),
    "schedulefree-sgd": ([], [], "unchanged"),
    "grokadamw": (E320, E320, "unchanged"),
    "prodigy": (E320, E320, "unchanged"),
    "galore-adamw": (E320, E320, "whole"),
    "galore-adafactor": (E320, E320, "whole"),
    "apollo": (E320, E320, "whole"),
    "torchao-adamw8bit": ([], E322, "unchanged"),
    "torchao-adamw4bit": ([], E322, "unchanged"),
    "torchao-adamwfp8": ([], E322, "unchanged"),
}
"""Name -> codes of the refusal under FSDP1, without original parameters, and under FSDP2, or how its steps run."""

UNKNOWN = {"normalized", "own-kernel"}
QUICK = ("adamw-fused", "sgd-fused", "hf-adafactor", "muon", "bnb-adamw8bit", "schedulefree-adamw")
QUICK_RESUMED = ("hf-adafactor", "bnb-adamw8bit")
RESUMABLE = [name for name, codes in EXPECTED.items() if codes[2] != E321]
SLOW = pytest.mark.slow


def params(names: Any, quick: tuple[str, ...] = QUICK) -> list[Any]:
    return [name if name in quick else pytest.param(name, marks=SLOW) for name in names]


def available(name: str) -> None:
    pytest.importorskip(cases.OPTIMIZERS[name][0].partition(".")[0])


def tolerance(name: str) -> float:
    return next((value for kind, value in BLOCKS.items() if name.endswith(kind)), SAME)


@cache
def losses_of_one_process(name: str, split: bool) -> list[float]:
    return cases.one_process(name, split=split)


def test_every_optimizer_has_an_expectation() -> None:
    assert EXPECTED.keys() | UNKNOWN == cases.OPTIMIZERS.keys()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", params(EXPECTED))
def test_optimizer_trains_as_in_one_process(two_ranks: Ranks, name: str, form: str) -> None:
    available(name)
    (version, use_orig), expected = FORMS[form], EXPECTED[name][list(FORMS).index(form)]
    run = two_ranks.run(cases.train, name, version, use_orig=use_orig)[0]
    if isinstance(expected, list) and expected:
        assert run["codes"] == expected
        return
    assert run["codes"] == []
    assert run["mode"] == (expected or "unchanged")
    assert run["losses"] == pytest.approx(losses_of_one_process(name, use_orig), rel=tolerance(name))


@pytest.mark.parametrize(
    ("name", "version", "is_right"), [("own-kernel", 1, True), ("normalized", 1, False), ("normalized", 2, True)]
)
def test_unknown_optimizer_trains_with_a_warning(two_ranks: Ranks, name: str, version: int, is_right: bool) -> None:
    run = two_ranks.run(cases.train_with_warnings, name, version)[0]
    class_name = cases.OPTIMIZERS[name][0].rpartition(".")[2]
    assert "FSDP-W324" in run["printed"] and f"{class_name} of tests is not in the table" in run["printed"]
    assert (run["codes"], run["mode"]) == ([], "unchanged")
    assert (run["losses"] == pytest.approx(losses_of_one_process(name, True), rel=SAME)) == is_right


@pytest.mark.parametrize("form", ["FSDP1", "FSDP2"])
@pytest.mark.parametrize("name", params(RESUMABLE, QUICK_RESUMED))
def test_resumed_optimizer_continues(two_ranks: Ranks, tmp_path: Path, name: str, form: str) -> None:
    available(name)
    (version, _), expected = FORMS[form], EXPECTED[name][list(FORMS).index(form)]
    if isinstance(expected, list) and expected:
        pytest.skip("refused")
    whole = two_ranks.run(cases.train, name, version)[0]
    first = two_ranks.run(cases.train, name, version, stop=5, save_to=str(tmp_path / "saved"))[0]
    if first["codes"]:
        assert first["codes"] == E411 and name.startswith(("galore", "apollo", "grokadamw"))
        return
    again = two_ranks.run(cases.train, name, version, start=5, resume_from=str(tmp_path / "saved"))[0]
    assert again["codes"] == []
    assert again["losses"] == pytest.approx(whole["losses"][5:], rel=RESUMED)


@pytest.mark.parametrize(
    "name", params(["hf-adafactor", "adagrad", "schedulefree-adamw", "lion", "muon", "prodigy"], QUICK_RESUMED[:1])
)
def test_state_is_resumed_on_one_rank(two_ranks: Ranks, one_rank: Ranks, tmp_path: Path, name: str) -> None:
    available(name)
    whole = two_ranks.run(cases.train, name, 2)[0]
    two_ranks.run(cases.train, name, 2, stop=5, save_to=str(tmp_path / "saved"))
    again = one_rank.run(cases.train, name, 2, start=5, resume_from=str(tmp_path / "saved"))[0]
    assert again["losses"] == pytest.approx(whole["losses"][5:], rel=SAME)


def test_quantized_state_is_refused_by_other_shards(two_ranks: Ranks, one_rank: Ranks, tmp_path: Path) -> None:
    available("bnb-adamw8bit")
    two_ranks.run(cases.train, "bnb-adamw8bit", 2, stop=2, save_to=str(tmp_path / "saved"))
    again = one_rank.run(cases.train, "bnb-adamw8bit", 2, start=2, resume_from=str(tmp_path / "saved"))[0]
    assert again["codes"] == ["FSDP-E426"]


ORDERS = pytest.mark.parametrize("order", ["model first", "optimizer first", "single methods"])


@ORDERS
@pytest.mark.parametrize("name", ["hf-adafactor", "adamw-fused", "bnb-adamw8bit"])
def test_optimizer_prepared_apart_trains_the_same(two_ranks: Ranks, name: str, order: str) -> None:
    available(name)
    run = two_ranks.run(cases.train, name, 2, order=order)[0]
    assert run["losses"] == pytest.approx(losses_of_one_process(name, True), rel=tolerance(name))
    assert run["num_steps"] == cases.NUM_STEPS


@ORDERS
def test_optimizer_prepared_apart_is_refused_the_same(two_ranks: Ranks, order: str) -> None:
    codes = two_ranks.run(cases.train, "hf-adafactor", 1, order=order)[0]["codes"]
    assert [code for code in codes if code != "FSDP-W328"] == ["FSDP-E320"]  # one of the case's groups is empty


@pytest.mark.parametrize("by", ["names", "dimensions"])
@pytest.mark.parametrize("order", ["together", "model first"])
def test_groups_by_dimensions_of_pieces_are_a_warning(two_ranks: Ranks, by: str, order: str) -> None:
    printed = two_ranks.run(cases.printed_about_groups, by, order)[0]
    assert ("FSDP-W328" in printed) == (by == "dimensions" and order == "model first")
