"""Every optimizer of the Trainer does what docs/optimizers.md lists for it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.optimizers_runs import train_with_trainer
from tests.support.ranks import Ranks

TABLE = (Path(__file__).parents[2] / "docs" / "optimizers.md").read_text(encoding="utf-8")
ROW = re.compile(r"(?m)^\| `(\w+)` \| `?([\w]+\.[\w.]+|–)`? \| ([^|]+) \| ([^|]+) \| ([^|]+) \|$")
ROWS = {name: (cls, results) for name, cls, *results in ROW.findall(TABLE)}
FORMS: dict[str, dict[str, Any]] = {
    "FSDP1": {"version": 1, "use_orig_params": True},
    "FSDP1 flat": {"version": 1, "use_orig_params": False},
    "FSDP2": {"version": 2},
}
QUICK = {
    ("adafactor", "FSDP2"),
    ("adamw_bnb_8bit", "FSDP2"),
    ("adamw_torch_8bit", "FSDP1"),
    ("galore_adamw", "FSDP1"),
    ("schedule_free_adamw", "FSDP1"),
}
PAIRS = [
    pytest.param(name, form, marks=() if (name, form) in QUICK else pytest.mark.slow)
    for name, (_, results) in ROWS.items()
    for form, result in zip(FORMS, results, strict=True)
    if result != "not tested"
]
RESUMED = 1e-6


def tolerance(name: str) -> float:
    return 2e-2 if "4bit" in name else 1e-3 if "8bit" in name else 1e-4


@pytest.mark.parametrize(("name", "form"), PAIRS)
def test_optimizer_of_the_trainer_does_what_is_listed(
    one_rank: Ranks, two_ranks: Ranks, tmp_path: Path, name: str, form: str
) -> None:
    cls, results = ROWS[name]
    listed = results[list(FORMS).index(form)]
    package = cls.partition(".")[0].replace("–", "galore_torch" if "galore" in name else "apollo_torch")
    pytest.importorskip(package)
    if name == "adalomo" and not torch.cuda.is_available():
        pytest.skip("AdaLomo's constructor needs CUDA")
    folder = str(tmp_path / "run")
    run = two_ranks.run(train_with_trainer, folder, name, FORMS[form])[0]
    code = re.search(r"FSDP-\w+", listed)
    if "by Transformers" in listed:
        assert "does not support DDP" in run["result"]
    elif code is not None:
        assert run["result"] == [code[0]]
    else:
        assert run["result"] == []
        whole = one_rank.run(train_with_trainer, folder, name, None, decay_all=form == "FSDP1 flat")[0]
        assert whole["result"] == []
        assert run["losses"] == pytest.approx(whole["losses"], rel=tolerance(name))
        again = two_ranks.run(train_with_trainer, folder, name, FORMS[form], resume=True)[0]
        assert again["result"] == []
        after = {step: loss for step, loss in run["losses"].items() if step > 5}
        assert {step: loss for step, loss in again["losses"].items() if step > 5} == pytest.approx(after, rel=RESUMED)
