"""``hf-fsdp watch`` on a pseudo-terminal, while a run writes its files."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.terminal import CTRL_C, Terminal
from tests.support.watched_runs import line, log, start

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def watch(tmp_path: Path) -> Iterator[Callable[..., Terminal]]:
    """Start the verb on a terminal, in a folder in which ``out`` is the run."""
    opened: list[Terminal] = []
    (tmp_path / "out").mkdir()

    def open_terminal(*argv: str, columns: int = 100, rows: int = 50, **variables: str) -> Terminal:
        env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "PYTHONPATH": str(ROOT), **variables}
        command = [sys.executable, "-m", "hf_fsdp_plugin.cli.main", "watch", "out", *argv]
        opened.append(Terminal(command, cwd=tmp_path, env=env, columns=columns, rows=rows))
        return opened[-1]

    yield open_terminal
    for terminal in opened:
        terminal.__exit__()


def append(folder: Path, *lines: str) -> None:
    with (folder / "out/fsdp_run.jsonl").open("a") as file:
        file.writelines(lines)


def test_terminal_follows_a_run_to_its_end(watch, tmp_path):
    terminal, next_line = watch("--interval", "1"), log(20)
    terminal.wait("nothing has been logged yet")
    append(tmp_path, start(), log(10), next_line[:40])
    assert "16 ranks" not in terminal.wait("step 10 of 1,000")
    terminal.wait("loss")
    append(tmp_path, next_line[40:], line("straggler", rank=3, text="rank 3 is slow"))
    terminal.wait("step 20 of 1,000")
    terminal.wait("rank 3 is slow")
    append(tmp_path, line("end", step=20, result="finished"))
    terminal.wait("out  finished")
    assert terminal.end() == 0


@pytest.mark.parametrize(("columns", "rows"), [(60, 20), (100, 50)])
def test_each_look_fits_on_the_terminal(watch, tmp_path, columns, rows):
    append(tmp_path, start(), *(log(step) for step in range(10, 200, 10)), line("end", result="finished"))
    terminal = watch(columns=columns, rows=rows)
    assert terminal.end() == 0
    lines = terminal.text.splitlines()
    assert len(lines) < rows and max(map(len, lines)) <= columns
    assert ("more" in lines[-1]) == (rows == 20) and any(row.startswith("loss") and "█" in row for row in lines)


def test_ctrl_c_ends_the_look_at_a_run(watch, tmp_path):
    append(tmp_path, start(), log(10))
    terminal = watch()
    terminal.wait("loss")
    terminal.type(CTRL_C)
    assert terminal.end() == 130


@pytest.mark.parametrize("variables", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_terminal_without_colors_gets_none(watch, tmp_path, variables):
    append(tmp_path, start(), log(10), log(20), line("end", result="finished"))
    terminal = watch("--once", **variables)
    assert terminal.end() == 0 and "out  finished" in terminal.text
    assert "\x1b[" not in terminal.printed
