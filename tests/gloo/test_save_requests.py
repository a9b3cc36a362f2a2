"""Signals and the file ``save_now`` make all ranks save the same step; signals end the run, the file does not."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate.utils import ProjectConfiguration
from transformers import TrainerCallback

import hf_fsdp_plugin as hfp
from hf_fsdp_plugin.tools.verify.verification import verify
from tests.support.launching import CONFIG, environment, finish, start_script, wait_for, write
from tests.support.matrices import slow
from tests.support.ranks import Ranks
from tests.support.resume_runs import StopAt
from tests.support.tiny import MODELS, global_batch, my_part, parallel_config
from tests.support.trainer_runs import losses, make_trainer

STEPS = 40
USR1, TERM = int(signal.SIGUSR1), int(signal.SIGTERM)


def config(version: int, signals: str = "usr1", **more: Any) -> dict[str, Any]:
    return {"fsdp": "auto_wrap", "fsdp_config": {"fsdp_version": version, "save_on_signal": signals, **more}}


class Requested(TrainerCallback):
    """Asks for a checkpoint once, at an event of step 3, on some ranks. Each step takes a while."""

    def __init__(self, event: str, ranks: tuple[int, ...], signals: tuple[int, ...]) -> None:
        self.event, self.ranks, self.signals = event, ranks, signals
        self.folder = ""

    def _ask(self, event: str, args: Any, state: Any) -> None:
        if event != self.event or state.global_step != 3 or dist.get_rank() not in self.ranks:
            return
        self.event = ""
        for number in self.signals:
            time.sleep(0.2 * dist.get_rank())
            os.kill(os.getpid(), number)
        if not self.signals:
            Path(args.output_dir, "save_now").touch()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        time.sleep(0.05)
        self._ask("step", args, state)

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._ask("accumulation", args, state)

    def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._ask("evaluation", args, state)
        if state.global_step == 3:
            time.sleep(0.4)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._ask("save", args, state)


ARGUMENTS: dict[str, dict[str, Any]] = {
    "step": {},
    "accumulation": {"gradient_accumulation_steps": 2},
    "evaluation": {"eval_strategy": "steps", "eval_steps": 3, "per_device_eval_batch_size": 1},
    "save": {"save_strategy": "steps", "save_steps": 3},
}


def end_by_signal(
    output_dir: str, event: str, ranks: tuple[int, ...], signals: tuple[int, ...], **arguments: Any
) -> dict[str, Any]:
    """Train until the ranks exit, then resume for four steps, and compare with a run without a signal."""
    before = signal.getsignal(signal.SIGUSR1)
    arguments |= {"max_steps": STEPS, **ARGUMENTS[event]}
    trainer = make_trainer(output_dir, callbacks=[Requested(event, ranks, signals)], **arguments)
    with pytest.raises(SystemExit) as ended:
        trainer.train()
    step = trainer.state.global_step
    newest = hfp.newest_checkpoint(output_dir)
    resumed = make_trainer(output_dir, callbacks=[StopAt(step + 4)], **arguments)
    resumed.train(resume_from_checkpoint=True)
    whole = make_trainer(f"{output_dir}/whole", callbacks=[StopAt(step + 4)], **{**arguments, "save_strategy": "no"})
    whole.train()
    return {
        "code": ended.value.code, "step": step, "newest": Path(newest).name if newest else "",
        "problems": verify(Path(output_dir, f"checkpoint-{step}")).problems,
        "losses": (losses(resumed)[-4:], losses(whole)[-4:]),
        "is_restored": signal.getsignal(signal.SIGUSR1) == before,
        "threads": [thread.name for thread in threading.enumerate() if "agreed" in thread.name],
        "has_report": Path(output_dir, "fsdp_report.json").exists(),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("version", "event", "ranks", "signals"),
    [
        (2, "step", (1,), (USR1,)),
        (1, "evaluation", (0, 1), (USR1,)),
        slow(2, "evaluation", (1,), (USR1,)),
        slow(2, "accumulation", (0,), (USR1,)),
        slow(1, "accumulation", (0, 1), (USR1,)),
        slow(2, "save", (0,), (USR1,)),
        slow(1, "step", (0, 1), (USR1,)),
    ],
)
def test_signal_saves_one_step_and_ends_the_ranks(
    two_ranks: Ranks, tmp_path: Path, version: int, event: str, ranks: tuple[int, ...], signals: tuple[int, ...]
) -> None:
    """The resumed run has the losses of a run without a signal."""
    found = two_ranks.run(end_by_signal, str(tmp_path), event, ranks, signals, **config(version))
    assert found[0]["step"] == found[1]["step"] < STEPS
    assert (found[0]["step"] == 3) == (event == "evaluation")
    for each in found:
        assert each["code"] == 128 + USR1 and each["newest"] == f"checkpoint-{each['step']}"
        assert each["problems"] == () and each["is_restored"] and not each["threads"] and each["has_report"]
        assert each["losses"][0] == pytest.approx(each["losses"][1], rel=1e-6)


@pytest.mark.parametrize("asynchronous", [True, slow(False)])
def test_two_signals_are_one_request(two_ranks: Ranks, tmp_path: Path, asynchronous: bool) -> None:
    settings = config(2, "both", async_save=asynchronous)
    found = two_ranks.run(end_by_signal, str(tmp_path), "step", (0, 1), (USR1, TERM), **settings)
    for each in found:
        assert each["code"] == 128 + USR1 and each["problems"] == ()
        assert each["losses"][0] == pytest.approx(each["losses"][1], rel=1e-6)


class SlowSave(hfp.FsdpTrainer):
    """Writes checkpoints for longer than the ranks take to look for the next request."""

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        time.sleep(1.5)


def save_now(output_dir: str, event: str, **arguments: Any) -> dict[str, Any]:
    """Train to the end, and create the file on rank 0 at step 3."""
    arguments |= {"max_steps": 20, **ARGUMENTS[event]}
    slow_save = SlowSave if event == "step" else hfp.FsdpTrainer
    trainer = make_trainer(output_dir, callbacks=[Requested(event, (0,), ())], trainer_class=slow_save, **arguments)
    trainer.train()
    folders = sorted(path.name for path in Path(output_dir).glob("checkpoint-*"))
    problems = [verify(Path(output_dir, name)).problems for name in folders]
    is_left = Path(output_dir, "save_now").exists()
    return {"step": trainer.state.global_step, "folders": folders, "problems": problems, "is_left": is_left}


@pytest.mark.parametrize(("version", "event"), [(2, "step"), slow(1, "step"), slow(2, "evaluation"), slow(2, "save")])
def test_file_saves_and_the_training_goes_on(two_ranks: Ranks, tmp_path: Path, version: int, event: str) -> None:
    found = two_ranks.run(save_now, str(tmp_path), event, **config(version))
    for each in found:
        assert each["step"] == 20 and not each["is_left"]
        assert set(each["problems"]) == {()}
        assert len(each["folders"]) >= 6 if event == "save" else len(each["folders"]) == 1


def keep_handlers(output_dir: str, **arguments: Any) -> list[bool]:
    """Train with a handler of the script, and without any signal in the setting."""
    received: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: received.append(number))
    try:
        trainer = make_trainer(output_dir, callbacks=[Requested("step", (0, 1), (USR1,))], **arguments)
        trainer.train()
    finally:
        signal.signal(signal.SIGUSR1, before)
    return [received == [USR1], trainer.state.global_step == 6, not list(Path(output_dir).glob("checkpoint-*"))]


def test_handler_of_the_script_is_kept(two_ranks: Ranks, tmp_path: Path) -> None:
    assert two_ranks.run(keep_handlers, str(tmp_path), **config(2)) == [[True] * 3] * 2


class HandlerAtStep(TrainerCallback):
    handler: Any = None

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.handler = (signal.getsignal(signal.SIGUSR1), signal.getsignal(signal.SIGTERM))


def handlers(output_dir: str, **arguments: Any) -> list[bool]:
    callback = HandlerAtStep()
    make_trainer(output_dir, callbacks=[callback], **arguments).train()
    return [each is signal.SIG_DFL for each in callback.handler]


@pytest.mark.parametrize(("value", "are_default"), [("none", [True, True]), ("usr1", [False, True])])
def test_only_signals_of_the_setting_are_handled(
    two_ranks: Ranks, tmp_path: Path, value: str, are_default: list[bool]
) -> None:
    assert two_ranks.run(handlers, str(tmp_path), **config(2, value)) == [are_default] * 2


def loop(output_dir: str, ends: bool) -> dict[str, Any]:
    """Train in a loop that asks after each step. Rank 1 receives a signal, or rank 0 finds the file."""
    project = ProjectConfiguration(project_dir=output_dir)
    accelerator = hfp.accelerator(hfp.load_spec(parallel_config("full_shard", 2, 2)), project_config=project)
    model = MODELS["llama"]()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    saved: list[int] = []
    with contextlib.ExitStack() as stack:
        ended = stack.enter_context(pytest.raises(SystemExit)) if ends else None
        for step in range(30):
            accelerator.backward(model(**my_part(global_batch(step), dist.get_rank(), 2)).loss)
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(0.05)
            if step == 2 and ends and dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGUSR1)
            if step == 2 and not ends and dist.get_rank() == 0:
                Path(output_dir, "save_now").touch()
            if hfp.save_requested(accelerator):
                accelerator.save_state(f"{output_dir}/step_{step}")
                saved.append(step)
                hfp.end_requested_save()
    hfp.uninstall()
    return {
        "saved": saved, "last": step, "code": ended.value.code if ended is not None else 0,
        "problems": verify(Path(output_dir, f"step_{saved[0]}")).problems,
        "is_left": Path(output_dir, "save_now").exists(),
    }  # fmt: skip


@pytest.mark.parametrize("ends", [True, False])
def test_loop_saves_the_same_step_on_all_ranks(two_ranks: Ranks, tmp_path: Path, ends: bool) -> None:
    found = two_ranks.run(loop, str(tmp_path), ends)
    assert found[0]["saved"] == found[1]["saved"] and len(found[0]["saved"]) == 1
    for each in found:
        assert each["code"] == (128 + USR1 if ends else 0) and (each["last"] < 29) == ends
        assert each["problems"] == () and not each["is_left"]


SCRIPT = """
    import os, pathlib, sys, time
    {install}
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

    RANK = os.environ["RANK"]

    class Slow(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            time.sleep(0.1)
            if state.global_step == 3:
                pathlib.Path(f"ready_{{RANK}}").write_text(str(os.getpid()))

    torch.manual_seed(0)
    sizes = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=64)
    rows = [{{"input_ids": row, "labels": row}} for row in torch.randint(64, (256, 8))]
    args = TrainingArguments(
        "out", max_steps=40, save_strategy="no", per_device_train_batch_size=2, use_cpu=True, report_to="none",
        disable_tqdm=True,
    )
    trainer = Trainer(LlamaForCausalLM(LlamaConfig(**sizes)), args, train_dataset=rows, callbacks=[Slow()])
    trainer.train()
    line = " ".join(["END", str(RANK), str(trainer.state.global_step)]) + chr(10)
    sys.stdout.write(line)  # at once: both ranks write to one pipe
    sys.stdout.flush()
