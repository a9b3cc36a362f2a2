"""Losses of sentence-transformers that have parameters or replace forwards train like an unsharded model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.matrices import slow
from tests.support.ranks import RankError, Ranks

pytest.importorskip("sentence_transformers")

from tests.gloo import cases_losses as cases


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("case", ["softmax", slow("denoising")])
def test_loss_with_parameters_equals_one_process(
    one_rank: Ranks, two_ranks: Ranks, tmp_path: Path, version: int, case: str
) -> None:
    expected = one_rank.run(cases.train, str(tmp_path), 0, case)[0]
    first, second = two_ranks.run(cases.train, str(tmp_path), version, case)
    assert first["losses"] == pytest.approx(expected["losses"], rel=1e-5)
    assert all(torch.equal(*pair) for pair in zip(first["loss"], second["loss"], strict=True))
    pairs = zip(first["loss"], expected["loss"], strict=True)
    assert all(torch.allclose(*pair, atol=1e-5) for pair in pairs)


@pytest.mark.cpu_ranks("the losses fail with DistributedDataParallel on devices, which copies the dicts they share")
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("case", ["adaptive", slow("gist"), slow("matryoshka")])
def test_loss_equals_unsharded_ranks(two_ranks: Ranks, tmp_path: Path, version: int, case: str) -> None:
    expected = two_ranks.run(cases.train, str(tmp_path), 0, case)[0]
    result = two_ranks.run(cases.train, str(tmp_path), version, case)[0]
    assert result["losses"] == pytest.approx(expected["losses"], rel=1e-5)
    assert len(set(expected["losses"])) == 4


@pytest.mark.parametrize(("version", "kind"), [(1, "FULL"), (2, "SHARDED"), slow(1, "LOCAL")])
def test_state_of_parameters_of_loss_is_loaded(two_ranks: Ranks, tmp_path: Path, version: int, kind: str) -> None:
    saved, loaded = two_ranks.run(cases.resume, str(tmp_path), version, kind)[0]
    assert any(tensor.any() for tensor in saved)
    assert all(torch.equal(*pair) for pair in zip(saved, loaded, strict=True))


def test_loss_with_weights_of_the_model_is_refused(two_ranks: Ranks, tmp_path: Path) -> None:
    with pytest.raises(RankError, match="FSDP-E654"):
        two_ranks.run(cases.train, str(tmp_path), 2, "denoising_tied")
