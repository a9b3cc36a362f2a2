"""Many behaviors in one start of two ranks: lists them, runs them with and without FSDP, and compares them.

The reference is always two unsharded ranks (DistributedDataParallel). Losses and gradient norms are compared, and the
folder ``final`` that a behavior saves: names of files and tensors, values, and JSON files.
"""

from __future__ import annotations

import ast
import json
import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from scripts.ecosystem import assets
from scripts.ecosystem.checks import CODE, check_report, read_weights
from scripts.ecosystem.model import TWO_PROCESSES, Case
from scripts.ecosystem.runs import UNSHARDED, Run, Suite, make_config, run_command

HERE = Path(__file__).resolve().parent / "behaviors"
RUNNER = HERE / "run.py"
GROUPS: Mapping[str, tuple[str, ...]] = {
    "models": (),
    "trainer": (),
    "loops": (),
    "libraries": ("trl", "peft", "sentence_transformers"),
    "setfit": ("setfit",),
    "search": ("optuna",),
}
"""Module of behaviors -> the packages without which it is skipped."""
REFUSED: Mapping[str, Mapping[int, str]] = {
    "trainer/adafactor": {1: "FSDP-E320"},
    "libraries/denoising_auto_encoder_loss": {1: "FSDP-E654", 2: "FSDP-E654"},
}
"""Behavior -> FSDP version -> the code with which the plugin refuses it."""
SECONDS_OF_ONE = 10.0
"""Seconds that are added to the limit of a start for each behavior."""
LOSSES = 1e-5
"""Largest relative difference of losses."""
NORMS = 1e-4
"""Largest relative difference of gradient norms and metrics."""
WEIGHTS = 1e-5
"""Largest L2 distance of a saved tensor, relative to its norm."""
_MEASURED = ("loss", "grad_norm", "eval_", "predict_", "test_", "value", "num_")
_TIMES = ("runtime", "per_second", "num_tokens", "num_input_tokens")
_OURS = frozenset({"fsdp_report.json", "fsdp_manifest.json"})  # which the plugin writes beside the files of the library


@dataclass(frozen=True, kw_only=True)
class Behavior:
    """A function of a module in ``behaviors``."""

    group: str
    function: str

    @property
    def key(self) -> str:
        return f"{self.group}/{self.function}"

    @property
    def name(self) -> str:
        return f"{self.group}: {self.function.replace('_', ' ')}"

    @property
    def refused(self) -> Mapping[int, str]:
        return REFUSED.get(self.key, {})


def find_behaviors() -> list[Behavior]:
    """Return the rows of ``behaviors.yaml`` and the public functions of the modules. Imports none of them."""
    table = yaml.safe_load((HERE / "behaviors.yaml").read_text(encoding="utf-8"))
    names = {
        group: [
            *table.get(group, {}),
            *(
                node.name
                for node in ast.parse((HERE / f"{group}.py").read_text(encoding="utf-8")).body
                if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
            ),
        ]
        for group in GROUPS
    }
    return [Behavior(group=group, function=name) for group, found in names.items() for name in found]


BEHAVIORS = find_behaviors()


def find_missing(behavior: Behavior) -> str:
    """Return why a behavior cannot run here, or an empty string."""
    missing = [package for package in GROUPS[behavior.group] if find_spec(package) is None]
    return f"{missing[0]} is not installed" if missing else ""


def run_behaviors(behaviors: Iterable[Behavior], suite: Suite, fsdp_version: int | None) -> Path:
    """Run behaviors on two ranks, unsharded if `fsdp_version` is ``None``. Returns the folder of the results.

    If a rank ends or the time is over within a behavior, the ranks are started again for the rest.
    """
    folder = suite.work / "grouped" / ("unsharded" if fsdp_version is None else f"fsdp{fsdp_version}")
    rest = [behavior.key for behavior in behaviors]
    for key in rest:
        assets.make_fresh(suite.assets, folder / "behaviors" / key)
    case = Case(name="behaviors", package="transformers", script="", compared=TWO_PROCESSES)
    if fsdp_version is None:
        words = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(UNSHARDED)]
    else:
        (folder / "fsdp.yaml").write_text(yaml.safe_dump(make_config(case, fsdp_version)))
        words = ["-m", "hf_fsdp_plugin.cli.main", "launch", "--config_file", "fsdp.yaml"]
    # PEFT writes sets of names, whose order depends on the hash of strings.
    more = {"PYTHONHASHSEED": "0"} | ({"ACCELERATE_USE_CPU": "true"} if fsdp_version is None else {})
    while rest:
        longer = replace(suite, limit=suite.limit + SECONDS_OF_ONE * len(rest))
        run_command([sys.executable, *words, str(RUNNER), *rest], folder, case, longer, **more)
        ended = [key for key in rest if _has_ended(folder, key)]
        if len(ended) < len(rest):
            first = next(key for key in rest if key not in ended)
            lines = (folder / "log.txt").read_text(errors="replace").splitlines()[-40:]
            (folder / "behaviors" / first / "error-rank0.txt").write_text("\n".join([*lines, "EOFError: no end"]))
            rest = rest[rest.index(first) + 1 :]
        else:
            rest = []
    return folder


