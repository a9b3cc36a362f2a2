"""The origins of values, as text and as JSON."""

import ast
from pathlib import Path

import pytest

import hf_fsdp_plugin
from hf_fsdp_plugin.problems import DEFAULT_ORIGIN, NAMED_SOURCES, Origin

PACKAGE = Path(hf_fsdp_plugin.__file__).parent


@pytest.mark.parametrize(
    ("origin", "text", "file", "key", "value"),
    [
        (Origin(source="a.yaml", line=3, spelling="fsdp_version", text="2"), "a.yaml:3 fsdp_version=2", "a.yaml",
         "fsdp_version", "2"),
        (Origin(source="--set", spelling="fsdp.version", text="2"), "--set fsdp.version=2", None, "fsdp.version", "2"),
        (Origin(source="command line", spelling="--cpu", text=None), "command line --cpu", None, "--cpu", None),
        (Origin(source="environment", spelling="FSDP_X", text=""), "environment FSDP_X=", None, "FSDP_X", ""),
        (Origin(source="TrainingArguments fsdp_config", line=1), "TrainingArguments fsdp_config:1", None, None, None),
        (DEFAULT_ORIGIN, "default", None, None, None),
    ],
)  # fmt: skip
def test_origin_as_text_and_json(origin, text, file, key, value):
    assert str(origin) == text
    found = origin.to_json()
    assert (found["file"], found["key"], found["text"]) == (file, key, value)
    assert found["source"] == ("file" if file else origin.source)


def test_sources_that_are_not_files_are_named():
    named = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Origin":
                named |= {
                    word.value.value
                    for word in node.keywords
                    if word.arg == "source" and isinstance(word.value, ast.Constant)
                }
            if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "SOURCE":
                named |= {node.value.value} if isinstance(node.value, ast.Constant) else set()
    assert {"Accelerator()", "command line", "default"} <= named <= set(NAMED_SOURCES)
