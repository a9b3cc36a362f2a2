"""Checkpoints that DeepSpeed has written, merged and resumed, against DeepSpeed itself.

Gloo ranks train a tiny Llama with DeepSpeed, tied weights and two parameter groups, save after three steps, and train
two more. Each checkpoint is converted by ``hf-fsdp convert``. ``hf-fsdp merge`` of the result is compared bit for bit
with ``zero_to_fp32``, the AdamW state with what DeepSpeed's ranks gather, and the layout of DeepSpeed's files with
those of ``tests/support/deepspeed_files.py``. FSDP2 on two ranks resumes; its losses are compared with those of
DeepSpeed's next steps. A larger model is converted and merged, and written by ``zero_to_fp32``, alternately, to compare
their times; each program is a process from its start to its end.

DeepSpeed is not a dependency. Install it in a folder of its own, without a compiler and without another torch:

    DS_BUILD_OPS=0 pip install --no-deps --no-build-isolation --target DIR deepspeed hjson msgpack ninja py-cpuinfo \\
        psutil pydantic pydantic_core annotated_types typing_inspection einops tqdm
    python -m scripts.bench deepspeed_checkpoints --libs DIR     (5 minutes on 2 cores)
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scripts.bench.common import child_environment, make_llama, make_parser
from scripts.bench.tables.update_results import write_result

LIBS, REFERENCE = "DEEPSPEED_LIBS", "reference.torch"
STEPS, MORE = 3, 2
TAG = f"global_step{STEPS}"
BATCH, LENGTH, VOCABULARY = 8, 16, 97
RESUMING_RANKS = 2


@dataclass(frozen=True, kw_only=True)
class Case:
    """One setting of DeepSpeed.

    Attributes:
        name: DeepSpeed's stage, dtype and so on.
        zero: further entries of ``zero_optimization``.
        config: further entries of DeepSpeed's config.
        universal: convert the checkpoint with ``ds_to_universal``.
    """

    name: str
    stage: int
    ranks: int = 2
    bf16: bool = False
    frozen: bool = False
    universal: bool = False
    zero: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)

    @property
    def has_script(self) -> bool:
        """Whether zero_to_fp32 reads the checkpoint."""
        return self.stage > 0 and not self.config

    def folder(self, work: Path) -> Path:
        """Return the folder that DeepSpeed writes to."""
        return work / re.sub(r"\W+", "_", self.name) / "saved"

    def checkpoint(self, work: Path) -> Path:
        return self.folder(work) / f"{TAG}_universal" if self.universal else self.folder(work)

    def converted(self, work: Path) -> Path:
        """Return the folder that ``hf-fsdp convert`` writes."""
        return self.folder(work).with_name("converted")


_FP32_GRADIENTS = {"data_types": {"grad_accum_dtype": "fp32"}}
CASES = (
    Case(name="ZeRO-0, fp32", stage=0),
    Case(name="ZeRO-1, fp32", stage=1),
    Case(name="ZeRO-1, bf16, 4 ranks, frozen", stage=1, bf16=True, ranks=4, frozen=True),
    Case(name="ZeRO-1, bf16, fp32 gradients", stage=1, bf16=True, config=_FP32_GRADIENTS),
    Case(name="ZeRO-2, fp32, 4 ranks", stage=2, ranks=4),
    Case(name="ZeRO-2, bf16, frozen", stage=2, bf16=True, frozen=True),
    Case(name="ZeRO-2, bf16, round robin", stage=2, bf16=True, zero={"round_robin_gradients": True}),
    Case(name="ZeRO-3, fp32, 4 ranks", stage=3, ranks=4),
    Case(name="ZeRO-3, bf16, frozen", stage=3, bf16=True, frozen=True),
    Case(name="ZeRO-3, bf16, sub-groups", stage=3, bf16=True, zero={"sub_group_size": 4000}),
    Case(name="ZeRO-1, fp32, universal", stage=1, universal=True),
    Case(name="ZeRO-3, bf16, frozen, universal", stage=3, bf16=True, frozen=True, universal=True),
)
_BUCKET = 1_000_000
TIMED = Case(name="timed", stage=2, bf16=True, zero={"reduce_bucket_size": _BUCKET, "allgather_bucket_size": _BUCKET})
SIZES = {"hidden_size": 32, "intermediate_size": 45, "num_hidden_layers": 2, "vocab_size": VOCABULARY}
LARGE = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 6, "vocab_size": 32000}


def make_model(frozen: bool, sizes: dict[str, int]) -> tuple[Any, list[dict[str, Any]]]:
    """Return a model, and its parameter groups: matrices with weight decay, and vectors without."""
    model = make_llama(num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True, **sizes)
    model.model.layers[0].requires_grad_(not frozen)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [{"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.1}]
    groups += [{"params": [p for p in trained if p.dim() == 1], "weight_decay": 0.0}]
    return model, groups


def make_optimizer(groups: list[dict[str, Any]]) -> tuple[Any, Any]:
    import torch

    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))


def batch_of(step: int, rank: int, world_size: int) -> Any:
    import torch

    data = torch.randint(0, VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(step))
    return data.chunk(world_size)[rank]


def write_with_deepspeed(work: Path, cases: list[Case], sizes: dict[str, int]) -> None:
    """Train, save, and train more steps, for each case. Runs on each rank of DeepSpeed."""
    sys.path.insert(0, os.environ[LIBS])
    import torch.distributed as dist

    dist.init_process_group("gloo")
    for case in cases:
        if case.ranks == dist.get_world_size():
            train_with_deepspeed(case, case.folder(work), sizes)
    dist.destroy_process_group()


def train_with_deepspeed(case: Case, folder: Path, sizes: dict[str, int]) -> None:
    import deepspeed
    import torch
    import torch.distributed as dist
    from deepspeed.utils import safe_get_full_fp32_param

    rank, world_size = dist.get_rank(), dist.get_world_size()
    model, groups = make_model(case.frozen, sizes)
    optimizer, scheduler = make_optimizer(groups)
    config: dict[str, Any] = {"train_micro_batch_size_per_gpu": BATCH // world_size, "gradient_clipping": 1.0}
    config |= {"zero_optimization": {"stage": case.stage, **case.zero}, "zero_allow_untested_optimizer": True}
    config |= {"bf16": {"enabled": case.bf16}, **case.config}
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, lr_scheduler=scheduler, config=config, dist_init_required=False
    )
    losses = []
    for step in range(STEPS + MORE):
        if step == STEPS:
            engine.save_checkpoint(str(folder))
            named = [each for each in engine.module.named_parameters() if each[1].requires_grad]
            state = {
                name: {key: gather(engine.optimizer, parameter, key) for key in ("exp_avg", "exp_avg_sq")}
                | {"fp32": safe_get_full_fp32_param(parameter)}
                for name, parameter in (named if case.stage else [])
            }
        data = batch_of(step, rank, world_size)
        loss = engine(input_ids=data, labels=data).loss
        engine.backward(loss)
        engine.step()
        loss = loss.detach().float()
        dist.all_reduce(loss)
        losses.append(loss.item() / world_size)
    if rank == 0:
        torch.save(state, folder / REFERENCE)
        (folder / "losses.json").write_text(json.dumps(losses[STEPS:]))


def gather(optimizer: Any, parameter: Any, key: str) -> Any:
    """Return a state of a parameter, gathered from the vectors of all ranks. Collective.

    DeepSpeed's own function returns the states of other parameters with ``round_robin_gradients``.
    """
    import torch
    import torch.distributed as dist
    from deepspeed.utils import safe_get_full_optimizer_state

    if hasattr(parameter, "ds_id"):  # stage 3
        return safe_get_full_optimizer_state(parameter, key)
    inner, groups = optimizer.optimizer, getattr(optimizer, "round_robin_bit16_groups", None) or optimizer.bf16_groups
    number = next(number for number, group in enumerate(groups) if any(each is parameter for each in group))
    vector = inner.state[inner.param_groups[number]["params"][0]][key]
    joined = [torch.empty_like(vector) for _ in range(dist.get_world_size())]
    dist.all_gather(joined, vector)
    begin = 0
    for each in groups[number]:
        if each is parameter:
            break
        begin += each.numel()
    return torch.cat(joined)[begin : begin + parameter.numel()].view(parameter.shape).clone()


def convert_with_deepspeed(work: Path, cases: list[Case]) -> None:
    """Write the fp32 weights, and the universal checkpoints, with the programs of DeepSpeed."""
    sys.path.insert(0, os.environ[LIBS])
    from deepspeed.checkpoint import ds_to_universal
    from deepspeed.utils.zero_to_fp32 import convert_zero_checkpoint_to_fp32_state_dict

    for case in cases:
        folder = case.folder(work)
        if case.has_script:
            convert_zero_checkpoint_to_fp32_state_dict(str(folder), str(folder.with_name("consolidated")))
        if case.universal:
            words = {"input_folder": str(folder / TAG), "output_folder": str(case.checkpoint(work))}
            words |= {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False}
            ds_to_universal.main(argparse.Namespace(**words, strict=True, inject_missing_state=True))


def resume_all(work: Path, cases: list[Case]) -> None:
    """Resume from each checkpoint with FSDP2, and write the losses. Runs on each rank."""
    import torch.distributed as dist

    from tests.support.training import fresh_accelerator

    dist.init_process_group("gloo")
    for case in cases:
        precision = "bf16" if case.bf16 else "no"
        settings = {"fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
        config = {"distributed_type": "FSDP", "mixed_precision": precision, "use_cpu": True, "fsdp_config": settings}
        losses = resume(case, fresh_accelerator(config), case.converted(work))
        if dist.get_rank() == 0:
            (case.folder(work) / "resumed.json").write_text(json.dumps(losses))
    dist.destroy_process_group()


def resume(case: Case, accelerator: Any, checkpoint: Path) -> list[float]:
    import torch.distributed as dist

    model, groups = make_model(case.frozen, SIZES)
    optimizer, scheduler = make_optimizer(groups)
    model, optimizer, prepared = accelerator.prepare(model, optimizer, scheduler)
    accelerator.load_state(str(checkpoint))
    losses = []
    for step in range(STEPS, STEPS + MORE):
        data = batch_of(step, dist.get_rank(), dist.get_world_size())
        loss = model(input_ids=data, labels=data).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        prepared.scheduler.step()  # once for each step; Accelerate's scheduler steps once for each rank
        optimizer.zero_grad()
        losses.append(float(accelerator.reduce(loss.detach().float(), "mean")))
    return losses


class Runner:
    """Runs programs, with one thread for each rank.

    Args:
        libs: the folder with DeepSpeed.
        only: part of the names of the cases.
    """

    def __init__(self, libs: Path, work: Path, only: str) -> None:
        self._work, self._only, self._libs = work, only, libs
        self._environ = child_environment({**os.environ, LIBS: str(libs), "DS_ACCELERATOR": "cpu", "DS_BUILD_OPS": "0"})

    def part(self, name: str, num_ranks: int = 1) -> None:
        """Run a part of this program on some ranks."""
        ranks = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(num_ranks))
        module = "scripts.bench.measure.deepspeed_checkpoints"
        self.run(*(ranks if num_ranks > 1 else ()), "-m", module, name, self._work, self._only)

    def run(self, *words: str | Path, deepspeed: bool = False) -> float:
        """Run a Python program, and return its duration in seconds."""
        environ = dict(self._environ)
        if deepspeed:
            environ["PYTHONPATH"] = f"{environ['PYTHONPATH']}{os.pathsep}{self._libs}"
        start = time.monotonic()
        command = [sys.executable, *map(str, words)]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
        if done.returncode:
            print(done.stdout[-3000:], done.stderr[-5000:], file=sys.stderr)
            raise SystemExit(f"failed: {' '.join(command[1:])}")
        return time.monotonic() - start

    def zero_to_fp32(self, folder: Path, out: Path) -> float:
        return self.run(folder / "zero_to_fp32.py", folder, out, deepspeed=True)

    def convert(self, checkpoint: Path, out: Path) -> float:
        return self.run("-m", "hf_fsdp_plugin.cli.main", "convert", checkpoint, "--out", out)

    def merge(self, checkpoint: Path, out: Path) -> float:
        return self.run("-m", "hf_fsdp_plugin.cli.main", "merge", checkpoint, out, "--dtype", "fp32")


def measure(case: Case, work: Path) -> dict[str, Any]:
    """Return the figures of one case."""
    from hf_fsdp_plugin.checkpoint.merging.merge import MergeOptions, merge

    folder, checkpoint = case.folder(work), case.converted(work)
    merge(checkpoint, folder.with_name("merged"), MergeOptions(dtype="float32"))
    found = {"ranks": case.ranks, "zero_to_fp32": case.has_script, "weights_equal": compare_weights(case, folder)}
    if case.stage:
        found["state_equal"] = compare_state(folder, checkpoint)
    if case.has_script and not case.universal:
        found["layout_equal"] = compare_layout(case, folder)
    losses, expected = (json.loads((folder / name).read_text()) for name in ("resumed.json", "losses.json"))
    difference = max(abs(a - b) / b for a, b in zip(losses, expected, strict=True))
    return found | {"loss_difference": round(difference, 8)}


def compare_weights(case: Case, folder: Path) -> bool:
    """Whether the merged weights are those of zero_to_fp32, or of the model; a tied weight has one of its names."""
    import torch
    from safetensors.torch import load_file

    found = load_file(folder.with_name("merged") / "model.safetensors")
    expected = {} if case.stage == 3 else torch.load(next((folder / TAG).glob("mp_rank_00*")))["module"]
    expected = {name: tensor.float() for name, tensor in expected.items()}
    expected |= {name: state["fp32"] for name, state in torch.load(folder / REFERENCE).items()}
    if case.has_script:
        for path in folder.with_name("consolidated").glob("*.bin"):
            expected |= torch.load(path)
    elif case.stage:
        expected["lm_head.weight"] = expected["model.embed_tokens.weight"]
    missing = expected.keys() - found.keys()
    found |= dict.fromkeys(missing & {"lm_head.weight"}, found["model.embed_tokens.weight"])
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def compare_state(folder: Path, checkpoint: Path) -> bool:
    """Whether the optimizer state, and the step of each parameter, are what DeepSpeed's ranks gather."""
    import torch

    from hf_fsdp_plugin.checkpoint.formats.known_formats import read_stored_optimizer
    from tests.support.assembled import assembled

    expected = torch.load(folder / REFERENCE)
    stored = read_stored_optimizer(checkpoint)
    if stored is None or stored.state.keys() != expected.keys():
        return False
    steps = {float(assembled(checkpoint, state["step"])) for state in stored.state.values()}
    return steps == {float(STEPS)} and all(
        torch.equal(torch.from_numpy(assembled(checkpoint, stored.state[name][key])), tensor)
        for name, state in expected.items()
        for key, tensor in state.items()
        if key != "fp32"
    )


