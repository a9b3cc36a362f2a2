"""Test the plugin on the devices of this machine: what only a GPU shows, in parts. Started by gpu_check.sh.

The checks are in gpu_checks/, in the order in which cases.py lists them: those that tell most come first. The ranks of
a world are processes that run one case after the other. A case that has not passed ends them, because a CUDA error
would affect later cases.

A case passes, fails, is refused by the plugin with a ``SpecError``, or is skipped with a reason. Results are merged
into one file by name, FSDP version and number of ranks. A call runs the cases that have no result of this code yet, so
that several calls with ``--minutes`` cover all. Two ranks on one GPU are an experiment, whose failure is recorded only.
"""

from __future__ import annotations

import argparse
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hf_fsdp_plugin.problems import SpecError
from scripts.bench.common import RESULTS, ROOT, describe_machine
from scripts.bench.gpu_checks.base import CHECKS, Case, Unusable
from scripts.bench.gpu_checks.cases import cases, full_name, key, one_of_each
from scripts.bench.gpu_checks.results import NOT_SHOWN, Results, code_version, row_key
from scripts.bench.gpu_checks.workers import Workers

RESULT = RESULTS / "gpu_check.json"
_START_SECONDS = 15.0
"""Expected time until ranks have imported torch and Transformers."""
_SLOWER = 4.0
"""What expected times and limits are multiplied by on CPU ranks and on small devices, which may be simulated."""


def find_device(*, cpu: bool) -> tuple[str, int, str]:
    """Return the type of the device, the number of devices, and their name.

    Raises:
        Unusable: there is no device, or its type is not supported.
    """
    import torch

    from hf_fsdp_plugin.devices import accelerator_type, get_device

    if cpu:
        return "cpu", 2, "CPU"
    device_type = accelerator_type()
    if device_type == "cpu":
        raise Unusable(f"{_why_no_device(torch)} --cpu runs the checks on CPU ranks.")
    try:
        device = get_device(device_type)
    except SpecError as error:
        raise Unusable("; ".join(f"{problem.message} {problem.fix}" for problem in error.problems)) from None
    module = torch.get_device_module(device_type)
    name = module.get_device_name(0) if hasattr(module, "get_device_name") else device_type
    return device_type, device.count(), f"{device.count()} x {name}"


def _why_no_device(torch: Any) -> str:
    if torch.version.cuda is None and torch.version.hip is None:
        return f"torch {torch.__version__} is built without CUDA. Install a CUDA build of torch."
    if shutil.which("nvidia-smi") is None and torch.version.hip is None:
        return f"torch {torch.__version__} finds no device, and there is no nvidia-smi: the driver is not installed."
    done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    found = " ".join((done.stdout + done.stderr).split())[:200]
    return f"torch {torch.__version__} finds no device; nvidia-smi prints: {found or 'nothing'}."


def main(argv: Sequence[str] | None = None) -> int:
    started = time.monotonic()
    options = _parser().parse_args(argv)
    try:
        device, count, name = find_device(cpu=options.cpu) if not options.list else _listed(options)
        head = _head(options, device, name)
        out = options.out or (None if options.cpu else RESULT)
        results = Results(out if not options.list else None, head, code_version())
    except (Unusable, ValueError) as error:
        print(f"gpu_check: {error}", file=sys.stderr)
        return 1
    every = [case for case in cases(num_devices=count, device=device) if re.search(options.only, full_name(case))]
    if options.one_of_each:
        every = one_of_each(every)
    if options.list:
        print("\n".join(map(full_name, every)))
        return 0
    todo = [
        case for case in every if options.only or options.again or not results.has(key(case), any_code=options.missing)
    ]
    print(f"gpu_check: {name}; {len(every)} cases, {len(todo)} without a result of this code", flush=True)
    if count == 1:
        print(NOT_SHOWN.replace("**", ""), flush=True)
    seconds_left = (options.minutes or 24 * 60) * 60 - (time.monotonic() - started)
    try:
        run_cases(todo, results, seconds_left, slower=_SLOWER if device not in ("cuda", "xpu") else 1.0)
    except Unusable as error:
        print(f"gpu_check: {error}", file=sys.stderr)
        return 1
    return _summarize(every, results)


