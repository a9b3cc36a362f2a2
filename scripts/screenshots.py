"""docs/command_line.md: ``templates/command_line.md`` with the output of its commands, which are run in a folder.

The output of a run with ranks has sizes and times of this machine, that of `doctor` its versions. They are kept as they
are in the document, unless ``update_docs.py --runs`` makes them again.
"""

from __future__ import annotations

import contextlib
import io
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import yaml

from hf_fsdp_plugin.cli import output
from hf_fsdp_plugin.cli.main import VERBS, main
from hf_fsdp_plugin.launcher.flags import FLAG_TABLES
from hf_fsdp_plugin.tools.meta_model import meta_model
from scripts.templates import HERE, fill

ROOT = Path(__file__).resolve().parents[1]
DOCUMENT = ROOT / "docs/command_line.md"
WIDTH = 100
_RUN, _DOCTOR = (f"<!-- output of {name}, written by update_docs.py --runs -->" for name in ("a run", "doctor"))
_END = "<!-- end of the output -->"


def command_line(*, runs: bool = False) -> str:
    """Return the document.

    Args:
        runs: make the outputs of a run with ranks and of ``doctor``, instead of keeping those of the present document.
    """
    flags = FLAG_TABLES["profile"].items()
    with _folder() as folder:
        return fill(
            "command_line.md",
            {
                "run": _screenshot,
                "first": lambda words: _screenshot(words.partition(" ")[2], lines=int(words.partition(" ")[0])),
                "damage": _damage,
                "ranks": _run_of_ranks(folder) if runs else _present(_RUN),
                "doctor": _screenshot("hf-fsdp doctor", lines=24) if runs else _present(_DOCTOR),
                "code": lambda name: str(getattr(output, name)),
                "verbs": "\n".join(f"| `{verb}` | {about} |" for verb, about in VERBS.items()),
                "profile_flags": "\n".join(
                    f"| `--{flag} {value}`".rstrip("` ") + f"` | {text} |" for flag, (value, text) in flags
                ),
                "RUN": _RUN,
                "DOCTOR": _DOCTOR,
                "END": _END,
            },
        )


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    """Work in a temporary folder with the files of the examples, with fixed variables."""
    sys.path.insert(0, str(ROOT))
    from tests.support import saved

    variables = {"COLUMNS": str(WIDTH), "NO_COLOR": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    unset = ("FORCE_COLOR", "HF_FSDP_LAUNCH")
    before, place, program = dict(os.environ), Path.cwd(), sys.executable
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for path, text in yaml.safe_load((HERE / "command_line.yaml").read_text(encoding="utf-8")).items():
            (folder / path).parent.mkdir(exist_ok=True)
            (folder / path).write_text(text)
        for step in (10, 20):
            saved.local_checkpoint(folder / f"run/checkpoint-{step}")
        os.environ.update(variables, HF_HOME=str(folder / "home"))
        for variable in unset:
            os.environ.pop(variable, None)
        os.chdir(folder)
        try:
            with contextlib.redirect_stderr(io.StringIO()):
                meta_model("llama")  # libraries that Transformers imports may print warnings
            yield folder
        finally:
            os.chdir(place)
            os.environ.clear()
            os.environ.update(before)
            sys.path.remove(str(ROOT))
            sys.executable = program


def _screenshot(command: str, *, lines: int | None = None) -> str:
    """Run a command, and return it with its output, at most `lines` lines."""
    words = shlex.split(command)
    target = words.pop() if ">" in words else None
    shown, written = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(written if target else shown), contextlib.redirect_stderr(shown):
        code = main([word for word in words[1:] if word != ">"])
    if target is not None:
        Path(target).write_text(written.getvalue())
    text = shown.getvalue().replace(sys.executable, "python").replace(f"{Path.cwd()}{os.sep}", "").rstrip("\n")
    printed = text.splitlines()
    if lines is not None and len(printed) > lines:
        text = "\n".join([*printed[:lines], "…"])
    if target is not None:
        text = f"{text}\n$ cat {target}\n{Path(target).read_text()}".rstrip("\n")
    status = f"\n$ echo $?\n{code}" if code else ""
    fence = "````" if "```" in text else "```"
    return f"{fence}console\n$ {command}\n{text}{status}\n{fence}"


def _damage(path: str) -> str:
    content = Path(path).read_bytes()
    Path(path).write_bytes(b"x" + content[1:])
    return ""


def _present(begin: str) -> str:
    """Return the text of the present document that follows the line `begin`."""
    text = DOCUMENT.read_text("utf-8") if DOCUMENT.exists() else ""
    return text.partition(begin)[2].partition(_END)[0].strip()


def _run_of_ranks(folder: Path) -> str:
    command = "hf-fsdp launch --config_file fixed.yaml train.py"
    program = [sys.executable, "-m", "hf_fsdp_plugin.cli.main", *shlex.split(command)[1:]]
    done = subprocess.run(program, cwd=folder, capture_output=True, text=True, timeout=300)
    return f"```console\n$ {command}\n{(done.stderr + done.stdout).strip()}\n```"
