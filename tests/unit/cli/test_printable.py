"""Control characters in files and names never reach the terminal: every verb that prints them escapes them."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy
import pytest
from torch.distributed import HashStore

from hf_fsdp_plugin.cli import output
from hf_fsdp_plugin.problems import MAX_SHOWN, CheckpointError, Problem
from hf_fsdp_plugin.text import format_table, printable
from tests.support import saved
from tests.support.merge_inputs import save as save_local
from tests.unit.launcher.test_rendezvous import met

ESCAPES = "\x1b]0;pwn\x07\x9b31m\r\nfsdp: undamaged\x00\u202e"
"""A title and a color of a terminal, a forged line, and a mark that reverses text."""


def assert_printable(text: str) -> None:
    assert not [char for char in text if char != "\n" and ("\x00" <= char < " " or "\x7f" <= char < "\xa0")]
    assert "\u202e" not in text and not any(line.startswith("fsdp:") for line in text.splitlines())


FIELDS: dict[str, dict[str, Any]] = {
    "strategy": {"strategy": ESCAPES},
    "created": {"created": ESCAPES},
    "backend": {"backend": ESCAPES},
    "versions": {"versions": {ESCAPES: ESCAPES}},
    "settings": {"settings": {ESCAPES: ESCAPES}},
    "batch": {"batch": {ESCAPES: ESCAPES}},
    "mesh": {"mesh": {ESCAPES: 2}},
    "ties": {"ties": (("embed.weight", ESCAPES),)},
    "parameters": {"parameters": {ESCAPES: ("float32", (2,))}},
    "kind": {"kind": ESCAPES},
}


@pytest.mark.parametrize("field", FIELDS)
def test_escapes_in_a_manifest_are_escaped_in_output(local: Path, tmp_path: Path, hf_fsdp: Any, field: str) -> None:
    saved.write_manifest(local, **FIELDS[field])
    for verb in (["inspect"], ["inspect", "--parameters", "--optimizer"], ["inspect", "--json"], ["verify"]):
        for option in ((), ("--json",)) if verb == ["verify"] else ((),):
            _, out, err = hf_fsdp(*verb, local, *option)
            assert_printable(out + err)
    _, out, err = hf_fsdp("merge", local, tmp_path / "out")
    assert_printable(out + err)


def test_escapes_in_names_are_escaped_in_output(tmp_path: Path, hf_fsdp: Any) -> None:
    name = ESCAPES.replace("\x00", "")
    folder = tmp_path / f"run{name}"
    save_local(folder / "checkpoint-1", {f"w{ESCAPES}": numpy.zeros(3, "<f4")})
    (folder / "checkpoint-1" / f"extra{name}").write_text("x")
    for verb in (["inspect", "--parameters"], ["verify"]):
        for place in (folder, folder / "checkpoint-1"):
            _, out, err = hf_fsdp(*verb, place)
            assert_printable(out + err)
            assert place == folder or "\\u001b]0;pwn\\u0007" in out + err


def test_escapes_in_copied_files_are_escaped_in_output(checkpoint: Path, tmp_path: Path, hf_fsdp: Any) -> None:
    name = ESCAPES.replace("\x00", "").replace("/", "")
    (checkpoint / "config.json").write_text('{"auto_map": {}}')
    for file in (f"tokenizer{name}", f"code{name}.py"):
        (checkpoint / file).write_text("")
    incomplete = save_local(checkpoint.parent / "checkpoint-2")
    saved.write_manifest(incomplete, strategy=ESCAPES)
    (incomplete / "optimizer.pt").unlink()
    for number, verb in enumerate((["merge", checkpoint], ["export", checkpoint.parent])):
        code, out, err = hf_fsdp(*verb, tmp_path / f"out{number}")
        assert code == 0 and "tokenizer\\u001b]0;pwn\\u0007" in out, err
        assert ("is skipped" in err) == (verb[0] == "export")
        assert_printable(out + err)


VALID = """\
distributed_type: FSDP
num_processes: 2
use_cpu: true
tpu_name: "a\\e]0;pwn\\a\\r\\nfsdp: undamaged"
fsdp_config:
  fsdp_version: 2
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
"""


@pytest.mark.parametrize(
    "words",
    ["check FILE", "launch --dry_run --config_file FILE s.py", "config -o FILE --yes --force"],
)
def test_escapes_in_a_valid_config_are_escaped_in_output(
    tmp_path: Path, hf_fsdp: Any, monkeypatch: pytest.MonkeyPatch, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    (tmp_path / "s.py").write_text("")
    file = f"c{ESCAPES}.yaml".replace("\x00", "")
    (tmp_path / file).write_text(VALID)
    code, out, err = hf_fsdp(*(file if word == "FILE" else word for word in words.split()))
    assert code == 0
    assert_printable(out + err)


CONFIG = """\
distributed_type: FSDP
num_processes: 2
fsdp_config:
  fsdp_sharding_strategy: "FULL\\e]0;pwn\\a\\r\\nfsdp: undamaged"
  "fsdp_v\\e[31mersion": 2
  fsdp_transformer_layer_cls_to_wrap: "Llama\\e]0;pwn\\aLayer"
