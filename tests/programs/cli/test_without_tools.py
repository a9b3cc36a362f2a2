"""The verbs in an environment without the libraries of the extra ``tools``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hf_fsdp_plugin.cli.main import TOOLS, VERBS
from tests.support.terminal import ENTER, Terminal

ROOT = Path(__file__).resolve().parents[3]
REMEDY = 'is not installed. Install it with the other tools: pip install "hf_fsdp_plugin[tools]"'
WITHOUT_TOOLS = f"""
from importlib.machinery import PathFinder

find = PathFinder.find_spec

@staticmethod
def find_others(name, *given, **named):
    return None if name.partition(".")[0] in {sorted(TOOLS)} else find(name, *given, **named)

PathFinder.find_spec = find_others
"""
"""Python runs it at its start. The import system does not find the libraries, as where they are not installed."""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """The variables of a Python in which the libraries cannot be imported."""
    folder = tmp_path / "site"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(WITHOUT_TOOLS)
    variables = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", "TERM": "xterm"}
    return {**variables, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}


def command(*argv: str) -> list[str]:
    return [sys.executable, "-m", "hf_fsdp_plugin.cli.main", *argv]


def run(environment: dict[str, str], folder: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*argv), cwd=folder, env=environment, capture_output=True, text=True, timeout=120)


def test_every_verb_shows_its_help(environment: dict[str, str], tmp_path: Path) -> None:
    program = (
        "from hf_fsdp_plugin.cli.main import VERBS, main\n"
        "assert all(main([verb, '--help']) == 0 for verb in VERBS), 'help'\n"
        "try:\n    import questionary\nexcept ModuleNotFoundError:\n    print('missing')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0 and done.stdout.endswith("missing\n"), done.stderr
    assert all(f"hf-fsdp {verb}" in done.stdout for verb in VERBS if verb != "help")


def test_check_needs_no_tools(environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "fsdp.yaml").write_text("distributed_type: FSDP\nfsdp_config: {fsdp_version: 2}\n")
    assert run(environment, tmp_path, "check", "fsdp.yaml").returncode == 0


def test_menus_of_config_say_what_to_install(environment: dict[str, str], tmp_path: Path) -> None:
    with Terminal(command("config", "-o", "fsdp.yaml"), cwd=tmp_path, env=environment, columns=200) as terminal:
        terminal.type(ENTER)
        assert terminal.end() == 2
    assert f"hf-fsdp config: questionary {REMEDY}" in terminal.text
    assert not (tmp_path / "fsdp.yaml").exists()


def test_page_of_plan_says_what_to_install(environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        '{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 128, '
        '"num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 128}'
    )
    words = ("plan", "--model", ".", "--world-size", "2", "--html", "plan.html")
    done = run(environment, tmp_path, *words)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert done.stderr.endswith(f"hf-fsdp plan: jinja2 {REMEDY}\n") and "Traceback" not in done.stderr
    assert not (tmp_path / "plan.html").exists()
    assert run(environment, tmp_path, *words[:-2]).returncode == 0
