"""``hf-fsdp config`` on a pseudo-terminal: menus with arrow keys, plain prompts, and interruptions."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from hf_fsdp_plugin import load_spec
from hf_fsdp_plugin.tools.config.conversation import State
from hf_fsdp_plugin.tools.config.questions import QUESTIONS
from tests.support.terminal import CTRL_C, CTRL_D, DOWN, ENTER, UP, Terminal

ROOT = Path(__file__).resolve().parents[3]
LABELS = {question.name: question.text for question in QUESTIONS}
MENUS = {question.name for question in QUESTIONS if question.choices_in(State(answers={"gpus": 4}))}
WITHOUT_MODEL = [
    "model", "num_machines", "gpus", "precision", "global_batch", "fsdp_version", "micro_batch", "strategy",
    "wrap_policy", "wrap_classes", "offload", "checkpointing", "state_dict", "ram_efficient_loading",
]  # fmt: skip
"""The questions that are asked if every default is taken."""


@pytest.fixture
def wizard(tmp_path):
    """Start the verb on a terminal."""
    opened = []

    def start(*argv: str, columns: int = 100, term: str = "xterm") -> Terminal:
        variables = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
        variables["TERM"] = term
        command = [sys.executable, "-m", "hf_fsdp_plugin.cli.main", "config", *argv]
        opened.append(Terminal(command, cwd=tmp_path, env=variables, columns=columns))
        return opened[-1]

    yield start
    for terminal in opened:
        terminal.__exit__()


def answer(terminal: Terminal, name: str, *keys: str) -> None:
    """Wait for a question, and type an answer when it can be read."""
    terminal.wait(LABELS[name].split(" (")[0])
    terminal.wait("arrow keys" if name in MENUS else "> ")
    terminal.type(*keys)


def test_arrow_keys_choose_and_lines_can_be_edited(wizard, tmp_path):
    terminal = wizard("-o", "fsdp.yaml")
    keys = {
        "gpus": ("\x7f", "4"), "precision": (DOWN,), "fsdp_version": (UP,), "strategy": (DOWN, DOWN, UP),
        "wrap_policy": (DOWN,), "min_num_params": ("\x7f" * 9, "1e7"), "offload": (UP,), "checkpointing": (DOWN,),
    }  # fmt: skip
    order = [
        *WITHOUT_MODEL[:9],
        "min_num_params",
        "offload",
        "checkpointing",
        "activation_offload",
        *WITHOUT_MODEL[12:],
    ]
    for name in order:
        answer(terminal, name, *keys.get(name, ()), ENTER)
    terminal.wait("wrote fsdp.yaml")
    assert terminal.end() == 0
    spec = load_spec(tmp_path / "fsdp.yaml", environ={})
    assert (spec.launch.num_processes, spec.launch.mixed_precision, spec.fsdp.version) == (4, "fp16", 1)
    assert (spec.sharding.strategy, spec.wrap.policy, spec.wrap.min_num_params) == ("shard_grad_op", "size", 10**7)
    assert (spec.offload.params, spec.activation.checkpointing) == (True, "full")


def test_wrong_line_is_asked_again(wizard, tmp_path):
    terminal = wizard("-o", "fsdp.yaml", "--model", "", "--num-machines", "1")
    answer(terminal, "gpus", "\x7f", "many", ENTER)
    terminal.wait("'many' is not a whole number")
    terminal.wait("> ")
    terminal.type("\x7f", "2", ENTER)
    for name in WITHOUT_MODEL[3:]:
        answer(terminal, name, ENTER)
    assert terminal.end() == 0
    assert load_spec(tmp_path / "fsdp.yaml", environ={}).launch.num_processes == 2


@pytest.mark.slow
def test_missing_model_is_asked_again(wizard, tmp_path):
    terminal = wizard("-o", "fsdp.yaml")
    answer(terminal, "model", "./none", ENTER)
    terminal.wait("FSDP-E709")
    answer(terminal, "model", ENTER)
    answer(terminal, "num_machines", CTRL_C)
    assert terminal.end() == 130 and os.listdir(tmp_path) == []


@pytest.mark.parametrize("term", ["xterm", "dumb"])
@pytest.mark.parametrize(
    "number", [pytest.param(n, marks=() if n in (0, 7) else pytest.mark.slow) for n in range(len(WITHOUT_MODEL))]
)
def test_ctrl_c_at_a_question_writes_nothing(wizard, tmp_path, number, term):
    (tmp_path / "fsdp.yaml").write_text("distributed_type: FSDP\nfsdp_config:\n  fsdp_version: 2\n")
    before = (tmp_path / "fsdp.yaml").read_bytes()
    terminal = wizard("-o", "fsdp.yaml", term=term)
    for name in WITHOUT_MODEL[:number]:
        terminal.wait(LABELS[name].split(" (")[0])
        terminal.wait("]: " if term == "dumb" else "arrow keys" if name in MENUS else "> ")
        terminal.type(ENTER)
    terminal.wait(LABELS[WITHOUT_MODEL[number]].split(" (")[0])
    terminal.wait("]: " if term == "dumb" else "arrow keys" if WITHOUT_MODEL[number] in MENUS else "> ")
    terminal.type(CTRL_C)
    assert terminal.end() == 130 and "Nothing was written." in terminal.text
    assert (tmp_path / "fsdp.yaml").read_bytes() == before and os.listdir(tmp_path) == ["fsdp.yaml"]


def test_confirmation_shows_the_change_and_may_be_refused(wizard, tmp_path):
    text = "distributed_type: FSDP\nnum_processes: 2\nfsdp_config:\n  fsdp_version: 2\n"
    (tmp_path / "fsdp.yaml").write_text(text)
    for keys, code in (((DOWN,), 1), ((CTRL_C,), 130), ((), 0)):
        terminal = wizard("-o", "fsdp.yaml", *[word for name in WITHOUT_MODEL for word in given(name)])
        terminal.wait("+num_machines: 1")
        terminal.wait("Change fsdp.yaml")
        terminal.wait("arrow keys")
        terminal.type(*keys, *(() if CTRL_C in keys else (ENTER,)))
        assert terminal.end() == code
        assert ((tmp_path / "fsdp.yaml").read_text() == text) == (code != 0)
        assert ("Nothing was written." in terminal.text) == (code != 0)
    assert load_spec(tmp_path / "fsdp.yaml", environ={}).wrap.policy == "transformer"


def given(name: str) -> tuple[str, str]:
    values = {"model": "", "num_machines": "1", "gpus": "2", "precision": "bf16", "global_batch": "2",
              "micro_batch": "1", "fsdp_version": "2", "strategy": "full_shard", "wrap_policy": "transformer",
              "wrap_classes": "", "offload": "no", "checkpointing": "none", "state_dict": "sharded",
              "ram_efficient_loading": "yes"}  # fmt: skip
    return f"--{name.replace('_', '-')}", values[name]


def test_dumb_terminal_has_plain_prompts(wizard, tmp_path):
    terminal = wizard("-o", "fsdp.yaml", term="dumb")
    for name in WITHOUT_MODEL:
        terminal.wait(LABELS[name].split(" (")[0])
        terminal.wait("]: ")
        terminal.type("2" if name == "strategy" else "", ENTER)
    assert terminal.end() == 0
    assert load_spec(tmp_path / "fsdp.yaml", environ={}).sharding.strategy == "shard_grad_op"


def test_end_of_input_on_a_terminal_is_an_error(wizard, tmp_path):
    for term in ("xterm", "dumb"):
        terminal = wizard("-o", "fsdp.yaml", term=term)
        terminal.wait("]: " if term == "dumb" else "> ")
        terminal.type(CTRL_D)
        assert terminal.end() == 1 and "FSDP-E760" in terminal.text and os.listdir(tmp_path) == []


@pytest.mark.parametrize("columns", [40, 80])
def test_no_line_is_longer_than_the_terminal(wizard, columns):
    terminal = wizard("-o", "fsdp.yaml", columns=columns, term="dumb")  # menus are drawn more than once
    for name in WITHOUT_MODEL:
        terminal.wait(LABELS[name].split(" ")[0])
        terminal.wait("]: ")
        terminal.type(ENTER)
    assert terminal.end() == 0
    lines = re.sub(r"\n  (accelerate|hf-fsdp) launch.*", "", terminal.text).splitlines()
    assert max(map(len, lines)) <= columns


def test_first_question_needs_no_heavy_library(tmp_path):
    program = (
        "import sys; sys.modules |= dict.fromkeys(('torch', 'transformers', 'accelerate', 'numpy', 'questionary'))\n"
        "from hf_fsdp_plugin.cli.main import main; sys.exit(main(['config', '-o', 'fsdp.yaml']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, stdin=subprocess.DEVNULL, cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PATH": os.environ["PATH"]}, timeout=60,
    )  # fmt: skip
    assert done.returncode == 1 and "FSDP-E760" in done.stderr and "\nModel " in done.stderr


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_first_question_costs_little_more_than_its_library(wizard):
    """A loaded machine slows both processes, so that their ratio stays."""
    beginning = cpu_seconds()
    subprocess.run([sys.executable, "-c", "import questionary, yaml"], check=True)
    library = cpu_seconds() - beginning
    terminal = wizard("-o", "fsdp.yaml")
    answer(terminal, "model", CTRL_C)
    assert terminal.end() == 130
    assert cpu_seconds() - beginning - library < 4 * library


def test_json_has_only_the_object_on_stdout(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "hf_fsdp_plugin.cli.main", "config", "-o", "fsdp.yaml", "--json"],
        input="\n" * 20, capture_output=True, text=True, cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PATH": os.environ["PATH"], "HOME": str(tmp_path)}, timeout=60,
    )  # fmt: skip
    tree = json.loads(done.stdout)
    assert (tree["ok"], tree["written"], tree["path"]) == (True, True, str(tmp_path / "fsdp.yaml"))
    assert tree["settings"]["sharding.strategy"] == "full_shard" and "Number of machines" in done.stderr
