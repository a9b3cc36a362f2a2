"""Test strategies, FSDP versions and precisions on one GPU. Started by gpu_check.sh.

Each case runs in a separate process, because a CUDA error would affect later cases. It trains a small Llama and passes
if the loss falls and stays finite, the model is sharded as configured, and asynchronous checkpoints of every state dict
type verify and resume. A case that the plugin rejects with a ``SpecError`` has the status ``refused`` and its message.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

from common import RESULTS, ROOT, describe_machine, make_llama

from hf_fsdp_plugin.strategies import STRATEGIES

RESULT = RESULTS / "gpu_check.json"
NUM_STEPS = 10
CASE_TIMEOUT_S = 240
RESULT_PREFIX = "gpu_check result: "

Case = dict[str, Any]


def cases() -> list[Case]:
    """Return every case, as the argument of ``run_case``."""
    alone: Case = {"ranks": 1, "backend": "nccl", "offload": False}
    matrix = [
        {**alone, "strategy": strategy, "version": version, "precision": precision}
        for strategy, version, precision in product(STRATEGIES, (1, 2), ("fp32", "bf16", "fp16"))
    ]
    offloaded = [
        {**alone, "strategy": strategy, "version": version, "precision": "bf16", "offload": True}
        for strategy, version in product(("full_shard", "no_shard"), (1, 2))
    ]
    # NCCL rejects two ranks on one device; gloo copies through host memory and may accept them.
    shared = [
        {**alone, "ranks": 2, "backend": backend, "strategy": "full_shard", "version": version, "precision": "bf16"}
        for backend, version in product(("gloo", "nccl"), (1, 2))
    ]
    return [*matrix, *offloaded, *shared]


def config(case: Case) -> Case:
    """Return the Accelerate config of a case. Hybrid strategies need a mesh, because the world has one or two ranks."""
    hybrid = case["strategy"].startswith("hybrid")
    return {
        "distributed_type": "FSDP",
        "num_processes": case["ranks"],
        "mixed_precision": "no" if case["precision"] == "fp32" else case["precision"],
        "fsdp_config": {
            "fsdp_version": case["version"],
            "fsdp_sharding_strategy": case["strategy"].upper(),
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_offload_params": case["offload"],
            "fsdp_async_save": True,
        },
        **({"parallelism_config": {"dp_replicate_size": 1, "dp_shard_size": case["ranks"]}} if hybrid else {}),
    }


def train(case: Case) -> Case:
    """Train on one rank of a case and return the measurements. Raises if a check fails."""
    import torch
    import torch.distributed as dist

    import hf_fsdp_plugin as hfp
    from hf_fsdp_plugin.backends.shard import plan_of

    os.environ["LOCAL_RANK"] = "0"  # two ranks share one GPU
    torch.cuda.set_device(0)
    # Clipping with offload reduces CPU tensors, which NCCL does not support.
    backend = "cpu:gloo,cuda:gloo" if case["backend"] == "gloo" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend)
    accelerator = hfp.accelerator(hfp.load_spec(config(case)))
    model = make_llama(
        vocab_size=1024, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    ids = torch.randint(0, 1024, (4, 64), generator=torch.Generator().manual_seed(1)).to(accelerator.device)

    def step() -> float:
        loss = model(input_ids=ids, labels=ids).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.item())

    losses = [step() for _ in range(NUM_STEPS)]
    if not all(torch.isfinite(torch.tensor(losses))) or losses[-1] >= losses[0]:
        raise RuntimeError(f"the loss did not fall: {losses}")
    plan = plan_of(model)
    assert plan is not None
    if (plan.backend, plan.strategy) != (f"fsdp{case['version']}", case["strategy"]):
        raise RuntimeError(f"the plan has {plan.backend} {plan.strategy}")
    devices = {parameter.device.type for parameter in model.parameters()}
    if devices != {"cpu" if case["offload"] else "cuda"}:
        raise RuntimeError(f"the parameters are on {sorted(devices)}")
    for kind in ("sharded", "full", "local"):
        check_checkpoint(accelerator, kind, step)
    return {
        "first_loss": round(losses[0], 4),
        "last_loss": round(losses[-1], 4),
        "grad_scaler": accelerator.scaler is not None,
        "peak_bytes": torch.cuda.max_memory_allocated(),
    }


def check_checkpoint(accelerator: Any, kind: str, step: Callable[[], float]) -> None:
    """Save a checkpoint in the background, verify it, and check that training from it gives the same losses."""
    import torch.distributed as dist

    from hf_fsdp_plugin.checkpoint import verify
    from hf_fsdp_plugin.integrations.saving import manager

    folders = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folders)
    folder = Path(str(folders[0])) / kind
    accelerator.state.fsdp_plugin.set_state_dict_type(kind)
    accelerator.save_state(str(folder))
    before = [step() for _ in range(3)]
    manager.wait()
    problems = verify(folder).problems
    if problems:
        raise RuntimeError(f"{kind} checkpoint: {problems[0]}")
    accelerator.load_state(str(folder))
    after = [step() for _ in range(3)]
    if any(abs(a - b) > 1e-3 * abs(b) for a, b in zip(after, before, strict=True)):
        raise RuntimeError(f"{kind} checkpoint: losses {before}, but {after} after loading the checkpoint")
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder.parent)


def run_rank(case: Case) -> int:
    """Run one rank of a case. Rank 0, or the rank that fails, prints the result as one line."""
    from hf_fsdp_plugin import SpecError

    try:
        result: Case = {"status": "passed", **train(case)}
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
    environ = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **os.environ}
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


def main() -> int:
    import torch

    if not torch.cuda.is_available():
        print("gpu_check: torch finds no CUDA device. Nothing was checked.", file=sys.stderr)
        return 1
    head = {**describe_machine(), "command": "bash scripts/gpu_check.sh", "device": torch.cuda.get_device_name(0)}
    head["versions"]["cuda"] = torch.version.cuda
    results = []
    todo = cases()
    for number, case in enumerate(todo, 1):
        result = {**case, **run_case(case)}
        results.append(result)
        name = f"FSDP{case['version']} {case['strategy']} {case['precision']}{' offload' if case['offload'] else ''}"
        where = f"{case['ranks']} rank{'s' if case['ranks'] > 1 else ''} {case['backend']}"
        print(f"[{number:2}/{len(todo)}] {name}, {where}: {result['status']} {result.get('text', '')}", flush=True)
        RESULT.parent.mkdir(parents=True, exist_ok=True)
        RESULT.write_text(json.dumps({**head, "cases": results}, indent=2) + "\n")
    counts = {status: sum(r["status"] == status for r in results) for status in ("passed", "refused", "failed")}
    print(f"{counts}. Written: {RESULT}")
    # Two ranks on one GPU are an experiment: their result is recorded but does not affect the exit code.
    return int(any(result["status"] == "failed" and result["ranks"] == 1 for result in results))


if __name__ == "__main__":
    raise SystemExit(run_rank(json.loads(sys.argv[1])) if "RANK" in os.environ else main())