def compare_layout(case: Case, folder: Path) -> bool:
    """Whether what the tests write has the same entries and sizes as the files of DeepSpeed."""
    import torch

    from hf_fsdp_plugin.tools.convert.deepspeed_files import read_engines
    from tests.support.assembled import assembled
    from tests.support.deepspeed_files import Zero

    (saved,) = read_engines(folder)
    model, optimizer, engine = saved.model, saved.optimizer, saved.values
    assert optimizer is not None
    groups = [list(group) for group in engine["param_shapes"]]
    trained = {name for names in groups for name in names}
    zero = Zero(
        weights={
            name: torch.from_numpy(assembled(folder, tensor).astype("<f4")) for name, tensor in model.tensors.items()
        },
        groups=groups,
        shared={"lm_head.weight": "model.embed_tokens.weight"},
        dtype=torch.bfloat16 if case.bf16 else torch.float32,
        options=[{} for _ in groups],
        schedule=engine["lr_scheduler"],
    )
    assert trained <= set(zero.weights)
    place, tag = zero.write(folder.with_name("made"), case.stage, case.ranks), folder / TAG
    names = sorted(path.name for path in tag.glob("*.pt"))
    if names != sorted(path.name for path in place.glob("*.pt")):
        return False
    return all(contents(place / name).items() <= contents(tag / name).items() for name in names)


