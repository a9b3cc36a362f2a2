"""The JSON objects that the verbs print. docs/json.md describes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hf_fsdp_plugin.text import printable
from hf_fsdp_plugin.version import SCHEMA_VERSION


def print_json(tree: Mapping[str, Any]) -> None:
    """Print one JSON object to stdout, with the version of its schema."""
    import json  # only for --json, to start faster

    text = json.dumps({"schema_version": SCHEMA_VERSION, **tree}, indent=2, ensure_ascii=False, default=str)
    print("\n".join(map(printable, text.split("\n"))))  # JSON itself allows C1 control characters and surrogates
