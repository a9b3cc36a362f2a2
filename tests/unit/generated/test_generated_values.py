"""Generated keys, values and files, compared with what docs/settings.md states."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.configuration import set_hypothesis_home_dir

from tests.unit.generated import cases, oracle, settings_document
from tests.unit.generated.checking import disagreement
from tests.unit.generated.oracle import NOT_SET, REFUSED, Oracle, accepted
from tests.unit.generated.settings_document import read_document

DOCUMENT = read_document()
ORACLE = Oracle(DOCUMENT)
QUICK = settings(
    max_examples=20,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder for config files, and for the files of hypothesis."""
    folder = tmp_path_factory.mktemp("generated")
    set_hypothesis_home_dir(folder / "hypothesis")
    yield folder
    set_hypothesis_home_dir(None)


@pytest.mark.parametrize("kind", cases.BUILDERS)
def test_generated_case_agrees_with_document(kind: str, folder: Path) -> None:
    @QUICK
    @given(st.randoms(use_true_random=False))
    def check(random: Random) -> None:
        case = cases.Builder(random, ORACLE).case(kind)
        assert disagreement(case, folder) is None

    check()


@pytest.mark.parametrize("kind", cases.BUILDERS)
def test_sampled_cases_agree_with_document(kind: str, folder: Path) -> None:
    builder = cases.Builder(Random(), ORACLE)
    for seed in range(100):
        builder.random.seed(seed)
        assert disagreement(builder.case(kind), folder) is None, f"seed {seed}"


def test_oracle_imports_nothing_of_the_package() -> None:
    for module in (oracle, settings_document):
        tree = ast.parse(Path(str(module.__file__)).read_text(encoding="utf-8"))
        names = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        names |= {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
        assert not [name for name in names if name and name.startswith("hf_fsdp_plugin")]


@pytest.mark.parametrize(
    ("name", "raw", "source", "verdict"),
    [
        ("sharding.strategy", "Full Shard", "config", accepted("full_shard")),
        ("sharding.strategy", 2.0, "config", accepted("shard_grad_op")),
        ("sharding.strategy", "2.0", "config", REFUSED),
        ("sharding.strategy", "ShardingStrategy.NO_SHARD", "config", accepted("no_shard")),
        ("sharding.strategy", "StateDictType.NO_SHARD", "config", REFUSED),
        ("sharding.strategy", None, "config", NOT_SET),
        ("sharding.strategy", "none", "config", REFUSED),
        ("sharding.strategy", "none", "environment", NOT_SET),
        ("sharding.strategy", "", "--set", REFUSED),
        ("offload.params", "yes", "config", accepted(True)),
        ("offload.params", 1.0, "config", REFUSED),
        ("wrap.min_num_params", "1.5k", "config", accepted(1500)),
        ("wrap.min_num_params", "1,00", "config", REFUSED),
        ("wrap.min_num_params", "1e-7", "config", REFUSED),
        ("wrap.classes", "['A', \"B\"]", "config", accepted(("A", "B"))),
        ("wrap.classes", "[A)", "config", REFUSED),
        ("mesh.shard", -1, "config", accepted("auto")),
        ("mesh.pipeline", 2, "config", REFUSED),
        ("launch.mixed_precision", "fp8", "config", accepted("fp8")),
        ("training.fsdp", "hybrid shard, offload", "config", accepted({
            "launch.distributed_type": "FSDP", "sharding.strategy": "hybrid_shard", "offload.params": True,
        })),
        ("training.fsdp", "full_shard no_shard", "config", REFUSED),
    ],
)  # fmt: skip
def test_oracle_reads_the_rules_of_the_document(name: str, raw: Any, source: str, verdict: Any) -> None:
    setting = ORACLE.name(name)
    assert setting is not None
    assert ORACLE.decide(setting, raw, source) == verdict


def test_every_documented_spelling_is_accepted(folder: Path) -> None:
    """Each spelling of each value, under each key, in a config."""
    count = 0
    for setting in DOCUMENT.settings:
        if setting.section not in ("fsdp", "precision", "parallelism", "dynamo", "fp8", "launch"):
            continue
        words = [word for group in setting.spellings.values() for word in group]
        words += [prefix + word for prefix in setting.text_prefixes for word in words if not word.isdigit()]
        words += sorted(ORACLE.true | ORACLE.false) if setting.kind in ("bool", "reshard") else []
        keys = [form for key in setting.keys for form in (key, setting.prefix + key, key.upper().replace("_", "-"))]
        for key in keys:
            for word in words:
                verdict = ORACLE.decide(setting, word)
                assert verdict.answer == "accepted"
                expected = cases.Expected(setting, key, verdict)
                sources = {"config": cases.config_of(setting, key, word)}
                allowed = cases.RULES.get(setting.name, frozenset())
                assert disagreement(cases.Case("", sources, [expected], allowed), folder) is None
                count += 1
    assert count > 1000
