"""``hf-fsdp schema``: Print a JSON Schema (draft 2020-12) of the YAML config, for completion and validation in editors.

Examples::

    hf-fsdp schema > fsdp.schema.json
    hf-fsdp schema | jq .properties
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from typing import Any

from hf_fsdp_plugin.vocabulary import PREFIXES, ROWS, STRATEGY_CHOICES, Scope, SettingRow

_BOOL_WORDS = ("true", "false", "yes", "no", "on", "off")
_BY_KIND: Mapping[str, Mapping[str, Any]] = {
    "one": {"enum": [1, "1", None]},
    "names": {"type": ["string", "array", "null"], "items": {"type": "string"}},
    "devices": {"type": ["string", "integer", "array", "null"], "items": {"type": ["string", "integer"]}},
    "text": {"type": ["string", "null"], "minLength": 1},
    "mapping": {"type": ["object", "null"]},
}
"""Kind of value -> schema, for kinds whose schema does not depend on the setting."""


def run(args: argparse.Namespace) -> int:
    print(json.dumps(schema(), indent=2, ensure_ascii=False))
    return 0


def schema() -> dict[str, Any]:
    """Return the schema of the whole file. Every spelling is a key; all except the recommended ones are deprecated."""
    whole = _section("launch")
    older = (row for row in ROWS if row.scope == "dynamo")  # top-level keys in older versions of Accelerate
    whole["properties"] |= {row.key: _property(row, deprecated=True) for row in older}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Accelerate config with FSDP, as read by hf-fsdp",
        **whole,
        "$defs": {scope: _section(scope) for scope in ("fsdp", "parallelism", "precision", "dynamo", "fp8")},
    }


def _section(scope: Scope) -> dict[str, Any]:
    properties: dict[str, Any] = {}
    for row in (row for row in ROWS if row.scope == scope):
        for key in (key for spelling in row.spellings for key in (PREFIXES[scope] + spelling, spelling)):
            properties.setdefault(key, _property(row, deprecated=key != row.key))
    kind = ["object", "null"] if scope != "launch" else "object"
    return {"type": kind, "properties": properties, "additionalProperties": False}


def _property(row: SettingRow, *, deprecated: bool) -> dict[str, Any]:
    return {"description": row.about, **({"deprecated": True} if deprecated else {}), **_values(row)}


def _values(row: SettingRow) -> dict[str, Any]:
    if row.opens is not None:
        section: dict[str, Any] = {"$ref": f"#/$defs/{row.opens}"}
        return section if row.opens != "precision" else {"anyOf": [section, {"type": "string"}]}
    if row.kind in ("bool", "flag"):
        words = [form for word in _BOOL_WORDS for form in (word, word.capitalize(), word.upper())]
        return {"enum": [True, False, *words, "1", "0", 1, 0, None]}
    integer = {"type": ["integer", "null"], "minimum": row.minimum}
    if row.kind in ("integer", "count"):
        return {"anyOf": [integer, {"type": "string", "pattern": "^[0-9]"}]}
    if row.kind == "size":
        return {"anyOf": [integer, {"const": -1}, {"type": "string", "pattern": "^(auto|[0-9])"}]}
    if row.kind in ("choice", "mode"):
        return {"enum": _forms(row.choices.items())}
    if row.kind == "reshard":
        return {"enum": [True, False, *_forms(STRATEGY_CHOICES.items())]}
    return dict(_BY_KIND.get(row.kind, {}))


def _forms(choices: Any) -> list[Any]:
    """Return all accepted forms: spellings in both cases, digits also as numbers, ``true`` also as a bool, and null."""
    forms: dict[tuple[type, Any], Any] = {}
    for value, others in choices:
        for form in (value, *others):
            written: list[Any] = [form.upper(), form.lower(), form]
            if form.isdigit():
                written.append(int(form))
            if form in ("true", "false"):
                written.append(form == "true")
            for item in written:
                forms.setdefault((type(item), item), item)
    return [*forms.values(), None]
