"""Compares JSON objects with docs/json.schema.json."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema

SCHEMA: dict[str, Any] = json.loads((Path(__file__).parents[2] / "docs/json.schema.json").read_text())


def assert_valid(name: str, tree: Any) -> None:
    """Assert that an object has the schema ``name``, and no field that the schema does not describe."""
    _validator(name).validate(tree)
    assert tree["schema_version"] == 1


@cache
def _validator(name: str) -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator({**_closed({"$defs": SCHEMA["$defs"]}), "$ref": f"#/$defs/{name}"})


def _closed(schema: Any) -> Any:
    """Return the schema without room for fields that it does not describe."""
    if isinstance(schema, list):
        return [_closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    inner = {key: _closed(value) for key, value in schema.items()}
    if isinstance(inner.get("properties"), dict) and "required" in inner:
        inner["additionalProperties"] = False
    return inner
