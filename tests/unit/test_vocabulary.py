"""The table of settings is consistent with the fields of the spec and with itself."""

import ast
import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

from hf_fsdp_plugin.spec.fsdp_spec import FsdpSpec
from hf_fsdp_plugin.vocabulary import BY_KEY, PREFIXES, ROWS, SettingRow, find_row, plain_key, similar_key

DERIVED = {"activation.native", "launch.extra", "fp8.te_options"}
"""Fields without a key, derived from other settings."""


def test_public_rows_are_fields_of_spec():
    public = {row.name for row in ROWS if not row.internal}
    assert public | DERIVED == {name for name, _, _ in FsdpSpec().settings()}


@pytest.mark.parametrize("row", [row for row in ROWS if row.choices], ids=lambda row: f"{row.scope}:{row.name}")
def test_choices_of_setting_share_no_spelling(row: SettingRow):
    forms = [form for value, others in row.choices.items() for form in {value.lower(), *others}]
    assert len(forms) == len(set(forms))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.scope}:{row.name}")
def test_key_is_found_in_any_case_with_or_without_prefix(row: SettingRow):
    for spelling in row.spellings:
        for key in (spelling, spelling.upper(), PREFIXES[row.scope] + spelling, spelling.replace("_", "-")):
            found = find_row(key, (row.scope,))
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
    assert similar_key(written, ("fsdp",)) == expected


def test_unrelated_key_has_no_suggestion():
    assert similar_key("zzzzzz", ("fsdp", "launch")) == ""


UNREAD = {
    "launch.same_network": "machines meet at main_process_ip in any network",
    "launch.main_training_function": "ignored: the plugin does not start TPUs",
}
VALUES = {
    "bool": (True, False), "integer": (3,), "count": (3,), "size": (3,), "names": ("A",), "text": ("a.*",),
    "devices": ("0",), "mapping": ({"a": 1},), "any": ("x",),
    "reshard": (True, False), "one": (2,), "flag": (True,), "options": ("no_shard",),
}  # fmt: skip


def test_every_setting_is_read_outside_the_spec():
    package = Path(__file__).parents[2] / "hf_fsdp_plugin"
    files = [path for path in package.rglob("*.py") if path.name not in ("vocabulary.py", "fsdp_spec.py")]
    wizard = tuple(package.glob("tools/config/*.py"))  # it only writes settings
    text = "\n".join(path.read_text("utf-8") for path in files if path not in wizard)
    names = [name for name, _, _ in FsdpSpec().settings()]
    assert {name for name in names if not re.search(rf"\b{re.escape(name)}\b", text)} == set(UNREAD)


@pytest.mark.parametrize("row", [row for row in ROWS if row.opens is None], ids=lambda row: f"{row.scope}:{row.name}")
def test_every_key_changes_the_spec_or_is_reported(assess, assess_converted, row: SettingRow):
    def read(**given: Any) -> Any:
        assessment = (assess_converted if row.scope == "training" else assess)(**given)
        values = [(name, value) for name, value, _ in assessment.spec.settings()]
        return values, [problem.code for problem in assessment.problems]

    values = VALUES.get(row.kind) or tuple(row.choices)
    assert any(read(**_given(row.scope, row.key, value)) != read(**_given(row.scope)) for value in values)


def _given(scope: str, key: str = "", value: Any = None) -> dict[str, Any]:
    """Return sources with one more key in one scope."""
    sections: dict[str, Any] = {
        "fsdp": {"fsdp_version": 2}, "parallelism": {}, "dynamo": {}, "precision": {}, "launch": {}, "training": {},
        "fp8": {}, "distributed": {"fsdp_size": 4},
    }  # fmt: skip
    if key:
        sections[scope] = {**sections[scope], key: value}
    fsdp = {**sections["fsdp"], "fsdp_mixed_precision_policy": sections["precision"]}
    config = {"distributed_type": "FSDP", "fsdp_config": fsdp, "parallelism_config": sections["parallelism"]}
    if scope == "training":
        return {"config": {"base_model": "m", "fsdp": True, **sections["training"]}}
    return {
        "config": {**config, "dynamo_config": sections["dynamo"], "fp8_config": sections["fp8"], **sections["launch"]},
        **({"distributed_config": sections["distributed"]} if scope == "distributed" else {}),
    }


def test_every_key_of_accelerate_config_is_known():
    """The keys are parsed from the source of Accelerate, because importing it would load torch."""
    accelerate = importlib.util.find_spec("accelerate")
    assert accelerate is not None and accelerate.origin is not None
    source = (Path(accelerate.origin).parent / "commands/config/config_args.py").read_text(encoding="utf-8")
    fields = [node.target for node in ast.walk(ast.parse(source)) if isinstance(node, ast.AnnAssign)]
    keys = [field.id for field in fields if isinstance(field, ast.Name)]
    assert "parallelism_config" in keys
    assert not [key for key in keys if find_row(key, ("launch",)) is None]
