"""Trains, saves and resumes with both FSDP versions while one name of another library is missing for this package.

    python -m scripts.bench renamed_names                     every contract and replaced function, one at a time
    python -m scripts.bench renamed_names --only _handle      targets that contain a text; other results are kept
    python -m scripts.bench renamed_names --every 25          every 25th

Two gloo ranks for each name, forked from a process that has imported the libraries but not this package. A run ends as
without the change, perhaps with a warning that a feature is off, or, if the row says so, is refused with FSDP-E620.
Writes docs/results/renamed_names.json. Exit code 1 if a run ends in any other way.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from scripts.bench.common import describe_machine, make_parser

SECONDS = 90.0
"""Limit for one name."""
TRAINER = ("transformers", "peft", "trl", "safetensors", "accelerate")
"""Libraries whose names are also tried with the Trainer."""


def preload() -> None:
    """Import the libraries, but not this package, which must not find the name when it is imported."""
    os.environ.update(
        ACCELERATE_USE_CPU="true", OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false",
        MASTER_ADDR="127.0.0.1", MASTER_PORT="29500", TQDM_DISABLE="1", HF_FSDP_ARRIVAL_TIMEOUT="60",
    )  # fmt: skip
    import accelerate
    import torch
    import torch._dynamo
    import torch.distributed.checkpoint.state_dict
    import transformers.trainer  # noqa: F401
    from transformers import LlamaForCausalLM, TrainingArguments  # noqa: F401

    torch.set_num_threads(1)
    assert accelerate and "hf_fsdp_plugin" not in sys.modules


def run_story(rank: int, report: Any, row: dict[str, Any], folder: str) -> None:
    """Hide the name, then train, save and resume."""
    from scripts.bench.measure.hidden_names import hide

    module, _, path = row["target"].partition(":")
    if not row["replaced"]:
        for name in [path, *(f"{path.rpartition('.')[0]}.{each}".lstrip(".") for each in row["instead"])]:
            try:
                hide(module, name)
            except TypeError as error:  # an immutable type of C
                report("immutable", str(error))
                return
            except (AttributeError, ImportError) as error:
                if name == path:
                    report("unhidden", f"{type(error).__name__}: {error}")
    import hf_fsdp_plugin.problems

    try:
        if row["replaced"]:
            rename_hook(row["target"])
        hf_fsdp_plugin.install({"distributed_type": "FSDP", "use_cpu": True, "fsdp_config": {"fsdp_version": 2}})
        hf_fsdp_plugin.uninstall()
        for version in (1, 2):
            train_with_accelerate(version, f"{folder}/accelerate{version}")
            if row["library"] in TRAINER:
                train_with_trainer(version, f"{folder}/trainer{version}")
    except hf_fsdp_plugin.problems.SpecError as error:
        report("refused", [str(problem) for problem in error.problems])
        return
    report("ran", True)


def rename_hook(target: str) -> None:
    """Let the table of replaced functions name one that does not exist."""
    from hf_fsdp_plugin.integrations.hooks import HOOKS

    for group, hooks in HOOKS.items():
        HOOKS[group] = tuple(
            replace(hook, target=f"{target}_renamed") if hook.target == target else hook for hook in hooks
        )


def tiny_llama() -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=2, max_position_embeddings=16, use_cache=False,
        )
    )  # fmt: skip


def train_with_accelerate(version: int, folder: str) -> None:
    import torch
    import torch.distributed as dist
    from accelerate.state import AcceleratorState, GradientState

    import hf_fsdp_plugin as hfp

    fsdp = {"fsdp_version": version, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_activation_checkpointing": True, "fsdp_state_dict_type": "SHARDED_STATE_DICT"}  # fmt: skip
    config = {"distributed_type": "FSDP", "use_cpu": True, "mixed_precision": "bf16", "fsdp_config": fsdp}

    def new_loop(number: int) -> tuple[Any, Any, Any]:
        if not dist.is_initialized():  # end_training has destroyed the process group
            where = f"file://{folder}_rendezvous{number}"
            dist.init_process_group("gloo", init_method=where, rank=int(os.environ["RANK"]), world_size=2)
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        accelerator = hfp.accelerator(hfp.load_spec(config, environ={}), project_dir=folder)
        model = tiny_llama()
        return accelerator, *accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))

    def step(accelerator: Any, model: Any, optimizer: Any, number: int) -> float:
        ids = torch.randint(0, 32, (2, 8), generator=torch.Generator().manual_seed(number))
        loss = model(input_ids=ids, labels=ids).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    accelerator, model, optimizer = new_loop(0)
    step(accelerator, model, optimizer, 0)
    with torch.no_grad():
        model.eval()(input_ids=torch.zeros(1, 4, dtype=torch.long))
    model.train()
    accelerator.save_state(folder)
    expected = step(accelerator, model, optimizer, 1)
    accelerator.save_model(model, f"{folder}/model")
    accelerator.end_training()
    accelerator, model, optimizer = new_loop(1)
    accelerator.load_state(folder)
    found = step(accelerator, model, optimizer, 1)
    assert abs(found - expected) < 1e-3, (found, expected)
    hfp.uninstall()


def train_with_trainer(version: int, folder: str) -> None:
    import torch
    from accelerate.state import AcceleratorState, GradientState
    from transformers import Trainer, TrainingArguments

    import hf_fsdp_plugin as hfp

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    hfp.install()

    def trainer(max_steps: int) -> Any:
        arguments = TrainingArguments(
            output_dir=folder, max_steps=max_steps, save_steps=1, per_device_train_batch_size=1, use_cpu=True,
            report_to=[], logging_steps=1, disable_tqdm=True, eval_strategy="steps", eval_steps=1,
            fsdp="full_shard auto_wrap", fsdp_config={"fsdp_version": version},
        )  # fmt: skip
        data = [{"input_ids": torch.arange(8), "labels": torch.arange(8)} for _ in range(8)]
        return Trainer(tiny_llama(), arguments, train_dataset=data, eval_dataset=data[:2])

    trainer(2).train()
    resumed = trainer(3)
    resumed.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
    resumed.save_model(f"{folder}/model")
    hfp.uninstall()


def try_name(row: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return how the run without a name has ended."""
    from scripts.bench.ranks.forked import World

    log = folder / "log"
    log.write_text("")
    began = time.monotonic()
    world = World.fork(run_story, log, row, str(folder))
    in_time = False
    while time.monotonic() < began + SECONDS and len(world.ended) < len(world.processes):
        world.listen(0.2)
        world.reap()
        in_time = len(world.ended) == len(world.processes)
    world.close()
    text = log.read_text(errors="replace")
    refused = [world.last("refused", rank) for rank in range(len(world.processes))]
    unhidden = world.last("unhidden")
    if not in_time:
        outcome = "hangs"
    elif world.last("immutable") is not None:
        outcome = "cannot be tried"
    elif unhidden is not None:
        outcome = "not hidden"
    elif "Traceback" in text or ("no report" in text and "no report: ContractError" not in text):
        outcome = "fails"
    elif all(world.last("ran", rank) for rank in range(len(world.processes))) and not any(world.ended.values()):
        outcome = "a feature is off" if "FSDP-W621" in text + _reports(folder) or "no report" in text else "runs"
    elif any(refused) and all(found is None or "FSDP-E620" in str(found) for found in refused):
        outcome = "refused" if row["without"] == "refused" else "fails"
    else:
        outcome = "fails"
    result = {"target": row["target"], "replaced": row["replaced"], "without": row["without"], "outcome": outcome}
    if outcome == "refused":
        result["error"] = next(found for found in refused if found)[0]
    if outcome in ("fails", "hangs", "not hidden"):
        result["detail"] = str(unhidden or refused) + "\n" + text[-2500:]
    return {**result, "seconds": round(time.monotonic() - began, 1)}


