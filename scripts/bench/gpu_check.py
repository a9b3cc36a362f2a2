"""Test the plugin on the GPUs of this machine: every strategy, and what only a GPU shows. Started by gpu_check.sh.

Each case runs in separate processes, because a CUDA error would affect later cases. With one GPU the cases of one rank
run, and two ranks share the GPU as an experiment. With two or more GPUs, cases of two ranks run too, on one GPU each.
``--cpu`` runs the same checks on CPU ranks with gloo, to test this program: there is nothing to pin, and no fp16.

A case passes, fails, or is refused by the plugin with a ``SpecError``. The checks are in gpu_checks.py, and in
gpu_checks_launched.py those that start ranks of their own.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import traceback
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import gpu_checks_launched  # noqa: F401  (adds its checks)
from common import RESULTS, ROOT, describe_machine
from gpu_checks import CHECKS, run_check

from hf_fsdp_plugin.strategies import STRATEGIES
from hf_fsdp_plugin.text import format_table

RESULT = RESULTS / "gpu_check.json"
CASE_TIMEOUT_S = 300
RESULT_PREFIX = "gpu_check result: "
NO_GPU = "gpu_check: torch finds no CUDA device. Nothing was checked. --cpu runs the checks on CPU ranks."

Case = dict[str, Any]


def cases(*, num_gpus: int, cpu: bool = False) -> list[Case]:
    """Return every case that this machine can run, as the argument of ``run_case``."""
    backend = "gloo" if cpu else "nccl"
    alone: Case = {
        "check": "training", "device": "cpu" if cpu else "cuda", "ranks": 1, "backend": backend, "offload": False,
        "strategy": "full_shard", "precision": "bf16",
    }  # fmt: skip
    found = [
        {**alone, "strategy": strategy, "version": version, "precision": precision}
        for strategy, version, precision in product(STRATEGIES, (1, 2), ("fp32", "bf16", "fp16"))
    ]
    found += [
        {**alone, "strategy": strategy, "version": version, "offload": True}
        for strategy, version in product(("full_shard", "no_shard"), (1, 2))
    ]
    for ranks in (1, 2) if cpu or num_gpus > 1 else (1,):
        found += [{**alone, **case, "ranks": ranks} for case in _checks(cpu=cpu)]
        if ranks == 2:
            found += [
                {**alone, "ranks": 2, "strategy": strategy, "version": version, "precision": precision}
                for strategy, version, precision in product(STRATEGIES, (1, 2), ("bf16",) if cpu else ("bf16", "fp16"))
            ]
    if not cpu and num_gpus == 1:
        # NCCL rejects two ranks on one device; gloo copies through host memory and may accept them.
        found += [
            {**alone, "ranks": 2, "backend": backend, "version": version, "shared": True}
            for backend, version in product(("gloo", "nccl"), (1, 2))
        ]
    return found


def _checks(*, cpu: bool) -> Iterator[Case]:
    """Yield the other checks under both versions."""
    for version in (1, 2):
        for name in CHECKS:
            if name not in ("training", "scaler", "state_dict", "ignored_modules"):
                yield {"check": name, "version": version, **({} if name != "clipping" else {"precision": "fp32"})}
        for precision in ("fp32", "bf16") if cpu else ("fp32", "bf16", "fp16"):
            yield {"check": "ignored_modules", "version": version, "precision": precision}
        for offload in (False, True):
            # With offload, gradients are on the CPU and the scale is on the GPU.
            yield {"check": "scaler", "version": version, "precision": "fp32" if cpu else "fp16", "offload": offload}
            yield {"check": "state_dict", "version": version, "offload": offload}


def name_of(case: Case) -> str:
    """Return the name of a case, as ``--only`` matches it: ``scaler fsdp2 fp16 2 ranks nccl``."""
    words = [case["check"], *([case["strategy"]] if case["check"] == "training" else []), f"fsdp{case['version']}"]
    words += [case["precision"], *(["offload"] if case["offload"] else [])]
    words += [f"{case['ranks']} rank{'s' if case['ranks'] > 1 else ''}", case["backend"]]
    return " ".join([*words, *(["one GPU"] if case.get("shared") else [])])


def start_process_group(case: Case) -> None:
    """Start the process group, or leave it to the plugin, which starts ``cpu:gloo,cuda:nccl`` on GPUs."""
    import torch
    import torch.distributed as dist

    if case["device"] == "cpu":
        os.environ["ACCELERATE_USE_CPU"] = "true"
        dist.init_process_group("gloo")
    elif case.get("shared"):
        os.environ["LOCAL_RANK"] = "0"
        torch.cuda.set_device(0)
        # Clipping with offload reduces CPU tensors, which NCCL does not support.
        dist.init_process_group(f"cpu:gloo,cuda:{case['backend']}")
    else:
        from accelerate import PartialState

        from hf_fsdp_plugin.integrations.patching import install_hooks

        install_hooks("accelerate")
        PartialState()


def run_rank(case: Case) -> int:
    """Run one rank of a case. Rank 0, or the rank that fails, prints the result as one line."""
    from hf_fsdp_plugin import SpecError

    try:
        start_process_group(case)
        result: Case = {"status": "passed", **run_check(case)}
    except SpecError as error:
        result = {"status": "refused", "text": str(error)}
    except Exception as error:
        result = {"status": "failed", "text": f"{type(error).__name__}: {error}"[:600]}
        traceback.print_exc()
    if os.environ["RANK"] == "0" or result["status"] != "passed":
        print(RESULT_PREFIX + json.dumps(result), flush=True)
    sys.stdout.flush()
    os._exit(0 if result["status"] == "passed" else 1)  # teardown could hang on a broken process group


def run_case(case: Case) -> Case:
    """Start the ranks of a case and return the result."""
    ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(case["ranks"])]
    environ = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", **os.environ}
    process = subprocess.Popen(
        [sys.executable, *ranks, __file__, json.dumps(case)],
        env=environ,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=CASE_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # also kills the ranks
        process.communicate()
        return {"status": "failed", "text": f"did not finish within {CASE_TIMEOUT_S} s"}
    results = [json.loads(line[len(RESULT_PREFIX) :]) for line in out.splitlines() if line.startswith(RESULT_PREFIX)]
    # A rank that was refused or failed has the cause; the other ranks only report a lost connection.
    results.sort(key=lambda result: ("refused", "failed", "passed").index(result["status"]))
    return results[0] if results else {"status": "failed", "text": err[-600:]}


def summary(results: Sequence[Case]) -> list[list[str]]:
    """Return a row for each check: its name, and the number of cases with each status; a header comes first."""
    rows: dict[str, dict[str, int]] = {}
    for result in results:
        counts = rows.setdefault(result["check"], dict.fromkeys(("passed", "refused", "failed"), 0))
        counts[result["status"]] += 1
    return [["check", "passed", "refused", "failed"], *([name, *map(str, row.values())] for name, row in rows.items())]


def counts_as_failure(result: Case) -> bool:
    """Two ranks on one GPU are an experiment: their result is recorded but does not affect the exit code."""
    return result["status"] == "failed" and not result.get("shared")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="gpu_check.sh", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cpu", action="store_true", help="run the checks on CPU ranks, to test this program")
    parser.add_argument("--only", default="", help="regular expression for the names of cases (see --list)")
    parser.add_argument("--list", action="store_true", help="print the names of the cases, and run none")
    parser.add_argument("--out", type=Path, help=f"path of the JSON (default: {RESULT.relative_to(ROOT)}; none on CPU)")
    options = parser.parse_args(argv)
    import torch

    num_gpus = 0 if options.cpu else torch.cuda.device_count()
    if not (options.cpu or options.list or num_gpus):
        print(NO_GPU, file=sys.stderr)
        return 1
    todo = [
        case
        for case in cases(num_gpus=num_gpus or 2 * options.list, cpu=options.cpu)
        if re.search(options.only, name_of(case))
    ]
    if options.list:
        print("\n".join(map(name_of, todo)))
        return 0
    device = "cpu" if options.cpu else f"{num_gpus} x {torch.cuda.get_device_name(0)}"
    head = {**describe_machine(), "command": f"bash scripts/gpu_check.sh{' --cpu' * options.cpu}", "device": device}
    head["versions"]["cuda"] = torch.version.cuda
    out = options.out or (None if options.cpu else RESULT)
    results = []
    for number, case in enumerate(todo, 1):
        result = {**case, **run_case(case)}
        results.append(result)
        print(f"[{number:3}/{len(todo)}] {name_of(case)}: {result['status']} {result.get('text', '')}", flush=True)
        if out is not None:
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(json.dumps({**head, "cases": results}, indent=2) + "\n")
    print(f"\n{format_table(summary(results), right=(1, 2, 3))}")
    for result in filter(counts_as_failure, results):
        print(f"failed: {name_of(result)}: {result['text']}")
    if out is not None:
        print(f"\nwritten: {out}")
    return int(any(map(counts_as_failure, results)))


if __name__ == "__main__":
    raise SystemExit(run_rank(json.loads(sys.argv[1])) if "RANK" in os.environ else main())
