"""Makes the pictures of the documents from real small runs on CPU ranks: docs/pictures/NAME.png. It needs chromium.

    python -m scripts.pictures              those whose code has changed
    python -m scripts.pictures plan run     these
    python -m scripts.pictures --check      change nothing; exit code 1 if the code of a picture has changed

docs/pictures/inputs.json has the hash of the code that draws each picture, with which a test compares the present one.
"""

from __future__ import annotations

import argparse
import hashlib
import html
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
FOLDER: Final = ROOT / "docs/pictures"
RECORD: Final = FOLDER / "inputs.json"
_BROWSERS: Final = ("chromium", "chromium-browser", "google-chrome")
_PACKAGE: Final = "hf_fsdp_plugin"
_PAGES: Final = (f"{_PACKAGE}/tools/pages.py", f"{_PACKAGE}/tools/plan/charts.html")
_COLUMNS: Final = 100
_WIDTH: Final = 860

_CONFIG: Final = """\
distributed_type: FSDP
num_processes: 2
use_cpu: true
fsdp_config:
  fsdp_version: 2
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_state_dict_type: SHARDED_STATE_DICT
"""
_LLAMA_8B: Final = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "vocab_size": 128256,
}  # fmt: skip
_TRAIN: Final = """\
import sys
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

sizes = dict(hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=4)
model = LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes))
torch.manual_seed(0)
tokens = torch.randint(256, (64, 1)) + torch.arange(64)
rows = [{"input_ids": row % 256, "labels": row % 256} for row in tokens]
args = TrainingArguments("out", max_steps=int(sys.argv[1]), per_device_train_batch_size=4, learning_rate=1e-3,
                         logging_steps=5, save_steps=80, report_to="none", disable_tqdm=True, use_cpu=True)
Trainer(model, args, train_dataset=rows).train()
"""
_HANG: Final = """\
import time
import torch
from accelerate import Accelerator

accelerator = Accelerator()
model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)])
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
for step in range(10):
    loss = model(torch.randn(8, 64)).square().mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    if step == 3 and accelerator.process_index == 1:
        time.sleep(600)
"""