def contents(path: Path) -> dict[str, str]:
    """Return the entries of a file by path: the shape of a tensor, or the type of another value."""
    from hf_fsdp_plugin.checkpoint.formats.pickles import PickledTensor
    from hf_fsdp_plugin.checkpoint.formats.torch_files import open_archive

    found: dict[str, str] = {}

    def collect(where: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                collect(f"{where}/{key}", inner)
        elif isinstance(value, list):
            for number, inner in enumerate(value):
                collect(f"{where}/{number}", inner)
        else:
            found[where] = f"{value.dtype} {value.shape}" if isinstance(value, PickledTensor) else type(value).__name__

    collect("", open_archive(path.parent, path.name)[1])
    return {key: text for key, text in found.items() if "ds_config" not in key and "param_groups" not in key}


def time_merges(runner: Runner, work: Path, pairs: int) -> dict[str, Any]:
    """Return the durations of both programs for a larger model."""
    runner.part("write-large", TIMED.ranks)
    folder = TIMED.folder(work)
    seconds: dict[str, list[float]] = {"merge": [], "zero_to_fp32": []}
    for pair in range(pairs):
        for name in list(seconds) if pair % 2 == 0 else reversed(list(seconds)):
            out = folder.with_name(name)
            shutil.rmtree(out, ignore_errors=True)
            subprocess.run(["sync"], check=False)
            if name == "merge":
                converted = out.with_name("converted")
                shutil.rmtree(converted, ignore_errors=True)
                found = runner.convert(folder, converted) + runner.merge(converted, out)
            else:
                found = runner.zero_to_fp32(folder, out)
            seconds[name].append(round(found, 2))
    merged = statistics.median(seconds["merge"])
    return {
        "checkpoint_bytes": sum(path.stat().st_size for path in folder.rglob("*.pt")),
        "pairs": pairs,
        "seconds": seconds,
        "times_as_fast_as_zero_to_fp32": round(statistics.median(seconds["zero_to_fp32"]) / merged, 2),
    }


def run_part(name: str, work: Path, only: str) -> None:
    """Run a part of the measurement in a process of its own."""
    cases = [case for case in CASES if only in case.name]
    match name:
        case "write":
            write_with_deepspeed(work, cases, SIZES)
        case "write-large":
            write_with_deepspeed(work, [TIMED], LARGE)
        case "convert":
            convert_with_deepspeed(work, cases)
        case "resume":
            resume_all(work, cases)


def main() -> int:
    if sys.argv[1:2] and sys.argv[1] in ("write", "write-large", "convert", "resume"):
        run_part(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
        return 0
    parser = make_parser(__doc__, "deepspeed_checkpoints")
    parser.add_argument("--libs", type=Path, default=os.environ.get(LIBS), help=f"folder with DeepSpeed (or ${LIBS})")
    parser.add_argument("--only", default="", help="only the cases whose name contains this")
    parser.add_argument("--pairs", type=int, default=3, help="pairs of merges that are timed; 0: none")
    args = parser.parse_args()
    if args.libs is None or not (Path(args.libs) / "deepspeed").is_dir():
        install = (__doc__ or "").partition("DeepSpeed is not a dependency.")[2].strip()
        print(f"DeepSpeed was not found; --libs names its folder.\n{install}", file=sys.stderr)
        return 2
    cases = [case for case in CASES if args.only in case.name]
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        runner = Runner(Path(args.libs), work, args.only)
        for num_ranks in sorted({case.ranks for case in cases}):
            runner.part("write", num_ranks)
        runner.part("convert")
        for case in cases:
            runner.convert(case.checkpoint(work), case.converted(work))
        runner.part("resume", RESUMING_RANKS)
        figures = {}
        for case in cases:
            figures[case.name] = measure(case, work)
            print(case.name, figures[case.name], flush=True)
        timed = time_merges(runner, work, args.pairs) if args.pairs else {}
    result = {"deepspeed": version_in(args.libs), "cases": figures, "time": timed}
    write_result("deepspeed_checkpoints", args.out, result)
    return 0


def version_in(libs: Path) -> str:
    """Return the version of DeepSpeed in a folder."""
    (found,) = Path(libs).glob("deepspeed-*.dist-info")
    return found.name.removeprefix("deepspeed-").removesuffix(".dist-info")


if __name__ == "__main__":
    raise SystemExit(main())
