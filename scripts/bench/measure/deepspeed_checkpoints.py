"""Checkpoints that DeepSpeed has written, merged and resumed, against DeepSpeed itself.

Gloo ranks train a tiny Llama with DeepSpeed, tied weights and two parameter groups, save after three steps, and train
two more. For each case, ``hf-fsdp merge`` is compared bit for bit with ``zero_to_fp32``, the AdamW state with
what DeepSpeed's ranks gather, and the layout of the files with those of ``tests/support/deepspeed_files.py``. FSDP2 on
two ranks resumes from the checkpoint; its losses are compared with those of DeepSpeed's next steps. A larger model is
merged by both programs alternately, to compare their times; each is a process from its start to its end.

DeepSpeed is not a dependency. Install it in a folder of its own, without a compiler and without another torch:

    DS_BUILD_OPS=0 pip install --no-deps --no-build-isolation --target DIR deepspeed hjson msgpack ninja py-cpuinfo \\
        psutil pydantic pydantic_core annotated_types typing_inspection einops tqdm
    python -m scripts.bench deepspeed_checkpoints --libs DIR     (20 minutes on 2 cores)
"""

from __future__ import annotations

import json
import os
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
TIMED = Case(name="timed", stage=2, bf16=True)
SIZES = {"hidden_size": 32, "intermediate_size": 45, "num_hidden_layers": 2, "vocab_size": VOCABULARY}
LARGE = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 6, "vocab_size": 32000}


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


def write_with_deepspeed(case: Case, folder: Path, sizes: dict[str, int]) -> None:
    """Train, save, and train more steps. Runs on each rank of DeepSpeed."""
    sys.path.insert(0, os.environ[LIBS])
    import deepspeed
    import torch
    import torch.distributed as dist
    from deepspeed.utils import safe_get_full_fp32_param

    dist.init_process_group("gloo")
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
        model.config.save_pretrained(folder)
        torch.save(state, folder / REFERENCE)
        (folder / "losses.json").write_text(json.dumps(losses[STEPS:]))
    dist.destroy_process_group()


def gather(optimizer: Any, parameter: Any, key: str) -> Any:
    """Return a state of a parameter, gathered by the addresses that DeepSpeed keeps at its parameters. Collective."""
    import torch
    import torch.distributed as dist
    from deepspeed.utils import safe_get_full_optimizer_state

    if hasattr(parameter, "ds_id"):  # stage 3
        return safe_get_full_optimizer_state(parameter, key)
    whole, mapping, inner = torch.zeros(parameter.numel()), parameter._hp_mapping, optimizer.optimizer
    if mapping is not None:  # this rank has a part
        vector = inner.state[inner.param_groups[mapping.param_group_index]["params"][0]][key]
        own, target = mapping.hp_fragment_address, mapping.lp_fragment_address
        whole[target.start : target.start + own.numel] = vector[own.start : own.start + own.numel]
    dist.all_reduce(whole)
    return whole.view(parameter.shape)


def resume(case: Case, folder: Path, checkpoint: Path) -> None:
    """Resume from the checkpoint with FSDP2, and write the losses. Runs on each rank."""
    import torch.distributed as dist
    from accelerate import Accelerator

    model, groups = make_model(case.frozen, SIZES)
    optimizer, scheduler = make_optimizer(groups)
    accelerator = Accelerator(step_scheduler_with_optimizer=False)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    accelerator.load_state(str(checkpoint))
    losses = []
    for step in range(STEPS, STEPS + MORE):
        data = batch_of(step, dist.get_rank(), dist.get_world_size())
        loss = model(input_ids=data, labels=data).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(float(accelerator.reduce(loss.detach().float(), "mean")))
    if dist.get_rank() == 0:
        (folder / "resumed.json").write_text(json.dumps(losses))


_CONFIG = """\
distributed_type: FSDP
fsdp_config:
  fsdp_version: 2
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
mixed_precision: {precision}
use_cpu: true
"""


