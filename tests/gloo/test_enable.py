"""Stock launchers and unmodified scripts in an environment in which ``hf-fsdp enable`` was run."""

from __future__ import annotations

import functools
import json
import subprocess
import sysconfig
import venv
from pathlib import Path
from typing import Any

import pytest

from hf_fsdp_plugin.cli.enable import FILE_NAME, TEXT
from tests.support.launching import Done, run, write

ROOT = Path(__file__).parents[2]
CONFIG = """\
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
num_machines: 1
num_processes: 2
mixed_precision: "no"
use_cpu: true
fsdp_config:
  fsdp_version: 2
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_cpu_ram_efficient_loading: RAM_EFFICIENT
"""
FACTS = """
    import os, sys

    def facts():
        import accelerate
        return {
            "hooked": hasattr(accelerate.Accelerator.prepare, "__wrapped__"),
            "installed": "hf_fsdp_plugin.integrations.install" in sys.modules,
        }
"""
UNTOUCHED = {"hooked": False, "installed": False}
TRAINER = """
    import json, os, subprocess, sys
    import torch
    from facts import facts
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    sizes = dict(vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2)
    arguments = TrainingArguments("out", max_steps=2, report_to="none", save_strategy="no", **json.loads(sys.argv[1]))
    model = LlamaForCausalLM(LlamaConfig(**sizes))
    data = [{"input_ids": torch.arange(8), "labels": torch.arange(8)} for _ in range(16)]
    Trainer(model, arguments, train_dataset=data).train()
    if os.environ.get("RANK", "0") == "0":
        child = "import json; from facts import facts; print(json.dumps(facts()))"
        found = {"rank": facts(), "child": json.loads(subprocess.check_output([sys.executable, "-c", child]))}
        found["variables"] = [*{"ACCELERATE_USE_CPU", "PYTORCH_NVML_BASED_CUDA_CHECK"} & {*os.environ}]
        open("found.json", "w").write(json.dumps(found))
"""
LOOP = """
    import torch
    from accelerate import Accelerator
    from accelerate.utils import FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="size_based_wrap", min_num_params=50)
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    accelerator.backward(model(torch.randn(2, 8)).sum())
    optimizer.step()
    accelerator.end_training()
"""
EXPLICIT = """
    from accelerate import PartialState  # before install(), as in many scripts
    import hf_fsdp_plugin
    spec = hf_fsdp_plugin.install("own.yaml")
    from hf_fsdp_plugin.integrations.session import session
    assert not session().is_automatic and not session().waits_for_call
    print("version", spec.fsdp.version, [str(problem) for problem in spec.problems])
"""