def run_cases(todo: Sequence[Case], results: Results, seconds_left: float, *, slower: float) -> None:
    """Run the cases whose expected time fits into the time that is left, and add their rows to the results."""
    deadline, workers = time.monotonic() + seconds_left, Workers(slower=slower)
    try:
        for case in todo:
            check = CHECKS[case["check"]]
            if case["ranks"] < check.min_ranks:
                reason = f"not seen: needs {check.min_ranks} devices, one for each rank"
                add(results, case, {"status": "skipped", "seconds": 0.0, "reason": reason})
                continue
            expected = check.seconds * slower + (0 if workers.serves(case) else _START_SECONDS)
            left = deadline - time.monotonic()
            if expected > left:
                continue  # a shorter one may fit
            result = workers.run(case, left)
            if result is not None and result["status"] == "unusable":
                raise Unusable(result["reason"])
            if result is None:
                print(f"{full_name(case)}: ended, because the time of this call is over", flush=True)
                continue
            add(results, case, result)
    finally:
        workers.stop()


def add(results: Results, case: Case, result: Case) -> None:
    name, version, ranks = key(case)
    row = {
        "name": name, "version": version, "ranks": ranks, "status": result["status"], "seconds": result["seconds"],
        "reason": result.get("reason", ""), "figures": result.get("figures", {}),
    }  # fmt: skip
    row |= {
        name: value for name, value in (("shared", case.get("shared")), ("traceback", result.get("traceback"))) if value
    }
    results.add(row)
    reason = " ".join(row["reason"].split())
    print(f"{full_name(case)}: {row['status']} ({row['seconds']:.1f} s) {reason}", flush=True)
    if "traceback" in row and row["status"] == "failed":
        print(row["traceback"], flush=True)


def _summarize(every: Sequence[Case], results: Results) -> int:
    rows = {row_key(row): row for row in results.rows.values()}
    found = [rows[key(case)] for case in every if results.has(key(case), any_code=False)]
    counts = {
        status: sum(row["status"] == status for row in found) for status in ("passed", "failed", "refused", "skipped")
    }
    print(f"\n{', '.join(f'{count} {status}' for status, count in counts.items())}")
    failed = [row for row in found if row["status"] == "failed" and not row.get("shared")]
    for row in failed:
        reason = " ".join(row["reason"].split())[:300]
        print(f"failed: {row['name']}, FSDP{row['version']}, ranks {row['ranks']}: {reason}")
    left = [full_name(case) for case in every if not results.has(key(case), any_code=False)]
    if left:
        print(f"{len(left)} cases have no result of this code yet; the next call begins with {left[0]}.")
    if results.path is not None:
        print(f"written: {results.path}")
    return int(bool(failed))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gpu_check.sh", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, help="end after this time; the next call continues")
    parser.add_argument("--only", default="", metavar="REGEX", help="run these cases, also those with a result")
    parser.add_argument("--one-of-each", action="store_true", help="run one case of each check, to test this program")
    parser.add_argument("--missing", action="store_true", help="keep results of other code: run cases without any")
    parser.add_argument("--again", action="store_true", help="run cases that have a result of this code, too")
    parser.add_argument("--list", action="store_true", help="print the names of the cases in order, and run none")
    parser.add_argument("--cpu", action="store_true", help="run the checks on CPU ranks, to test this program")
    parser.add_argument("--devices", type=int, help="with --list: for this number of GPUs (default: those here, or 1)")
    shown = RESULT.relative_to(ROOT)
    parser.add_argument("--out", type=Path, help=f"file of results, continued (default: {shown}; none on CPU)")
    return parser


def _listed(options: argparse.Namespace) -> tuple[str, int, str]:
    """Return the devices for which cases are listed: those of this machine, or one GPU."""
    try:
        device, count, name = find_device(cpu=options.cpu)
    except Unusable:
        device, count, name = "cuda", 1, "no device"
    return device, options.devices or count, name


def _head(options: argparse.Namespace, device: str, name: str) -> dict[str, Any]:
    import torch

    head = {**describe_machine(), "command": f"bash scripts/gpu_check.sh{' --cpu' * options.cpu}", "device": name}
    if device == "cuda":
        head["versions"]["cuda"] = str(torch.version.cuda)
    return head


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the ranks end with this process
    raise SystemExit(main())