"""


def checkpoints(folder: Path) -> list[Path]:
    found = sorted((folder / "out").glob("checkpoint-*"))
    assert all(verify(each).problems == () for each in found)
    return found


def test_signal_to_the_launcher_saves_and_starts_again(tmp_path: Path) -> None:
    process, _ = start_script(tmp_path, SCRIPT.format(install=""), "--max_restarts", "1")
    process.send_signal(signal.SIGUSR1)
    done = finish(process)
    assert done.returncode == 0, done.stderr
    (saved,) = checkpoints(tmp_path)
    assert re.search(
        rf"SIGUSR1 to rank \d: {saved.name} was complete .* s later; the ranks exit with code 138", done.stderr
    )
    assert "END 0 40" in done.stdout and "0 optimizer steps trained again" in done.stdout


def test_sigterm_to_the_launcher_saves_within_its_grace(tmp_path: Path) -> None:
    (tmp_path / "fsdp.yaml").write_text(CONFIG + "  fsdp_save_on_signal: SIGTERM\n")
    process, _ = start_script(tmp_path, SCRIPT.format(install=""))
    process.send_signal(signal.SIGTERM)
    done = finish(process)
    assert done.returncode == 128 + TERM and len(checkpoints(tmp_path)) == 1, done.stderr
    assert "the ranks exit with code 143" in done.stderr


@pytest.mark.parametrize("launcher", ["torchrun", slow("accelerate launch")])
def test_ranks_of_other_launchers_save_and_start_again(tmp_path: Path, launcher: str) -> None:
    """As srun with ``--signal`` does, the signal is sent to the ranks: here to one of them."""
    install = f"import hf_fsdp_plugin; hf_fsdp_plugin.install({str(tmp_path / 'fsdp.yaml')!r})"
    write(
        tmp_path,
        SCRIPT.format(install=install if launcher == "torchrun" else "import hf_fsdp_plugin as p; p.install()"),
    )
    torch_run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    # With the static rendezvous, the ranks of a restart wait for addresses of those before.
    accelerate = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", "fsdp.yaml"]
    accelerate += ["--num_processes", "2", "--rdzv_backend", "c10d"]
    command = torch_run if launcher == "torchrun" else accelerate
    process = subprocess.Popen(
        [*command, "--max_restarts", "1", "train.py"], cwd=tmp_path, text=True,
        # torch would give both attempts one store, in which a rank may read the address of a peer that has ended.
        env=environment(
            tmp_path,
            TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1",
            PET_RDZV_ENDPOINT="localhost:0",
            ACCELERATE_USE_CPU="true",
        ),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    os.kill(int(wait_for(tmp_path / "ready_1", seconds=100)), signal.SIGUSR1)
    done = finish(process)
    assert done.returncode == 0, done.stderr
    assert len(checkpoints(tmp_path)) == 1
    assert done.stdout.count("END") == 2 and "END 0 40" in done.stdout
