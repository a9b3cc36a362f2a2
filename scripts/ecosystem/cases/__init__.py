"""The cases of the suite, in the order of its table."""

from __future__ import annotations

from scripts.ecosystem.cases import accelerate, documented, swift, transformers, trl
from scripts.ecosystem.model import Case

CASES: list[Case] = [
    *trl.CASES,
    *documented.CASES,
    *accelerate.TESTS,
    *transformers.CASES,
    *accelerate.EXAMPLES,
    *swift.CASES,
]
