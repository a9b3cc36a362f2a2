"""The table of settings is consistent with the fields of the spec and with itself."""

import ast
import importlib.util
from pathlib import Path

import pytest

from hf_fsdp_plugin.spec.model import FsdpSpec
from hf_fsdp_plugin.vocabulary import BY_KEY, PREFIXES, ROWS, Row, find, plain_key, suggest

DERIVED = {"activation.native", "launch.extra"}
"""Fields without a key, derived from other settings."""


def test_public_rows_are_fields_of_spec():
    public = {row.name for row in ROWS if not row.internal}
    assert public | DERIVED == {name for name, _, _ in FsdpSpec().settings()}


@pytest.mark.parametrize("row", [row for row in ROWS if row.choices], ids=lambda row: f"{row.scope}:{row.name}")
def test_choices_of_setting_share_no_spelling(row: Row):
    forms = [form for value, others in row.choices.items() for form in {value.lower(), *others}]
    assert len(forms) == len(set(forms))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.scope}:{row.name}")
def test_key_is_found_in_any_case_with_or_without_prefix(row: Row):
    for spelling in row.spellings:
        for key in (spelling, spelling.upper(), PREFIXES[row.scope] + spelling, spelling.replace("_", "-")):
            found = find(key, (row.scope,))
            assert found is not None
            assert found.name == BY_KEY[row.scope, spelling].name


def test_spellings_are_normalized():
    assert all(plain_key(spelling, row.scope) == spelling for row in ROWS for spelling in row.spellings)


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("fsdp_offload_param", "fsdp_offload_params"),
        ("reshard_after_foward", "fsdp_reshard_after_forward"),
        ("fsdp_transformer_layer_cls_to_warp", "fsdp_transformer_layer_cls_to_wrap"),
        ("FSDP_SHARDING_STRATERGY", "fsdp_sharding_strategy"),
    ],
)
def test_misspelled_key_suggests_nearest(written: str, expected: str):
    assert suggest(written, ("fsdp",)) == expected


def test_unrelated_key_has_no_suggestion():
    assert suggest("zzzzzz", ("fsdp", "launch")) == ""


def test_every_key_of_accelerate_config_is_known():
    """The keys are parsed from the source of Accelerate, because importing it would load torch."""
    accelerate = importlib.util.find_spec("accelerate")
    assert accelerate is not None and accelerate.origin is not None
    source = (Path(accelerate.origin).parent / "commands/config/config_args.py").read_text(encoding="utf-8")
    fields = [node.target for node in ast.walk(ast.parse(source)) if isinstance(node, ast.AnnAssign)]
    keys = [field.id for field in fields if isinstance(field, ast.Name)]
    assert "parallelism_config" in keys
    assert not [key for key in keys if find(key, ("launch",)) is None]