class Runner:
    """Runs the programs of a case."""

    def __init__(self, libs: Path) -> None:
        self._environ = child_environment({**os.environ, LIBS: str(libs), "DS_ACCELERATOR": "cpu", "DS_BUILD_OPS": "0"})
        self._libs = libs

    def run(self, *words: str | Path, deepspeed: bool = False) -> float:
        """Run a Python program, and return its duration in seconds."""
        environ = dict(self._environ)
        if deepspeed:
            environ["PYTHONPATH"] = f"{environ['PYTHONPATH']}{os.pathsep}{self._libs}"
        start = time.monotonic()
        done = subprocess.run(
            [sys.executable, *map(str, words)], env=environ, capture_output=True, text=True, check=False
        )
        if done.returncode:
            print(done.stdout[-3000:], done.stderr[-5000:], file=sys.stderr)
            raise SystemExit(f"failed: {' '.join(map(str, words))}")
        return time.monotonic() - start

    def write(self, case: Case, folder: Path, sizes: str) -> None:
        ranks = "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(case.ranks)
        self.run(*ranks, "-m", "scripts.bench.measure.deepspeed_checkpoints", "write", case.name, folder, sizes)
        if case.universal:
            tag = folder / f"global_step{STEPS}"
            words = "--input_folder", tag, "--output_folder", f"{tag}_universal", "--inject_missing_state"
            self.run("-m", "deepspeed.checkpoint.ds_to_universal", *words, deepspeed=True)

    def resume(self, case: Case, folder: Path, checkpoint: Path) -> float:
        """Return the largest relative difference of the losses after resuming."""
        config = folder / "fsdp.yaml"
        config.write_text(_CONFIG.format(precision="bf16" if case.bf16 else "'no'"))
        launch = "-m", "hf_fsdp_plugin.cli.main", "launch", "--config_file", config, "--num_processes", RESUMING_RANKS
        self.run(*map(str, launch), Path(__file__), "resume", case.name, folder, checkpoint)
        found, expected = (json.loads((folder / name).read_text()) for name in ("resumed.json", "losses.json"))
        return max(abs(a - b) / b for a, b in zip(found, expected, strict=True))

    def zero_to_fp32(self, folder: Path, out: Path) -> float:
        return self.run(folder / "zero_to_fp32.py", folder, out, deepspeed=True)

    def merge(self, checkpoint: Path, out: Path, config: Path) -> float:
        words = "merge", checkpoint, out, "--dtype", "fp32", "--config", config
        return self.run("-m", "hf_fsdp_plugin.cli.main", *words)


def measure(case: Case, runner: Runner, work: Path) -> dict[str, Any]:
    """Return the figures of one case."""
    folder = work / "saved"
    folder.mkdir(parents=True)
    runner.write(case, folder, "small")
    tag = folder / f"global_step{STEPS}"
    checkpoint = tag.with_name(f"{tag.name}_universal") if case.universal else folder
    runner.merge(checkpoint, work / "merged", folder)
    has_script = case.stage > 0 and case.config != _FP32_GRADIENTS
    if has_script:
        runner.zero_to_fp32(folder, work / "consolidated")
    weights = compare_weights(case, work, tag, has_script)
    found = {"ranks": case.ranks, "zero_to_fp32": has_script, "weights_equal": weights}
    if case.stage:
        found["state_equal"] = compare_state(folder, checkpoint)
    if has_script and not case.universal:
        found["layout_equal"] = compare_layout(case, work, tag)
    return found | {"loss_difference": round(runner.resume(case, folder, checkpoint), 8)}


