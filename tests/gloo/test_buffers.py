"""The statistics of BatchNorm in evaluations and saved models are those of rank 0, as under DDP."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.gloo import cases_buffers as cases
from tests.support.ranks import Ranks

VERSIONS = [1, 2]


@pytest.mark.parametrize("version", VERSIONS)
def test_saved_buffers_are_those_of_ddp(two_ranks: Ranks, tmp_path: Path, version: int) -> None:
    expected = two_ranks.run(cases.with_ddp)
    ranks = two_ranks.run(cases.save_in_every_way, str(tmp_path), version)
    for form, state in ranks[0]["saved"].items():
        assert state.keys() == expected[0]["state"].keys(), form
        for name, tensor in expected[0]["state"].items():
            torch.testing.assert_close(state[name], tensor, rtol=1e-5, atol=1e-7, msg=f"{form}: {name}")
    assert len(ranks[0]["saved"]) == 5
    for rank, reference in zip(ranks, expected, strict=True):
        assert rank["loss"] == pytest.approx(reference["loss"], rel=1e-5)
    assert ranks[0]["printed"].count("FSDP-N640") == 1


@pytest.mark.parametrize("inner", [False, True])
@pytest.mark.parametrize("version", VERSIONS)
def test_evaluation_uses_buffers_of_rank_0(two_ranks: Ranks, version: int, inner: bool) -> None:
    expected = two_ranks.run(cases.with_ddp)
    first, second = two_ranks.run(cases.evaluate_first, version, inner=inner)
    assert not all(map(torch.equal, first["before"], second["before"])), "the ranks have different statistics"
    assert all(map(torch.equal, first["before"], first["after"]))
    assert all(map(torch.equal, first["after"], second["after"]))
    for rank, reference in zip((first, second), expected, strict=True):
        assert rank["loss"] == pytest.approx(reference["loss"], rel=1e-5)


@pytest.mark.parametrize("version", VERSIONS)
def test_buffers_are_sent_once_per_evaluation(two_ranks: Ranks, version: int) -> None:
    assert two_ranks.run(cases.collectives_of_evaluation, version) == [0, 0]