def _reports(folder: Path) -> str:
    """Return the reports of the runs, whose problems name what is unobservable."""
    return "".join(path.read_text(encoding="utf-8") for path in folder.rglob("fsdp_report.json"))


def all_rows() -> list[dict[str, Any]]:
    """Return every contract and replaced function that holds on the installed versions. Runs in another process."""
    code = (
        "import json, sys\n"
        "from hf_fsdp_plugin.tools.doctor.contract_probe import hook_rows, private_contracts, probe_contracts\n"
        "known = {row.target: row for row in (*private_contracts(), *(hook.contract for hook in hook_rows()))}\n"
        "rows = [{**row, 'instead': known[row['target']].instead, 'library': known[row['target']].library} "
        "for row in probe_contracts() "
        "if not known[row['target']].behavior and row['status'] in ('holds', 'changed')]\n"
        "print(json.dumps(rows))"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    rows: dict[str, dict[str, Any]] = {}
    for row in json.loads(done.stdout.splitlines()[-1]):
        if row["without"] == "refused" or row["target"] not in rows:  # of several uses, one may be refused
            rows[row["target"]] = row
    return list(rows.values())


def main() -> int:
    parser = make_parser(__doc__, "renamed_names")
    parser.add_argument("--only", nargs="+", default=[], help="targets that contain one of these texts")
    parser.add_argument("--every", type=int, default=1, help="try only every n-th name")
    args = parser.parse_args()
    rows = [row for row in all_rows() if not args.only or any(text in row["target"] for text in args.only)]
    preload()
    results = []
    for row in rows[:: args.every]:
        with tempfile.TemporaryDirectory(prefix="renamed_", ignore_cleanup_errors=True) as folder:
            results.append(try_name(row, Path(folder)))
        print(f"{results[-1]['outcome']:18} {row['target']} ({results[-1]['seconds']} s)", flush=True)
        if detail := results[-1].get("detail") or results[-1].get("error"):
            print(detail, flush=True)
    machine = describe_machine()
    if args.only and args.out.exists():
        tried = {result["target"] for result in results}
        earlier = json.loads(args.out.read_text(encoding="utf-8"))
        known = {row["target"] for row in all_rows()}
        results += [row for row in earlier["names"] if row["target"] in known - tried]
        for name, value in earlier["versions"].items():  # of the results that are kept
            machine["versions"][name] = " and ".join(dict.fromkeys([*value.split(" and "), machine["versions"][name]]))
    counts = dict(Counter(result["outcome"] for result in results))
    print(counts)
    args.out.write_text(json.dumps({**machine, "counts": counts, "names": results}, indent=1) + "\n")
    return 1 if set(counts) & {"fails", "hangs", "not hidden"} else 0


if __name__ == "__main__":
    sys.exit(main())