def _has_ended(folder: Path, key: str) -> bool:
    place = folder / "behaviors" / key
    return all(any((place / f"{kind}{rank}.{end}").exists() for kind, end in _ENDS) for rank in (0, 1))


_ENDS = (("numbers-rank", "json"), ("error-rank", "txt"))


def compare(behavior: Behavior, ours: Path, reference: Path) -> tuple[list[str], dict[str, Any]]:
    """Return what differs between two runs of a behavior, and what was measured."""
    ours, reference = (folder / "behaviors" / behavior.key for folder in (ours, reference))
    if error := read_failure(reference):
        return [f"the reference fails: {error}"], {}
    faults = check_report(Run(folder=str(ours), code=0, seconds=0.0))
    got, wanted = (json.loads((folder / "numbers-rank0.json").read_text()) for folder in (ours, reference))
    difference, found = compare_values(got, wanted)
    weights, others = compare_folders(ours / "final", reference / "final")
    measured = {"numbers": len(wanted), "loss_difference": difference, "weight_difference": weights}
    if not any("loss" in name for name in wanted):
        faults.append("the behavior returns no losses")
    return faults + found[:3] + others[:3], measured


def read_failure(folder: Path) -> str:
    """Return the last line of the exception of a behavior, or an empty string."""
    for path in sorted(folder.glob("error-rank*.txt")):
        lines = [line for line in path.read_text().splitlines() if line.strip()]
        raised = [line for line in lines if not line.startswith(" ")]
        return (raised or lines)[-1][:300]
    return ""


def read_code(folder: Path) -> str:
    """Return the problem code in the exception of a behavior, or an empty string."""
    found = [CODE.search(path.read_text()) for path in sorted(folder.glob("error-rank*.txt"))]
    return next((match[0] for match in found if match), "")


def compare_values(got: Mapping[str, float], wanted: Mapping[str, float]) -> tuple[float, list[str]]:
    """Return the largest relative difference of losses, and the numbers that differ."""
    largest, faults = 0.0, []
    for name, value in wanted.items():
        if any(part in name for part in _TIMES) or not any(part in name for part in _MEASURED):
            continue
        other = got.get(name, math.nan)
        difference = abs(other - value) / max(abs(value), 1e-2)
        if "loss" in name:
            largest = max(largest, difference)
        if not difference <= (LOSSES if "loss" in name else NORMS):
            faults.append(f"{name} is {other:.7g} instead of {value:.7g}")
    return largest, faults


def compare_folders(ours: Path, reference: Path) -> tuple[float | None, list[str]]:
    """Return the largest relative L2 distance of a saved tensor, and what differs in two folders."""
    files, wanted = (_files(folder) for folder in (ours, reference))
    if not wanted:
        return None, ["the reference saves nothing"]
    faults = [f"{name} is not saved" for name in sorted(wanted - files)]
    faults += [f"{name} is saved, too" for name in sorted(files - wanted)]
    for name in sorted(name for name in files & wanted if name.endswith(".json")):
        if json.loads((ours / name).read_text()) != json.loads((reference / name).read_text()):
            faults.append(f"{name} differs")
    largest = 0.0
    for folder in sorted({Path(name).parent for name in files & wanted if name.endswith(".safetensors")}):
        a, b = read_weights(ours / folder), read_weights(reference / folder)
        faults += [f"tensors {sorted(a.keys() ^ b.keys())[:4]} differ by name"] if a.keys() != b.keys() else []
        for name in a.keys() & b.keys():
            if (a[name].shape, a[name].dtype) != (b[name].shape, b[name].dtype):
                faults.append(f"{name} has another shape or dtype")
                continue
            distance = float((a[name].double() - b[name].double()).norm() / b[name].double().norm().clamp(min=1e-2))
            largest = max(largest, distance)
            if not distance <= WEIGHTS:
                faults.append(f"{name} differs by {distance:.1e}")
    return largest, faults


def _files(folder: Path) -> set[str]:
    names = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    return {name for name in names if Path(name).name not in _OURS}
