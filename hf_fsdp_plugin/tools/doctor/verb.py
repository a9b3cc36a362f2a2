"""``hf-fsdp doctor``: Show the installed versions, the devices, and what this package relies on in other libraries,
probed on the installed versions. Paste the output into bug reports.

Examples::

    hf-fsdp doctor
    hf-fsdp doctor --json > doctor.json
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

from hf_fsdp_plugin.cli.enable import check_enabled, find_enabled
from hf_fsdp_plugin.cli.output import OK, PROBLEMS, print_result
from hf_fsdp_plugin.launcher.world import find_devices
from hf_fsdp_plugin.problems import Problem, has_errors
from hf_fsdp_plugin.supported import SUPPORTED, unsupported_versions, untested_versions
from hf_fsdp_plugin.text import format_memory, format_table, plural

_PACKAGES: Final = (
    *("hf_fsdp_plugin", "torch", "transformers", "accelerate", "datasets", "numpy", "safetensors", "huggingface_hub"),
    *("peft", "trl", "sentence-transformers", "bitsandbytes", "torchao", "torchvision", "torchaudio", "deepspeed"),
)
_PROBE: Final = (
    "import sys; sys.argv[0] = 'hf-fsdp'; from hf_fsdp_plugin.tools.doctor.contract_probe import main; main()"
)
_LAUNCHER_VARIABLES: Final = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_LIMIT: Final = 120.0
"""Seconds after which the process that probes is ended."""
_EFFECTS: Final = {"off": "a feature is off", "unobservable": "unobservable in the report", "refused": "refused"}


def run(args: argparse.Namespace) -> int:
    """Print the diagnosis. Returns 1 if a version, torch or a needed contract does not hold."""
    found, problems = diagnose()
    print_result(args, {"ok": not has_errors(problems), **found, "problems": problems}, _text(found, problems))
    return PROBLEMS if has_errors(problems) else OK


def diagnose() -> tuple[dict[str, Any], list[Problem]]:
    """Return the JSON object of the diagnosis, and all problems.

    Torch and the contracts are probed in another process, which a broken torch may end.
    """
    versions: dict[str, str] = {}
    for name in _PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            versions[name] = version(name)
    problems = [Problem(code="FSDP-E623", message=text.removesuffix(" [FSDP-E623]")) for text in unsupported_versions()]
    if newer := untested_versions():
        problems.append(Problem(code="FSDP-W622", message=f"newer than the tested versions: {', '.join(newer)}."))
    problems += check_build(versions.get("torch", ""), Path("/proc/driver/nvidia/version").exists())
    contracts, failure = _probe()
    if failure:
        fix = "Reinstall it: pip install --force-reinstall torch. Use one index for torch, torchvision and torchaudio."
        problems.append(Problem(code="FSDP-E624", message=f"torch cannot be imported: {failure}", fix=fix))
    enabled = find_enabled()
    problems += [*check_contracts(contracts), *check_enabled(enabled)]
    system = {"python": platform.python_version(), "system": platform.platform(), "machine": platform.machine()}
    devices = asdict(find_devices())
    found: dict[str, Any] = {"platform": system, "versions": versions, "devices": devices, "enabled": enabled.to_json()}
    return {**found, "contracts": contracts}, problems


def check_contracts(contracts: Sequence[Mapping[str, Any]]) -> list[Problem]:
    """Return an error, a warning or a note for each contract that does not hold."""
    problems = []
    for row in contracts:
        target = row["target"].replace(":", ".")
        if row["status"] == "missing":
            code = "FSDP-E620" if row["without"] == "refused" else "FSDP-W621"
            message = f"{target} does not exist. {_EFFECTS[row['without']].capitalize()}: {row['use']}."
            problems.append(Problem(code=code, message=message))
        elif row["status"] == "changed":
            message = f"{target}, which is replaced, has another source than in the tested versions."
            problems.append(Problem(code="FSDP-N626", message=message))
    return problems


def check_build(version: str, driver: bool) -> list[Problem]:
    """Return a warning for a build of torch for the CPU.

    Args:
        driver: whether the machine has a driver of NVIDIA.
    """
    if not (driver and version.endswith("+cpu")):
        return []
    message = f"torch {version} is a build for the CPU, but this machine has an NVIDIA driver."
    return [Problem(code="FSDP-W625", message=message, fix="Install a build of torch for CUDA.")]


def _probe() -> tuple[list[dict[str, Any]], str]:
    """Return the probed contracts, or the last line of the output of a process that failed.

    The process has no variables of a launcher and no accelerators.
    """
    command = [sys.executable, "-W", "ignore", "-c", _PROBE]
    env = {name: value for name, value in os.environ.items() if name not in _LAUNCHER_VARIABLES}
    env["CUDA_VISIBLE_DEVICES"] = ""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT, env=env, check=False)
    except subprocess.TimeoutExpired:
        return [], f"no answer within {_LIMIT:.0f} s"
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        return [], lines[-1] if lines else f"the process ended with {done.returncode}"
    return json.loads(done.stdout.splitlines()[-1]), ""


def _text(found: Mapping[str, Any], problems: Sequence[Problem]) -> str:
    supported = {name: f"supported: {oldest} to {newest}" for name, (oldest, newest) in SUPPORTED.items()}
    versions = [(name, found["platform"][name], "") for name in ("python", "system")]
    versions += [(name, number, supported.get(name, "")) for name, number in found["versions"].items()]
    file, contracts = found["enabled"]["file"], found["contracts"]
    enabled = f"enabled for stock launchers in {sys.prefix}: {f'yes, by {file}' if file is not None else 'no'}"
    devices, text = found["devices"], "no accelerator; ranks run on the CPU, with gloo"
    if devices["count"]:
        size = f", {format_memory(devices['memory_bytes'])} each" if devices["memory_bytes"] else ""
        text = f"{devices['count']} × {devices['kind']} {devices['name']}{size}"
    shown = [problem.text(f"{problem.severity}: ") for problem in problems]
    missing = [row for row in contracts if row["status"] == "missing"]
    verdict = "Everything that this package relies on is there." if contracts and not missing else ""
    blocks = [format_table(versions), f"devices: {text}\n{enabled}", _contracts_text(contracts) if contracts else ""]
    return "\n\n".join(filter(None, [*blocks, "\n".join(shown) or verdict]))


def _contracts_text(contracts: Sequence[Mapping[str, Any]]) -> str:
    """Return a table of the contracts: one row for each class or module, status and effect, with the names."""
    num_holding = sum(row["status"] not in ("changed", "missing") for row in contracts)
    num_replaced = sum(row["replaced"] for row in contracts)
    count = plural(len(contracts), "name")
    head = f"contracts: {count} of other libraries, {num_replaced} of them replaced functions; "
    names: dict[tuple[str, str, str], list[str]] = {}
    for row in contracts:
        module, _, path = row["target"].partition(":")
        parent, _, name = path.rpartition(".")
        owner = f"{module}:{parent}" if parent else module
        names.setdefault((owner, row["status"], row["without"]), []).append(name)
    rows = [
        (status, _EFFECTS[without], f"{owner}: {', '.join(names[owner, status, without])}")
        for owner, status, without in sorted(names)
    ]
    return f"{head}{num_holding} as tested\n{format_table([('status', 'without them', 'names'), *rows])}"