def compare_weights(case: Case, work: Path, tag: Path, has_script: bool) -> bool:
    """Whether the merged weights are those of zero_to_fp32, or of the model; a tied weight has one of its names."""
    import torch
    from safetensors.torch import load_file

    found = load_file(work / "merged" / "model.safetensors")
    expected = {} if case.stage == 3 else torch.load(next(tag.glob("mp_rank_00*")), weights_only=False)["module"]
    expected = {name: tensor.float() for name, tensor in expected.items()}
    expected |= {name: state["fp32"] for name, state in torch.load(tag.parent / REFERENCE).items()}
    if has_script:
        for path in (work / "consolidated").glob("*.bin"):
            expected |= torch.load(path)
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


def compare_layout(case: Case, work: Path, tag: Path) -> bool:
    """Whether what the tests write has the same entries and sizes as the files of DeepSpeed."""
    import torch

    from hf_fsdp_plugin.checkpoint.formats.deepspeed import read_engine_state
    from hf_fsdp_plugin.checkpoint.formats.known_formats import read_stored_model, read_stored_optimizer
    from tests.support.assembled import assembled
    from tests.support.deepspeed_files import Zero

    folder = tag.parent
    model, optimizer = read_stored_model(folder), read_stored_optimizer(folder)
    engine = read_engine_state(folder)
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
    place = zero.write(work / "made", case.stage, case.ranks)
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
    folder = work / "saved"
    folder.mkdir()
    runner.write(TIMED, folder, "large")
    seconds: dict[str, list[float]] = {"merge": [], "zero_to_fp32": []}
    for pair in range(pairs):
        for name in list(seconds) if pair % 2 == 0 else reversed(list(seconds)):
            out = work / name
            shutil.rmtree(out, ignore_errors=True)
            subprocess.run(["sync"], check=False)
            found = runner.merge(folder, out, folder) if name == "merge" else runner.zero_to_fp32(folder, out)
            seconds[name].append(round(found, 2))
    merged = statistics.median(seconds["merge"])
    return {
        "checkpoint_bytes": sum(path.stat().st_size for path in folder.rglob("*.pt")),
        "pairs": pairs,
        "seconds": seconds,
        "times_as_fast_as_zero_to_fp32": round(statistics.median(seconds["zero_to_fp32"]) / merged, 2),
    }


def case_named(name: str) -> Case:
    return next(case for case in (*CASES, TIMED) if case.name == name)


def main() -> int:
    if sys.argv[1:2] == ["write"]:
        write_with_deepspeed(case_named(sys.argv[2]), Path(sys.argv[3]), LARGE if sys.argv[4] == "large" else SIZES)
        return 0
    if sys.argv[1:2] == ["resume"]:
        resume(case_named(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4]))
        return 0
    parser = make_parser(__doc__, "deepspeed_checkpoints")
    parser.add_argument("--libs", type=Path, default=os.environ.get(LIBS), help=f"folder with DeepSpeed (or ${LIBS})")
    parser.add_argument("--only", help="only the cases whose name contains this")
    parser.add_argument("--pairs", type=int, default=3, help="pairs of merges that are timed; 0: none")
    args = parser.parse_args()
    if args.libs is None or not (Path(args.libs) / "deepspeed").is_dir():
        install = (__doc__ or "").partition("DeepSpeed is not a dependency.")[2].strip()
        print(f"DeepSpeed was not found; --libs names its folder.\n{install}", file=sys.stderr)
        return 2
    runner = Runner(Path(args.libs))
    cases: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as work:
        for number, case in enumerate(case for case in CASES if not args.only or args.only in case.name):
            cases[case.name] = measure(case, runner, Path(work) / str(number))
            print(case.name, cases[case.name], flush=True)
        timed = time_merges(runner, Path(work), args.pairs) if args.pairs else {}
    write_result("deepspeed_checkpoints", args.out, {"deepspeed": version_in(args.libs), "cases": cases, "time": timed})
    return 0


def version_in(libs: Path) -> str:
    """Return the version of DeepSpeed in a folder."""
    (found,) = Path(libs).glob("deepspeed-*.dist-info")
    return found.name.removeprefix("deepspeed-").removesuffix(".dist-info")


if __name__ == "__main__":
    raise SystemExit(main())
