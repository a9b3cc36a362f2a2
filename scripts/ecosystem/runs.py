"""Runs a script: on two ranks through the plugin, or without FSDP as the reference. References are kept."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

import yaml

from scripts.ecosystem import assets
from scripts.ecosystem.model import TWO_PROCESSES, Case

HERE = Path(__file__).resolve().parent / "scripts"
UNSHARDED = HERE.parent / "unsharded.py"
_OURS = ("FSDP_", "ACCELERATE_", "PARALLELISM_", "HF_FSDP_")
_PINNED = ("torch", "transformers", "accelerate", "trl", "peft", "bitsandbytes", "sentence-transformers")


@dataclass(frozen=True, kw_only=True)
class Suite:
    """Folders and limits of one run of the suite."""

    work: Path
    """Folder for models, datasets, outputs and logs."""
    transformers: Path | None = None
    """``examples/pytorch`` of the transformers repository."""
    accelerate: Path | None = None
    """``examples`` of the accelerate repository."""
    limit: float = 300.0
    """Seconds after which a script is killed."""
    wrapper: tuple[str, ...] = ()
    """A command that starts every script, such as ``nice``."""

    @property
    def assets(self) -> Path:
        return self.work / "assets"


@dataclass(frozen=True, kw_only=True)
class Run:
    """One finished run of a script."""

    folder: str
    code: int
    seconds: float
    timed_out: bool = False

    @property
    def out(self) -> Path:
        return Path(self.folder)

    @property
    def log(self) -> str:
        return (self.out / "log.txt").read_text(errors="replace")


def script_words(case: Case, suite: Suite) -> list[str]:
    """Return ``["-m", MODULE]`` or ``[PATH]``."""
    places = {"here": HERE, "transformers": suite.transformers, "accelerate": suite.accelerate}
    return case.script.format(**{name: place or "" for name, place in places.items()}).split()


def run_reference(case: Case, suite: Suite) -> Run:
    """Run the script without FSDP, on one process or two, or return the earlier run with the same command."""
    two = case.compared == TWO_PROCESSES
    arguments = case.arguments if case.uninterrupted is None else case.uninterrupted
    words = [*script_words(case, suite), *_arguments(case, f"{arguments} {case.alone}", 1 if two else 2)]
    key = json.dumps([words, two, assets.VERSION, dict(case.environ), _versions(), _text_of(words[0])])
    folder = suite.work / "references" / hashlib.sha256(key.encode()).hexdigest()[:16]
    done = folder / "run.json"
    if done.exists():
        return Run(**json.loads(done.read_text()))
    assets.make_fresh(suite.assets, folder)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(UNSHARDED)]
    run = run_command(
        [sys.executable, *(torchrun if two else []), *words], folder, case, suite, ACCELERATE_USE_CPU="true"
    )
    if run.code == 0:
        done.write_text(json.dumps(asdict(run)))
    return run


def run_sharded(case: Case, suite: Suite, fsdp_version: int) -> Run:
    """Run the script unchanged on two ranks through ``hf-fsdp launch``."""
    folder = suite.work / "runs" / case.name.replace("/", "-").replace(" ", "_") / f"fsdp{fsdp_version}"
    assets.make_fresh(suite.assets, folder)
    (folder / "fsdp.yaml").write_text(yaml.safe_dump(make_config(case, fsdp_version), sort_keys=False))
    launch = [sys.executable, "-m", "hf_fsdp_plugin.cli.main", "launch", "--config_file", "fsdp.yaml"]
    words = [*launch, *script_words(case, suite)]
    if case.before is not None:
        first = run_command([*words, *_arguments(case, case.before, 1)], folder, case, suite)
        if first.code != 0:
            return first
        (folder / "log.txt").rename(folder / "log_before.txt")
    return run_command([*words, *_arguments(case, case.arguments, 1)], folder, case, suite)


def make_config(case: Case, fsdp_version: int) -> dict[str, object]:
    """Return Accelerate's config file for a case."""
    own = case.settings_1 if fsdp_version == 1 else case.settings_2
    return {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP",
        "mixed_precision": "no",
        "num_machines": 1,
        "num_processes": 2,
        "use_cpu": True,
        **case.top,
        "fsdp_config": {
            "fsdp_version": fsdp_version,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_cpu_ram_efficient_loading": True,  # as the wizard of `accelerate config` writes it
            **case.settings,
            **own,
        },
    }


def _arguments(case: Case, text: str, factor: int) -> list[str]:
    return shlex.split(text.replace("{batch}", str(case.batch * factor)))


def _versions() -> list[str]:
    found = []
    for name in _PINNED:
        try:
            found.append(version(name))
        except ModuleNotFoundError:
            found.append("")
    return found


def _text_of(word: str) -> str:
    path = Path(word)
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""


def run_command(command: list[str], folder: Path, case: Case, suite: Suite, **more: str) -> Run:
    """Run a command in a folder, with its output in ``log.txt``."""
    environ = {
        **{name: value for name, value in os.environ.items() if not name.startswith(_OURS)},
        "HF_HOME": str(suite.work / "hf_home"),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "WANDB_MODE": "disabled",
        **case.environ,
        **more,
    }
    # torchrun leaves a file in the temporary folder.
    environ["TMPDIR"] = str(folder / "tmp")
    (folder / "tmp").mkdir(exist_ok=True)
    # Caches of datasets are separate for each run: ranks and references must not read what another one writes.
    environ.setdefault("HF_DATASETS_CACHE", str(folder / "datasets_cache"))
    start = time.monotonic()
    with (folder / "log.txt").open("w") as log:
        log.write(f"$ {shlex.join(command)}\n")
        log.flush()
        process = subprocess.Popen(
            [*suite.wrapper, *command], cwd=folder, env=environ, stdout=log, stderr=log, start_new_session=True
        )
        timed_out = False
        try:
            code = process.wait(suite.limit)
        except subprocess.TimeoutExpired:
            timed_out = True
            code = _stop(process) or 1
        except BaseException:
            _stop(process)
            raise
    seconds = round(time.monotonic() - start, 1)
    return Run(folder=str(folder), code=code, seconds=seconds, timed_out=timed_out)


def _stop(process: subprocess.Popen[bytes]) -> int:
    """End a script with all its ranks, and return its exit code."""
    os.killpg(process.pid, signal.SIGTERM)
    try:
        return process.wait(20)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return process.wait()
