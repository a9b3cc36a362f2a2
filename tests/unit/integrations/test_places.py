"""Where a rank was, from the stacks that it records at a crash and when it is asked."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hf_fsdp_plugin.hangs.calls import CallRecord, Counts, read_calls
from hf_fsdp_plugin.hangs.python_stacks import (
    STACK_SIGNAL,
    Frame,
    find_place,
    is_library,
    read_stack,
    waits_for_data,
)

LIBRARY = str(Path(os.__file__).parent / "site-packages" / "torch")
CODE = """
import os, sys, threading
from pathlib import Path
from hf_fsdp_plugin.hangs.python_stacks import StackFile, request_stack
stacks = StackFile()
stacks.open(Path(sys.argv[1]), records_crashes=True)
stop = threading.Event()
threading.Thread(target=stop.wait, daemon=True).start()
def outer(): inner()
def inner(): {line}
outer()
print("goes on")
"""
THREAD = """
def train(): stacks.follow_thread(threading.current_thread()); outer()
thread = threading.Thread(target=train); thread.start(); thread.join()
"""


@pytest.mark.parametrize(
    ("line", "code"), [("os.abort()", -6), (f"os.kill(os.getpid(), {STACK_SIGNAL})", 0)], ids=["crash", "request"]
)
def test_stack_of_the_main_thread_is_recorded(tmp_path: Path, line: str, code: int) -> None:
    path = tmp_path / "rank_0.stacks"
    done = subprocess.run(
        [sys.executable, "-c", CODE.format(line=line), str(path)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (code, "" if code else "goes on\n"), done.stderr
    assert [frame.name for frame in read_stack(path)] == ["<module>", "outer", "inner"]


@pytest.mark.parametrize("line", ["os.abort()", "request_stack(Path(sys.argv[1]), os.getpid())"])
def test_stack_of_the_thread_that_trains_is_read(tmp_path: Path, line: str) -> None:
    code = CODE.format(line=line).replace("outer()\nprint", f"{THREAD}\nprint")
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "stacks")], capture_output=True, check=False)
    names = [frame.name for frame in read_stack(tmp_path / "stacks")]
    assert names[names.index("train") :][:3] == ["train", "outer", "inner"]


@pytest.mark.parametrize("handler", ["signal.SIG_DFL", "lambda *_: print('saved')", "signal.SIG_IGN"])
def test_handlers_of_sigterm_run_before_and_after(tmp_path: Path, handler: str) -> None:
    """Of the script, and of the plugin, which changes the handler while it saves in the background."""
    line = (
        f"import signal; own = signal.signal(signal.SIGTERM, {handler}); os.kill(os.getpid(), signal.SIGTERM); "
        "signal.signal(signal.SIGTERM, own); stacks.close(); os.kill(os.getpid(), signal.SIGTERM)"
    )
    code = CODE.format(line=line)
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "stacks")], capture_output=True, text=True)
    assert done.returncode == -signal.SIGTERM, done.stderr
    assert done.stdout == ("saved\n" if "saved" in handler else "")


def test_stack_is_recorded_at_sigterm(tmp_path: Path) -> None:
    code = CODE.format(line="os.kill(os.getpid(), 15)")
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "stacks")], capture_output=True)
    assert done.returncode == -signal.SIGTERM
    assert [frame.name for frame in read_stack(tmp_path / "stacks")] == ["<module>", "outer", "inner"]


def test_missing_or_damaged_stacks_are_empty(tmp_path: Path) -> None:
    assert read_stack(tmp_path / "none") == []
    (tmp_path / "damaged").write_bytes(b'main 0x1\nThread 0x2 (most recent call first):\n  File "a", line 3 in f\n\xff')
    assert read_stack(tmp_path / "damaged") == []


SCRIPT = Frame("/work/train.py", 30, "main")
BARRIER = Frame(f"{LIBRARY}/distributed/distributed_c10d.py", 9, "barrier")


@pytest.mark.parametrize(
    ("stack", "expected"),
    [
        ([SCRIPT], ("", "at /work/train.py:30")),
        (
            [SCRIPT, Frame(f"{LIBRARY}/nn/modules/module.py", 9, "_call_impl")],
            ("forward", "in forward at /work/train.py:30"),
        ),
        ([SCRIPT, Frame("/work/module.py", 9, "_call_impl")], ("", "at /work/module.py:9")),
        (
            [SCRIPT, Frame(f"{LIBRARY}/accelerate/accelerator.py", 9, "save_state"), BARRIER],
            ("save_state", "in save_state (barrier) at /work/train.py:30"),
        ),
        ([SCRIPT, BARRIER], ("barrier", "in barrier at /work/train.py:30")),
        ([Frame(f"{LIBRARY}/optim/optimizer.py", 9, "step")], ("optimizer.step", "in optimizer.step")),
        ([Frame(f"{LIBRARY}/unknown.py", 9, "unknown")], ("", "")),
        ([], ("", "")),
    ],
)
def test_outermost_known_call_is_the_place(stack: list[Frame], expected: tuple[str, str]) -> None:
    assert find_place(stack) == expected


def test_place_is_printed_with_code_and_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("\nloss = model(batch)\n")
    script = Frame(str(tmp_path / "train.py"), 2, "main")
    forward = Frame(f"{LIBRARY}/nn/modules/module.py", 9, "_call_impl")
    shown = "at train.py:2 `loss = model(batch)` after 7 optimizer steps"
    assert find_place([script, forward], Counts(7, 0)) == ("forward", f"in forward {shown}")
    stack = [script, Frame(f"{LIBRARY}/accelerate/accelerator.py", 9, "backward"), BARRIER]
    assert find_place(stack, Counts(7, 8)) == ("backward", f"in backward (barrier) {shown} (8 forwards)")


def test_library_is_told_from_user_code(tmp_path: Path) -> None:
    assert is_library(os.__file__) and is_library("<frozen runpy>")
    assert not is_library(str(tmp_path / "train.py"))


@pytest.mark.parametrize("calls", [True, False])
def test_steps_are_counted_only_in_an_open_file(tmp_path: Path, calls: bool) -> None:
    import torch

    model = torch.nn.Linear(1, 1)
    path, record = tmp_path / "rank_0.calls", CallRecord()
    counted, ignored = (torch.optim.SGD(model.parameters()) for _ in range(2))
    record.count_steps(ignored)
    record.count_forwards(model)
    record.open(path, calls=calls)
    record.count_steps(counted)
    assert read_calls(0, path).counts == record.counts == Counts(0, 0) and record.is_open == calls
    record.count_forwards(model)
    for _ in range(3):
        model(torch.ones(1)).sum().backward()
        counted.step()
        ignored.step()
    model(torch.ones(1))
    assert read_calls(0, path).counts == record.counts == Counts(3, 4)
    record.close()
    counted.step()
    assert read_calls(0, path).counts == Counts(3, 4)
    assert read_calls(0, tmp_path / "none").counts is None


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("text = file.read()", True),
        ("with open(path) as file:", True),
        ("weights = safe_open(path)", True),
        ("names = os.listdir(folder)", True),
        ("time.sleep(600)", False),
        ("loss = loss.item()", False),
        ("weight.copy_(other)", False),
        ("model.reload()", False),
        ("", False),
    ],
)
def test_call_of_the_innermost_line_shows_waits_for_files(tmp_path: Path, code: str, expected: bool) -> None:
    script = tmp_path / "train.py"
    script.write_text(f"{code}\n")
    assert waits_for_data([Frame(str(script), 1, "main")]) == expected
    assert not waits_for_data([Frame(str(script), 1, "main"), Frame(f"{LIBRARY}/nn/modules/linear.py", 1, "forward")])


def test_data_loader_and_libraries_wait_for_data() -> None:
    loader = Frame(f"{LIBRARY}/utils/data/dataloader.py", 1, "_try_get_data")
    queue = Frame(str(Path(os.__file__).parent / "multiprocessing" / "connection.py"), 1, "_poll")
    assert waits_for_data([Frame("train.py", 1, "main"), loader, queue])
    assert waits_for_data([Frame("train.py", 1, "main"), Frame(str(Path(os.__file__).parent / "ssl.py"), 1, "do")])
    assert not waits_for_data([Frame("train.py", 1, "main"), queue]) and not waits_for_data([])
