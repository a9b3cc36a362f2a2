"""docs/optimizers.md lists every optimizer of the Trainer, with what the table of kinds decides."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from transformers.training_args import OptimizerNames

from hf_fsdp_plugin.backends.optimizers.known_optimizers import KNOWN_OPTIMIZERS, KnownOptimizer

DOCUMENT = Path(__file__).parents[2] / "docs" / "optimizers.md"
ROW = re.compile(r"(?m)^\| `(\w+)` \| (`[\w.]+`|–) \| ([^|]+) \| ([^|]+) \| ([^|]+) \|$")
ROWS = {name: (cls.strip("`"), results) for name, cls, *results in ROW.findall(DOCUMENT.read_text(encoding="utf-8"))}
PER_SHARD = re.compile(r".*(8bit|4bit|ademamix).*")


def kind(cls: str) -> KnownOptimizer | None:
    """The row of the class's package, or of the class itself."""
    package, name = cls.partition(".")[0], cls.rpartition(".")[2]
    rows = [kind for kind in KNOWN_OPTIMIZERS if kind.name.partition(".")[0] == package]
    named = [kind for kind in rows if kind.name.rpartition(".")[2] == name]
    return (named or [kind for kind in rows if kind.needs == "blocks" or "." not in kind.name] or [None])[0]


def test_every_optimizer_of_the_trainer_is_listed() -> None:
    assert list(ROWS) == [member.value for member in OptimizerNames]


@pytest.mark.parametrize("name", [name for name, (cls, _) in ROWS.items() if kind(cls) is not None])
def test_listed_result_is_what_the_kind_decides(name: str) -> None:
    cls, (fsdp1, flat, fsdp2) = ROWS[name]
    found = kind(cls)
    assert found is not None
    if found.needs == "backward":
        assert {fsdp1, flat, fsdp2} == {"refused: `FSDP-E321`"}
    elif found.needs == "tensors":
        assert {fsdp1, flat} == {"refused: `FSDP-E320`"} and fsdp2.startswith(("works", "not tested"))
    elif found.needs == "blocks" and PER_SHARD.fullmatch(name):
        assert (fsdp1, flat, fsdp2) == ("works", "refused: `FSDP-E322`", "works")
    else:
        assert {fsdp1, flat, fsdp2} == {"works"}


def test_rows_without_a_kind_are_not_promised() -> None:
    unknown = {tuple(results) for cls, results in ROWS.values() if kind(cls) is None}
    assert unknown == {("not tested",) * 3, ("refused by Transformers",) * 3}