"""


@pytest.mark.parametrize("verb", [["check"], ["check", "--json"], ["plan", "--model", "gpt2"]])
def test_escapes_in_a_config_are_escaped_in_output(tmp_path: Path, hf_fsdp: Any, verb: list[str]) -> None:
    (tmp_path / "c.yaml").write_text(CONFIG)
    place = ["--config_file", tmp_path / "c.yaml"] if verb[0] == "plan" else [tmp_path / "c.yaml"]
    code, out, err = hf_fsdp(*verb, *place)
    assert code != 0
    assert_printable(out + err)


def test_text_of_other_launchers_is_escaped() -> None:
    store = HashStore()
    met(store, 1, 2).announce(ESCAPES)
    text = str(met(store, 0, 2).failure())
    assert text.startswith("machine 1: ")
    assert_printable(text)


def test_problems_and_tables_escape_control_characters() -> None:
    assert_printable(str(Problem(code="FSDP-E453", message=ESCAPES, fix=ESCAPES, setting=ESCAPES)))
    for table in (format_table, lambda rows: format_table(rows, width=40)):
        text = table([("name", "value"), (ESCAPES, ESCAPES * 3)])
        assert_printable(text)
        assert len(text.splitlines()) == 2
    assert printable("Größe: 5 µs → 7 layers × ✓") == "Größe: 5 µs → 7 layers × ✓"


def test_many_problems_are_summarized_by_code() -> None:
    many = [Problem(code="FSDP-N473", message="x")] * 5 + [Problem(code="FSDP-E457", message="x")] * 100_000
    lines = str(CheckpointError(many)).splitlines()
    assert len(lines) == MAX_SHOWN + 1 and lines[-1] == "… and 99,900 more problems: 99,900 × FSDP-E457"
    assert len(str(CheckpointError(many[:MAX_SHOWN])).splitlines()) == MAX_SHOWN - 5


def test_verify_summarizes_many_missing_files(local: Path, hf_fsdp: Any) -> None:
    for number in range(300):
        (local / f"f{number}").write_text("x")
    saved.write_manifest(local)
    for number in range(300):
        (local / f"f{number}").unlink()
    code, out, err = hf_fsdp("verify", local)
    assert code == 1 and "300 problems" in out
    lines = [line for line in err.splitlines() if line]
    assert len(lines) == MAX_SHOWN + 1 and "more problems" in lines[-1] and "× FSDP-E457" in lines[-1]


@pytest.mark.parametrize(("columns", "width"), [("80", 80), ("9" * 5000, None), ("-1", None), ("x", None)])
def test_columns_of_any_length_are_accepted(monkeypatch: pytest.MonkeyPatch, columns: str, width: int | None) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert output.text_width(io.StringIO()) == width