def _run(folder: Path, command: str, **variables: str) -> str:
    """Run a command of hf-fsdp, and return what it prints."""
    program = [sys.executable, "-m", "hf_fsdp_plugin.cli.main", *shlex.split(command)[1:]]
    env = {**os.environ, "COLUMNS": str(_COLUMNS), "NO_COLOR": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    env |= {"HF_HUB_OFFLINE": "1", **variables}
    done = subprocess.run(program, cwd=folder, env=env, capture_output=True, text=True, timeout=600)
    return (done.stderr + done.stdout).replace(f"{folder}{os.sep}", "").strip()


def _broken(line: str) -> list[str]:
    return textwrap.wrap(line, _COLUMNS, break_on_hyphens=False) if len(line) > _COLUMNS else [line]


def _terminal(command: str, text: str) -> str:
    """Return a page that shows a command and its output as a terminal does, with long lines broken."""
    lines = [part for line in text.splitlines() for part in _broken(line)]
    shown = html.escape("\n".join([f"$ {command}", *lines]))
    style = "margin:0;padding:14px 18px;background:#16181b;color:#ececec;font:13px/1.45 'DejaVu Sans Mono',monospace"
    return f"<!doctype html><meta charset=utf-8><body style='margin:0'><pre style=\"{style}\">{shown}</pre>"


def _plan(folder: Path) -> str:
    (folder / "llama").mkdir()
    (folder / "llama/config.json").write_text(json.dumps(_LLAMA_8B))
    settings = '--fsdp "full_shard auto_wrap" --fsdp_version 2 --mixed_precision bf16'
    _run(folder, f"hf-fsdp plan --model llama {settings} --world-size 8 --machine h100-sxm --html plan.html")
    return (folder / "plan.html").read_text(encoding="utf-8")


def _profile(folder: Path) -> str:
    command = "hf-fsdp profile --config_file fsdp.yaml train.py"
    text = _run(folder, f"{command} 20")
    return _terminal(command, text[text.index("LlamaForCausalLM,") :])


def _watched(folder: Path) -> str:
    _run(folder, "hf-fsdp launch --config_file fsdp.yaml train.py 160")
    _run(folder, "hf-fsdp watch out --html run.html")
    return (folder / "run.html").read_text(encoding="utf-8")


def _hang(folder: Path) -> str:
    command = "hf-fsdp launch --config_file fsdp.yaml --hang_timeout 20 hang.py"
    text = _run(folder, command)
    return _terminal(command, text[text.index("hf-fsdp: hang:") :])


@dataclass(frozen=True, kw_only=True, slots=True)
class Picture:
    """A picture: the function that returns its page, its size in pixels, and the code on which it depends."""

    draw: Callable[[Path], str]
    code: tuple[str, ...]
    height: int | None = None
    width: int = _WIDTH


PICTURES: Final = {
    "plan": Picture(draw=_plan, height=1066, code=(*_PAGES, f"{_PACKAGE}/tools/plan/page.py")),
    "profile": Picture(draw=_profile, code=(f"{_PACKAGE}/tools/profile/verb.py",)),
    "run": Picture(
        draw=_watched,
        height=830,
        code=(*_PAGES, *(f"{_PACKAGE}/tools/watch/{name}" for name in ("run.html", "page.py", "figures.py"))),
    ),
    "hang": Picture(draw=_hang, code=(f"{_PACKAGE}/hangs/hang_texts.py",)),
}


def input_hash(name: str) -> str:
    """Return the hash of the code that draws a picture: its own, and this program."""
    digest = hashlib.sha256()
    for path in (*PICTURES[name].code, "scripts/pictures.py"):
        digest.update((ROOT / path).read_bytes())
    return digest.hexdigest()


def outdated() -> list[str]:
    """Return the pictures that are missing, or whose code has changed since they were made."""
    recorded = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {}
    return [
        name for name in PICTURES if not (FOLDER / f"{name}.png").exists() or recorded.get(name) != input_hash(name)
    ]


def make(names: Iterable[str], browser: str) -> None:
    """Make pictures, and record the hashes of their code."""
    FOLDER.mkdir(exist_ok=True)
    recorded = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {}
    for name in names:
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place)
            for file, text in {"fsdp.yaml": _CONFIG, "train.py": _TRAIN, "hang.py": _HANG}.items():
                (folder / file).write_text(text)
            picture = PICTURES[name]
            page = picture.draw(folder)
            (folder / "page.html").write_text(page, encoding="utf-8")
            height = picture.height or 28 + round(18.85 * (page.count("\n") + 1))
            target = folder / f"{name}.png"
            flags = "--headless --no-sandbox --disable-gpu --hide-scrollbars --disable-dev-shm-usage"
            flags += f" --user-data-dir={folder / 'browser'} --window-size={picture.width},{height}"
            command = [browser, *flags.split(), f"--screenshot={target}", (folder / "page.html").as_uri()]
            subprocess.run(command, check=True, capture_output=True, timeout=120)
            shutil.copy(target, FOLDER / target.name)
        recorded[name] = input_hash(name)
        RECORD.write_text(json.dumps(recorded, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        print(f"wrote {FOLDER / target.name}, {(FOLDER / target.name).stat().st_size:,} bytes")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[*PICTURES, []], help="default: those whose code has changed")
    parser.add_argument("--check", action="store_true", help="change nothing; exit code 1 if one is out of date")
    args = parser.parse_args()
    if args.check:
        stale = outdated()
        print("\n".join(f"out of date: {name}: python -m scripts.pictures {name}" for name in stale))
        return 1 if stale else 0
    browser = next(filter(None, map(shutil.which, _BROWSERS)), None)
    if browser is None:
        parser.error("needs a browser: apt-get install chromium")
    make(args.names or outdated(), browser)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
