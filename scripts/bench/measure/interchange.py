"""``hf-fsdp merge --fold-adapter`` and ``convert`` against programs that load the model: PEFT, Transformers and torch.

The model is a random Llama in seven files. Each operation runs with and without ``--dtype bfloat16``:

- ``fold``: merge a LoRA adapter with its base model; by ``merge_and_unload`` and ``save_pretrained``
- ``to shards``: convert a Hugging Face folder to shards; by ``from_pretrained`` and ``dcp.save``
- ``from shards``: convert these shards, with their manifest, to a Hugging Face folder; by ``dcp.load`` into an empty
  model and ``save_pretrained``

Each run is a new process, which has imported everything before the clock starts. Both ways alternate, and their input
is in the page cache. After the first round, their outputs are compared bit for bit. Memory is sampled every ten
milliseconds: the resident size above its value before the clock starts, and the private part of it (``RssAnon``). The
other part are mapped files, whose pages the system can drop.

    python -m scripts.bench interchange    (ten minutes on 2 cores, 5 GB of disk; writes docs/results/interchange.json)
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from scripts.bench.common import child_environment, cpu_seconds, make_llama, make_parser
from scripts.bench.measure.load import Memory
from scripts.bench.measure.merge import MODEL, check_equal
from scripts.bench.measure.resume import return_free_memory
from scripts.bench.tables.update_results import write_result

LARGE = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 9, "vocab_size": 16000}
SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 256}
NUM_FILES = 7
INPUTS = {"fold": "llama", "to shards": "llama", "from shards": "shards"}
WAYS = ("hf-fsdp", "the whole model")
DTYPES = ("float32", "bfloat16")
SHOWN = {
    "fold": "`merge --fold-adapter`",
    "to shards": "`convert` to shards",
    "from shards": "`convert` from shards",
}


def parse_args() -> argparse.Namespace:
    parser = make_parser(__doc__, "interchange")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--small", action="store_true", help="a tiny model, whose figures mean nothing")
    parser.add_argument("--folder", type=Path, help="folder for temporary checkpoints, on a disk")
    return parser.parse_args()


def build(folder: Path, *, small: bool) -> None:
    """Write the model to ``llama``, an adapter that changes all its linear layers to ``lora``, and ``shards``."""
    import peft
    import torch

    from hf_fsdp_plugin.cli.main import main as hf_fsdp

    model = make_llama(num_attention_heads=16, num_key_value_heads=16, **(SMALL if small else LARGE))
    limit = 1.1 * sum(parameter.nbytes for parameter in model.parameters()) / NUM_FILES
    model.save_pretrained(folder / "llama", max_shard_size=int(limit))
    config = peft.LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(model, config)
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.02)
    adapted.save_pretrained(folder / "lora")
    if hf_fsdp(["convert", str(folder / "llama"), "--out", str(folder / "shards")]):
        raise SystemExit("the shards could not be written")


def by_hf_fsdp(operation: str, dtype: str, folder: Path, out: Path) -> Callable[[], None]:
    """Import what the verb needs. Return the function to measure."""
    from hf_fsdp_plugin.cli.main import main as hf_fsdp

    for name in ("hf_fsdp_plugin.tools.convert.verb", "hf_fsdp_plugin.tools.merge.folding"):
        importlib.import_module(name)
    words = ["convert", str(folder / INPUTS[operation]), "--out", str(out)]
    if operation == "fold":
        words = ["merge", str(folder / "lora"), str(out), "--fold-adapter", str(folder / "llama")]
    if dtype == "bfloat16":
        words += ["--dtype", "bf16"]

    def run() -> None:
        if code := hf_fsdp(words):
            raise SystemExit(code)

    return run


def by_whole_model(operation: str, dtype: str, folder: Path, out: Path) -> Callable[[], None]:
    """Import what the other libraries need. Return the function to measure."""
    import torch
    import torch.distributed.checkpoint as dcp
    from peft import PeftModel
    from transformers import AutoConfig, LlamaForCausalLM

    element = getattr(torch, dtype)

    def fold() -> None:
        model = LlamaForCausalLM.from_pretrained(folder / "llama")
        merged: Any = PeftModel.from_pretrained(model, str(folder / "lora"))
        merged.merge_and_unload().to(element).save_pretrained(out)

    def to_shards() -> None:
        model = LlamaForCausalLM.from_pretrained(folder / "llama", dtype=element)
        dcp.save({"model": model.state_dict()}, checkpoint_id=out / MODEL, no_dist=True)

    def from_shards() -> None:
        with torch.device("meta"):
            model: Any = LlamaForCausalLM(AutoConfig.from_pretrained(folder / "shards"))
        model.to_empty(device="cpu")
        dcp.load({"model": model.state_dict()}, checkpoint_id=folder / "shards" / MODEL, no_dist=True)
        model.to(element).save_pretrained(out)

    return {"fold": fold, "to shards": to_shards, "from shards": from_shards}[operation]


def measure(operation: str, dtype: str, way: str, folder: Path, out: Path) -> dict[str, float]:
    """Run an operation in this process. Return its seconds, CPU seconds, and the bytes by which its memory grew."""
    for name in ("peft", "transformers"):
        importlib.import_module(name)
    run = (by_hf_fsdp if way == WAYS[0] else by_whole_model)(operation, dtype, folder, out)
    return_free_memory()
    memory = Memory()
    cpu, start = cpu_seconds(), time.perf_counter()
    run()
    seconds, used, peak = time.perf_counter() - start, cpu_seconds() - cpu, memory.stop()
    return {"seconds": seconds, "cpu_seconds": used, "peak_bytes": peak["Rss"], "private_bytes": peak["RssAnon"]}


def start(words: list[str], folder: Path) -> str:
    """Run this program in a new process, and return its output.

    Raises:
        SystemExit: it failed.
    """
    command = [sys.executable, "-m", "scripts.bench.measure.interchange", *words, str(folder)]
    environ = {**child_environment(), "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "TQDM_DISABLE": "1"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)} failed:\n{done.stderr[-3000:]}")
    return done.stdout


def compare(folder: Path, rounds: int) -> dict[str, Any]:
    """Return operation -> dtype -> way -> figure -> the median of its rounds."""
    found: dict[tuple[str, str], dict[str, list[dict[str, float]]]] = {}
    for number in range(rounds):
        for operation, dtype in ((operation, dtype) for operation in INPUTS for dtype in DTYPES):
            runs = found.setdefault((operation, dtype), {way: [] for way in WAYS})
            for way in WAYS if number % 2 == 0 else WAYS[::-1]:
                for path in (folder / INPUTS[operation]).rglob("*"):
                    if path.is_file():
                        path.read_bytes()
                os.sync()
                runs[way].append(json.loads(start(["--run", operation, dtype, way], folder).splitlines()[-1]))
                print(f"{operation}, {dtype}, {way}: {runs[way][-1]}", file=sys.stderr, flush=True)
            outputs = [folder / "out" / way for way in WAYS]
            if number == 0:
                check_equal(*outputs)
            for out in outputs:
                shutil.rmtree(out)
    medians: dict[str, Any] = {}
    for (operation, dtype), ways in found.items():
        medians.setdefault(SHOWN[operation], {})[dtype] = {
            way: {key: statistics.median(run[key] for run in runs) for key in runs[0]} for way, runs in ways.items()
        }
    return medians


def main() -> int:
    if sys.argv[1:2] == ["--build"]:
        build(Path(sys.argv[3]), small=sys.argv[2] == "small")
        return 0
    if sys.argv[1:2] == ["--run"]:
        operation, dtype, way, folder = sys.argv[2:]
        print(json.dumps(measure(operation, dtype, way, Path(folder), Path(folder) / "out" / way)))
        return 0
    args = parse_args()
    with tempfile.TemporaryDirectory(prefix="interchange_", dir=args.folder) as temporary:
        folder = Path(temporary)
        start(["--build", "small" if args.small else "large"], folder)
        files = [path.stat().st_size for path in (folder / "llama").glob("*.safetensors")]
        model = f"Llama in fp32, {sum(files) / 1e6:.0f} MB in {len(files)} files"
        operations = compare(folder, args.rounds)
    write_result("interchange", args.out, {"model": model, "rounds": args.rounds, "operations": operations})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
