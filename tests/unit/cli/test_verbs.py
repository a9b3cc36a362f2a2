"""Every verb: help, examples; ``hf-fsdp explain``."""

import importlib
import json
import shlex

import pytest

from hf_fsdp_plugin.cli.explain import parse_page
from hf_fsdp_plugin.cli.main import VERBS, main, parse_arguments


@pytest.mark.parametrize("verb", VERBS)
def test_help_ends_with_two_examples_that_parse(verb, capsys):
    module = importlib.import_module(f"hf_fsdp_plugin.cli.{verb}")
    for example in module.EXAMPLES:
        program, name, *argv = shlex.split(example.partition(" > ")[0].partition(" | ")[0])
        assert (program, name) == ("hf-fsdp", verb)
        parse_arguments(verb, module, argv)
    assert main([verb, "--help"]) == 0
    assert capsys.readouterr().out.splitlines()[-3:] == ["examples:", *(f"  {example}" for example in module.EXAMPLES)]
    assert len(module.EXAMPLES) == 2


@pytest.mark.parametrize("written", ["FSDP-E701", "e701", "fsdp_e701", "701"])
def test_explain_accepts_spellings_of_a_code(written, hf_fsdp):
    code, out, _ = hf_fsdp("explain", written)
    assert code == 0 and out.startswith("FSDP-E701: ") and "\nExample:\n" in out and "\nRemedy: " in out


def test_explain_without_a_code_lists_all(hf_fsdp):
    _, table, _ = hf_fsdp("explain")
    _, printed, _ = hf_fsdp("explain", "--json")
    codes = json.loads(printed)["codes"]
    assert [line.split()[0] for line in table.splitlines()] == [row["code"] for row in codes]
    assert {"code": "FSDP-E701", "title": "more ranks on a machine than it has accelerators"} in codes


@pytest.mark.parametrize(
    ("written", "hint"), [("W701", "Did you mean FSDP-E701?"), ("nonsense", "`hf-fsdp explain` lists all codes.")]
)
def test_explain_unknown_code_exits_2(written, hint, hf_fsdp):
    assert hf_fsdp("explain", written) == (2, "", f"hf-fsdp explain: unknown problem code '{written}'. {hint}\n")


def test_explain_json_is_one_object(hf_fsdp):
    code, out, _ = hf_fsdp("explain", "e701", "--json")
    entry = json.loads(out)
    assert code == 0
    assert (entry["code"], entry["area"], set(entry)) == (
        "FSDP-E701",
        "cli",
        {"code", "title", "area", "text"},
    )


def test_parse_page_ignores_headings_in_fences():
    page = "# Sources\n\n## FSDP-E001: a\n\n```yaml\n## FSDP-E002: no\n# x\n```\n\n# Next\n\n## FSDP-W003: b\n\nc\n"
    first, second = parse_page(page, "sources")
    assert (first.code, first.text) == ("FSDP-E001", "```yaml\n## FSDP-E002: no\n# x\n```")
    assert (second.code, second.title, second.text) == ("FSDP-W003", "b", "c")