class Enabled:
    """A folder with an environment in which the plugin is enabled, and runs in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        venv.create(folder / "venv", with_pip=False, symlinks=True)
        self.python = folder / "venv" / "bin" / "python"
        base = str(folder / "venv")
        site = Path(sysconfig.get_path("purelib", "venv", vars={"base": base, "platbase": base}))
        (site / "paths.pth").write_text(f"{ROOT}\n{sysconfig.get_path('purelib')}\n")
        self.file = site / FILE_NAME
        self.file.write_text(TEXT)
        write(folder, FACTS, name="facts.py")

    def torchrun(self, script: str, *arguments: str, ranks: int = 2, **variables: str) -> Done:
        write(self.folder, script)
        command = [self.python, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
        command += ["train.py"]
        return run(self.folder, [*command, *arguments], PYTHONPATH="", OMP_NUM_THREADS="1", **variables)

    def accelerate(self, script: str, *arguments: str, config: str = CONFIG) -> Done:
        (self.folder / "fsdp.yaml").write_text(config)
        write(self.folder, script)
        command = [self.python, "-m", "accelerate.commands.launch", "--config_file", "fsdp.yaml"]
        command += ["--main_process_port", "0", "train.py", *arguments]
        return run(self.folder, command, PYTHONPATH="", OMP_NUM_THREADS="1")

    def report(self, done: Done) -> dict[str, Any]:
        """Return the report of a run of the Trainer, or fail with its output."""
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads((self.folder / "out" / "fsdp_report.json").read_text())
        return found

    def found(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / "found.json").read_text())
        return found


@pytest.fixture
def enabled(tmp_path: Path) -> Enabled:
    return Enabled(tmp_path)


def test_trainer_under_torchrun_is_reported(enabled: Enabled) -> None:
    """And a process that the rank starts is as without the plugin."""
    report = enabled.report(enabled.torchrun(TRAINER, '{"fsdp": "shard_grad_op auto_wrap", "use_cpu": true}'))
    assert (report["backend"], report["world_size"], len(report["units"])) == ("fsdp2", 2, 5)
    asked = {row["setting"]: (row["asked"], row["status"]) for row in report["settings"]}
    assert asked["sharding.strategy"] == ("shard_grad_op", "applied")
    found = enabled.found()
    assert found["rank"]["hooked"] and found["rank"]["installed"] and found["child"] == UNTOUCHED


@pytest.mark.slow
@pytest.mark.parametrize("ram_efficient", ["false", "true"])
def test_trainer_under_accelerate_launch_is_reported(enabled: Enabled, ram_efficient: str) -> None:
    config = CONFIG.replace("RAM_EFFICIENT", ram_efficient) + "  fsdp_reshard_after_forward: false\n"
    report = enabled.report(enabled.accelerate(TRAINER, "{}", config=config))
    assert (report["backend"], report["world_size"]) == ("fsdp2", 2)
    assert {problem["severity"] for problem in report["problems"]} <= {"note"}
    asked = {row["setting"]: (row["asked"], row["status"]) for row in report["settings"]}
    assert asked["sharding.strategy"] == ("shard_grad_op", "applied")
    assert enabled.found()["child"] == UNTOUCHED


@pytest.mark.slow
def test_plugin_object_under_torchrun_is_reported(enabled: Enabled) -> None:
    done = enabled.torchrun(LOOP)
    assert done.returncode == 0, done.stderr
    report = json.loads((enabled.folder / "fsdp_report.json").read_text())
    assert (report["backend"], len(report["units"])) == ("fsdp2", 3)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torchrun", "accelerate"])
def test_run_without_fsdp_is_untouched(enabled: Enabled, launcher: str) -> None:
    """The replaced functions call the originals; nothing is set, printed or installed."""
    arguments = '{"use_cpu": true}'
    config = CONFIG.partition("fsdp_config:")[0].replace("FSDP", "MULTI_CPU")
    start = enabled.torchrun if launcher == "torchrun" else functools.partial(enabled.accelerate, config=config)
    found = []
    for _ in ("enabled", "disabled"):
        done = start(TRAINER, arguments)
        assert done.returncode == 0 and not (enabled.folder / "out" / "fsdp_report.json").exists(), done.stderr
        assert "hf-fsdp" not in done.stderr and "FSDP-" not in done.stderr
        found.append(enabled.found())
        enabled.file.unlink(missing_ok=True)
    assert found[0]["child"] == found[1]["rank"] == UNTOUCHED
    # On CPUs, accelerate launch without FSDP starts a plain process, which is no rank.
    assert found[0]["rank"] == {"hooked": launcher == "torchrun", "installed": False}
    assert found[0]["variables"] == found[1]["variables"]


@pytest.mark.slow
def test_error_of_a_setting_ends_the_run_with_its_message(enabled: Enabled) -> None:
    done = enabled.torchrun(TRAINER, '{"fsdp": "full_shardd", "use_cpu": true}')
    # Rank 1 prints the message, too, if rank 0 takes 10 seconds to end.
    assert done.returncode == 1
    assert done.stderr.count("full_shardd") in (1, 2) and "Error processing line" not in done.stderr, done.stderr
    config = CONFIG.replace("RAM_EFFICIENT", "false") + "  fsdp_offload_param: true\n"
    done = enabled.accelerate(TRAINER, "{}", config=config)
    assert done.returncode == 1
    assert done.stderr.count("[FSDP-E020]") in (1, 2), done.stderr


@pytest.mark.slow
def test_install_in_the_script_replaces_the_launchers_settings(enabled: Enabled) -> None:
    """As without `hf-fsdp enable`: errors of the launcher's config do not matter."""
    (enabled.folder / "own.yaml").write_text(
        CONFIG.replace("RAM_EFFICIENT", "false").replace("version: 2", "version: 1")
    )
    config = CONFIG.replace("RAM_EFFICIENT", "false") + "  fsdp_offload_param: true\n"
    done = enabled.accelerate(EXPLICIT, config=config)
    assert done.returncode == 0 and done.stdout.count("version 1") == 2, done.stderr


@pytest.mark.slow
def test_disabled_environment_is_stock(enabled: Enabled) -> None:
    assert subprocess.run([enabled.python, "-m", "hf_fsdp_plugin.cli.main", "disable"], check=False).returncode == 0
    done = enabled.torchrun(TRAINER, '{"use_cpu": true}')
    assert done.returncode == 0 and enabled.found()["rank"] == UNTOUCHED, done.stderr


@pytest.mark.slow
def test_hf_fsdp_launch_is_as_before(enabled: Enabled) -> None:
    (enabled.folder / "fsdp.yaml").write_text(CONFIG.replace("RAM_EFFICIENT", "false"))
    write(enabled.folder, TRAINER)
    command = [
        enabled.python,
        "-m",
        "hf_fsdp_plugin.cli.main",
        "launch",
        "--config_file",
        "fsdp.yaml",
        "train.py",
        "{}",
    ]
    enabled.report(run(enabled.folder, command, PYTHONPATH=""))
    assert enabled.found()["child"] == UNTOUCHED
