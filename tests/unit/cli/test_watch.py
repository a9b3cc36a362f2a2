"""``hf-fsdp watch``: what is read from the files of a run, and shown as text, JSON and a page."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from hf_fsdp_plugin.tools.watch import events
from hf_fsdp_plugin.tools.watch.events import EventFile
from hf_fsdp_plugin.tools.watch.run_folder import RunFolder
from tests.support import damages, saved, watched_runs
from tests.support.json_schema import assert_valid
from tests.support.watched_runs import line, log, start


@pytest.fixture
def restarted(tmp_path: Path) -> Path:
    folder = watched_runs.restarted_run(tmp_path / "out")
    watched_runs.write_report(folder)
    saved.local_checkpoint(folder / "checkpoint-250")
    return folder


@pytest.fixture
def watch_json(hf_fsdp):
    """Run ``watch --json``, and return the exit code and the printed object."""

    def run(*argv: object) -> tuple[int, dict]:
        code, out, _ = hf_fsdp("watch", "--json", *argv)
        tree = json.loads(out)
        assert_valid("watch", tree)
        return code, tree

    return run


def test_text_shows_every_part_of_a_run(hf_fsdp, restarted):
    code, out, _ = hf_fsdp("watch", restarted)
    assert code == 0 and "\033" not in out
    expected = (
        "running, last event", "step 420 of 1,000 (42%), epoch 1.05, 1 h 9 min left", "16 ranks on 2 machines, fsdp2",
        "memory by kind at step 420: 16.0 GiB", "restart 1 at step 260, after step 280: failed: rank 5: killed by",
        "rank 3 is slow", "LlamaForCausalLM, 8.03 B parameters", "differs: prefetch.backward: post asked, pre observed",
    )  # fmt: skip
    assert [text for text in expected if text not in out] == []
    assert re.search(r"^checkpoint-250 +4.20 s +310.0 ms +complete$", out, re.M)
    loss = next(row for row in out.splitlines() if row.startswith("loss"))
    assert re.fullmatch(r"loss +1\.806 +1\.806 +9\.715  █[▁-█]{30,}▁", loss)


@pytest.mark.parametrize("columns", [40, 60, 100])
def test_no_line_is_wider_than_the_terminal(hf_fsdp, restarted, monkeypatch, columns):
    damages.flip(restarted / "checkpoint-250/trainer_state.json", 0)
    monkeypatch.setenv("COLUMNS", str(columns))
    _, out, _ = hf_fsdp("watch", restarted)
    assert max(map(len, out.splitlines())) <= columns
    assert columns < 60 or ("█" in out and "checkpoint-250" in out)


def test_dumb_terminal_gets_ascii_charts(hf_fsdp, restarted, monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    _, out, _ = hf_fsdp("watch", restarted)
    assert "@" in out and not re.search("[▁-█]", out)


def test_repeated_steps_have_their_later_values(watch_json, tmp_path):
    lines = [start(), *(log(step, loss=9.0) for step in (10, 20, 30, 40)), start(attempt=1), log(30, loss=2.0)]
    (tmp_path / "fsdp_run.jsonl").write_text("".join(lines))
    code, tree = watch_json(tmp_path)
    assert code == 0 and [(row["step"], row["loss"]) for row in tree["history"]] == [(10, 9.0), (20, 9.0), (30, 2.0)]
    [restart] = tree["restarts"]
    assert (restart["attempt"], restart["reached"], restart["resumed"], restart["result"]) == (1, 40, 30, None)


def test_half_written_line_is_read_once_it_is_complete(tmp_path):
    path, whole = tmp_path / "fsdp_run.jsonl", log(20)
    path.write_text(start() + log(10) + whole[:30])
    file = EventFile(path)
    found = file.read()
    assert (found.step, found.damaged) == (10, 0)
    with path.open("a") as out:
        out.write(whole[30:])
    found = file.read()
    assert (found.step, found.damaged, list(found.rows)) == (20, 0, [10, 20])


def test_only_what_was_appended_is_read(tmp_path):
    path = tmp_path / "fsdp_run.jsonl"
    path.write_text(start() + log(10))
    file = EventFile(path)
    file.read()
    damages.flip(path, 5)  # in a line that was read before
    with path.open("a") as out:
        out.write(log(20))
    assert (file.read().step, file.read().damaged) == (20, 0)
    path.write_text(start())  # a new file
    assert file.read().rows == {}


DAMAGED = [
    "nonsense", "[]", "{}", '{"event": 3}', '{"event": "log"}', '{"event": "log", "step": "3"}',
    '{"event": "log", "step": 1e400}', '{"event": "save", "checkpoint": ["a"]}', '{"event": "straggler"}',
    '{"event": "start", "world_size": true}', '{"event": "start", "machines": [1]}', '{"event": "end", "result": 0}',
    '{"event": "log", "step": ' + 5000 * "9" + "}", 100_000 * "[", "\ufffd\x00", "x" * (events._MAX_LINE + 9),
]  # fmt: skip


def test_damaged_lines_are_counted_and_skipped(hf_fsdp, watch_json, tmp_path):
    path = tmp_path / "fsdp_run.jsonl"
    for number, damaged in enumerate(DAMAGED):
        path.write_text(f"{start()}{damaged}\n{log(10)}")
        _, tree = watch_json(tmp_path)
        assert tree["damaged_lines"] >= 1 and tree["step"] == 10, number
    assert "damaged lines of fsdp_run.jsonl" in hf_fsdp("watch", tmp_path)[1]


def test_events_of_later_versions_are_ignored(watch_json, tmp_path):
    (tmp_path / "fsdp_run.jsonl").write_text(start() + line("evaluation", step={}) + log(10, text="a", flag=True))
    _, tree = watch_json(tmp_path)
    assert (tree["damaged_lines"], tree["step"]) == (0, 10) and not {"text", "flag"} & tree["history"][0].keys()


def test_long_history_is_thinned(tmp_path, monkeypatch):
    monkeypatch.setattr(events, "_MAX_ROWS", 100)
    (tmp_path / "fsdp_run.jsonl").write_text("".join(log(step) for step in range(1000)))
    rows = EventFile(tmp_path / "fsdp_run.jsonl").read().rows
    assert 100 <= len(rows) <= 200 and max(rows) == 999


def test_loss_that_is_not_a_number_is_shown(hf_fsdp, watch_json, tmp_path):
    (tmp_path / "fsdp_run.jsonl").write_text(start() + log(10) + log(20, loss="nan"))
    _, out, _ = hf_fsdp("watch", tmp_path)
    assert re.search(r"^loss +nan +9\.\d+ +9\.\d+  ▅+!$", out, re.M)
    assert watch_json(tmp_path)[1]["history"][1]["loss"] is None
    assert hf_fsdp("watch", tmp_path, "--html", tmp_path / "page.html")[0] == 0


@pytest.mark.parametrize(("result", "state", "code"), [("finished", "finished", 0), ("failed: a", "failed", 1)])
def test_exit_code_is_that_of_the_result(watch_json, tmp_path, result, state, code):
    (tmp_path / "fsdp_run.jsonl").write_text(start() + log(10) + line("end", step=10, result=result))
    found, tree = watch_json(tmp_path)
    assert (found, tree["state"], tree["result"]) == (code, state, result)


def test_silent_run_is_not_shown_as_running(hf_fsdp, watch_json, tmp_path):
    (tmp_path / "fsdp_run.jsonl").write_text('{"time": 1700000000, "event": "log", "step": 5, "loss": 2}\n')
    assert watch_json(tmp_path)[1]["state"] == "silent"
    assert "and no end is recorded" in hf_fsdp("watch", tmp_path)[1]


def test_run_without_events_is_read_from_trainer_state(watch_json, tmp_path):
    for step in (10, 20):
        saved.local_checkpoint(tmp_path / f"checkpoint-{step}")
        history = [{"step": each, "epoch": 0.1, "loss": 5 - each / 10} for each in range(5, step + 1, 5)]
        state = {"global_step": step, "max_steps": 40, "log_history": history}
        (tmp_path / f"checkpoint-{step}/trainer_state.json").write_text(json.dumps(state))
    _, tree = watch_json(tmp_path)
    assert (tree["source"], tree["state"]) == ("checkpoint-20/trainer_state.json", "unknown")
    assert (tree["step"], tree["max_steps"], [row["loss"] for row in tree["history"]]) == (20, 40, [4.5, 4, 3.5, 3])
    (tmp_path / "checkpoint-20/trainer_state.json").write_text('{"global_step": "many"}')
    _, tree = watch_json(tmp_path)
    assert (tree["source"], tree["step"]) == ("checkpoint-10/trainer_state.json", 10)
    assert [row["complete"] for row in tree["checkpoints"]] == [False, False]  # the sizes are not those of the manifest


def test_numbers_of_a_trainer_state_are_checked(hf_fsdp, watch_json, tmp_path):
    history = '[{"step": 5, "loss": 1e999, "grad_norm": true}, 3, {"loss": 2}, {"step": -1e3}]'
    state = f'{{"global_step": 1{"0" * 400}, "max_steps": 2{"0" * 400}, "log_history": {history}}}'
    (tmp_path / "trainer_state.json").write_text(state)
    _, tree = watch_json(tmp_path)
    assert (tree["step"], tree["history"], tree["damaged_lines"]) == (5, [{"step": 5, "loss": None}], 4)
    assert hf_fsdp("watch", tmp_path)[0] == hf_fsdp("watch", tmp_path, "--html", tmp_path / "page.html")[0] == 0


def test_folder_without_files_of_a_run_is_refused(hf_fsdp, tmp_path):
    code, out, err = hf_fsdp("watch", tmp_path, "--once")
    assert code == 1 and out == "" and "FSDP-E496" in err
    assert "Give the folder of a run" in hf_fsdp("watch", tmp_path / "none")[2]


def test_file_that_is_no_file_is_refused(hf_fsdp, tmp_path):
    os.mkfifo(tmp_path / "fsdp_run.jsonl")
    code, _, err = hf_fsdp("watch", tmp_path)
    assert code == 1 and "FSDP-E472" in err


def test_earlier_report_is_not_that_of_this_run(watch_json, tmp_path):
    watched_runs.write_report(tmp_path)
    os.utime(tmp_path / "fsdp_report.json", (1, 1))
    (tmp_path / "fsdp_run.jsonl").write_text(start() + log(10))
    assert watch_json(tmp_path)[1]["report"] is None


HOSTILE = '</title><script>alert("x")</script>\x1b[2J'


def test_texts_of_files_are_escaped(hf_fsdp, tmp_path):
    lines = [start(), line("end", result=HOSTILE), start(attempt=1), log(10), log(20, **{HOSTILE: 1})]
    lines += [line("straggler", rank=1, text=HOSTILE, machine=HOSTILE), line("end", result=f"failed: {HOSTILE}")]
    (tmp_path / "fsdp_run.jsonl").write_text("".join(lines))
    report = {"model_class": HOSTILE, "num_params": 10**400, "units": HOSTILE, "restarts": [], "problems": [[], {}]}
    report["settings"] = [{"setting": HOSTILE, "status": "differs"}, {"status": []}, 3]
    (tmp_path / "fsdp_report.json").write_text(json.dumps(report))
    assert "\x1b" not in hf_fsdp("watch", tmp_path)[1]
    hf_fsdp("watch", tmp_path, "--html", tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert page.count("&lt;script&gt;") == 4 and "<script" not in page and "\x1b" not in page


def test_page_is_written_once_unless_forced(hf_fsdp, restarted, tmp_path):
    page = tmp_path / "page.html"
    assert hf_fsdp("watch", restarted, "--html", page) == (0, f"written: {page}\n", "")
    before = page.read_text()
    code, _, err = hf_fsdp("watch", restarted, "--html", page)
    assert code == 1 and "FSDP-E833" in err and page.read_text() == before
    assert hf_fsdp("watch", restarted, "--html", page, "--force")[0] == 0
    assert hf_fsdp("watch", restarted, "--force")[0] == 2
    assert "FSDP-E835" in hf_fsdp("watch", restarted, "--html", tmp_path / "none/page.html")[2]


def test_watch_imports_no_heavy_library(restarted, imports_no_heavy_library):
    imports_no_heavy_library("watch", restarted)


def test_history_is_that_of_the_newest_state(tmp_path):
    saved.local_checkpoint(tmp_path / "checkpoint-10")
    (tmp_path / "trainer_state.json").write_text('{"global_step": 30, "log_history": [{"step": 30, "loss": 1}]}')
    assert RunFolder(tmp_path).read().source == "trainer_state.json"
