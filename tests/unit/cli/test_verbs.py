"""Every verb: help, examples; ``hf-fsdp explain``."""

import json
import shlex

import pytest

from hf_fsdp_plugin.__main__ import main as module_main
from hf_fsdp_plugin.cli.main import VERBS, main, parse_arguments
from hf_fsdp_plugin.tools.explain import verb as explain
from hf_fsdp_plugin.tools.explain.verb import parse_page


@pytest.mark.parametrize("verb", VERBS)
def test_help_ends_with_two_examples_that_parse(verb, capsys):
    assert main([verb, "--help"]) == 0
    title, *examples = capsys.readouterr().out.splitlines()[-3:]
    assert title == "examples:"
    for example in examples:
        program, name, *argv = shlex.split(example.partition(" > ")[0].partition(" | ")[0])
        assert (program, name) == ("hf-fsdp", verb)
        parse_arguments(verb, argv)


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
        {"schema_version", "code", "title", "area", "text"},
    )


def test_help_verb_prints_the_help_of_a_verb(hf_fsdp, capsys):
    assert hf_fsdp("help") == hf_fsdp("--help")
    for verb in VERBS:
        assert hf_fsdp("help", verb) == hf_fsdp(verb, "--help")
    assert hf_fsdp("help", "nonsense")[0] == 2


def test_module_help_describes_the_flags(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["hf_fsdp_plugin", "--help"])
    assert module_main() == 0
    out = capsys.readouterr().out
    assert all(part in out for part in ("--config_file", "--set", "--report_table", "torchrun", "accelerate launch"))


@pytest.mark.parametrize(
    ("argv", "hint"),
    [("merge a b --dtpye bf16", "Did you mean --dtype?"), ("inspect --parameter x", "Did you mean --parameters?")],
)
def test_unknown_flag_is_one_line_with_a_suggestion(hf_fsdp, argv, hint):
    code, out, err = hf_fsdp(*argv.split())
    assert (code, out, err.count("\n")) == (2, "", 1) and hint in err


def test_flags_may_have_underscores(tmp_path, hf_fsdp):
    assert "is not a folder" not in hf_fsdp("verify", "--no_config_check", tmp_path)[2]


def test_interrupt_exits_130_and_says_so(monkeypatch, hf_fsdp):
    def interrupt(args):
        raise KeyboardInterrupt

    monkeypatch.setattr(explain, "run", interrupt)
    assert hf_fsdp("explain") == (130, "", "hf-fsdp explain: interrupted\n")


def test_parse_page_ignores_headings_in_fences():
    page = "# Sources\n\n## FSDP-E001: a\n\n```yaml\n## FSDP-E002: no\n# x\n```\n\n# Next\n\n## FSDP-W003: b\n\nc\n"
    first, second = parse_page(page, "sources")
    assert (first.code, first.text) == ("FSDP-E001", "```yaml\n## FSDP-E002: no\n# x\n```")
    assert (second.code, second.title, second.text) == ("FSDP-W003", "b", "c")
