"""The commands that the documents show: quick ones run, and the flags of all others are parsed by their program."""

from __future__ import annotations

import argparse
import io
import json
import re
import runpy
import shutil
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NoReturn

import pytest

from hf_fsdp_plugin.cli.main import VERBS, main, make_parser, parse_arguments
from hf_fsdp_plugin.launcher.flags import parse_launch_arguments
from hf_fsdp_plugin.problems import UsageError
from tests.support import saved
from tests.support.documents import ROOT, Command, blocks, inline_commands, simple_commands
from tests.support.leaks import ProcessState
from tests.unit.cli.conftest import LLAMA

RANKS = "starts ranks: tests/gloo"
NOT_RUN: dict[str, str] = {
    r"hf-fsdp launch (?!.*--dry_run)": RANKS,
    r"hf-fsdp (profile|bench)\b": RANKS,
    r"hf-fsdp plan fp8\.yaml": "needs torchao",
    r"hf-fsdp convert run/checkpoint-": "needs a checkpoint of DeepSpeed: tests/unit/cli/test_convert.py",
    r"hf-fsdp merge run/checkpoint-3-fsdp ": "needs a checkpoint of DeepSpeed: tests/gloo/test_deepspeed.py",
    r"hf-fsdp merge (lora|.*--fold-adapter)": "needs an adapter: tests/programs/merge/test_fold_adapter.py",
    r"hf-fsdp (convert llama|merge llama-fsdp)": "needs weights: tests/programs/checkpoint/test_convert_model.py",
    r"hf-fsdp check .*--run": RANKS,
    r"(\S*/)?torchrun ": RANKS,
    r"(\S*/)?accelerate launch": RANKS,
    r"srun ": "needs Slurm",
    r"hf-fsdp (enable|disable)": "changes the environment of Python: tests/programs/cli/test_enable.py",
    r"/usr/bin/python3 -m hf_fsdp_plugin.cli.main enable": "changes the environment of Python",
    r"bash scripts/(test|quickstart)\.sh": "runs this test, or minutes: scripts/matrix.sh runs the quickstart",
    r"bash scripts/gpu_check\.sh": "needs a GPU, or minutes: tests/gloo/test_gpu_check.py",
    r"(bash )?scripts/(coverage|ecosystem|matrix|two_hosts)\.sh": "takes minutes to hours: python -m scripts.last_runs",
    r"(\S*/)?python (-m )?scripts": "tests/programs/test_every_program.py runs each program with its own sizes",
    r"python tests/accelerator/backend/torch_npu/build\.py": "tests/accelerator builds it",
    r"python -c 'import torch; print\(torch\.ones\(2, device=\"npu\"\)\)'": "tests/accelerator",
    r"python train\.py": "a script of the reader",
    r"(\S*/)?(pip|pre-commit) ": "installs packages",
    r"(jq|cat|echo|head|export|sed|chmod|iconv|ulimit|timeout|python -c)\b": "is no program of this repository",
}
"""Pattern of a command -> why it is only parsed. Each other command runs."""
REFUSED = (
    "hf-fsdp launch --config fixed.yaml train.py",
    "hf-fsdp launch --config_file fsdp.yaml --cpu=false train.py",
)
"""Commands that the documents show because their flags are refused."""
OTHER_SITUATIONS: dict[str, str] = {
    "FSDP-E833": {"plan.html": "pictures"},
    "FSDP-E003": "root may read each file",
    "FSDP-W494": "needs values that overflow: tests/unit/merge/test_merge.py",
    "FSDP-W629": "needs another version of the package: tests/programs/cli/test_enable.py",
    "FSDP-W814": "needs a model of 405 B: tests/programs/cli/test_plan.py",
    "FSDP-E727": "needs an environment without peft",
    "FSDP-E737": "needs torchao",
    "FSDP-E810": "needs a model whose code depends on values",
    "FSDP-E811": "needs a model with other inputs",
}
"""Code -> why its example is only parsed."""
NAMES = {
    r"(meta-llama|HuggingFaceTB|mistralai|facebook|some-lab)/[\w.-]+": "llama",
    r"\bMODEL\b": "llama",
    r"^NAME$": "oldest",
}
"""Pattern in a word -> a local folder with a config, or a value."""
FSDP = """\
distributed_type: FSDP
num_processes: 2
use_cpu: true
fsdp_config:
  fsdp_version: 2
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_state_dict_type: SHARDED_STATE_DICT
"""
DEEPSPEED = {"zero_optimization": {"stage": 3}, "bf16": {"enabled": "auto"}, "gradient_clipping": 1.0}
MODEL = json.dumps({**LLAMA, "max_position_embeddings": 4096})
THREE_HEADS = {"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 48}
GOOD = ROOT / "tests" / "data" / "good"
FILES = {
    "fsdp.yaml": FSDP,
    "ds.json": json.dumps(DEEPSPEED),
    "ds_zero3.json": json.dumps(DEEPSPEED),
    "llama/config.json": MODEL,
    "gpt2/config.json": json.dumps({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_layer": 2}),
    "config.json": MODEL,
    "train.py": "print('trained')\n",
}
SITUATIONS: dict[str, dict[str, str | bytes]] = {
    "FSDP-E004": {"model.safetensors": b"0" * (2 << 20)},
    "FSDP-E005": {"fsdp16.yaml": FSDP.encode("utf-16")},
    "FSDP-E481": {"model/notes.txt": "notes"},
    "FSDP-E487": {"run/checkpoint-20/fsdp_manifest.json": ""},
    "FSDP-E497": {f"run/checkpoint-{step}/pytorch_model_fsdp_0/__0_0.distcp": "" for step in (10, 20)},
    "FSDP-E498": {"run/checkpoint-20/trainer_state.json": '{"global_step": 20}'.ljust(65)},
    "FSDP-E720": {"llama/config.json": json.dumps({"model_type": "own", "auto_map": {"AutoConfig": "own.Config"}})},
    "FSDP-E813": {"llama/config.json": json.dumps({**LLAMA, **THREE_HEADS})},
    "FSDP-E736": {"single.yaml": "distributed_type: 'NO'\n"},
    "FSDP-E766": {"axolotl.yaml": (GOOD / "axolotl_fsdp1.yaml").read_text()},
    "docs/dialects.md": {
        "deepspeed.yaml": (GOOD / "accelerate_deepspeed.yaml").read_text(),
        "axolotl.yaml": (GOOD / "axolotl_fsdp1.yaml").read_text(),
        "fsdp.yaml": "",
    },
    "docs/migrate.md": {"fsdp.yaml": FSDP.replace("version: 2", "version: 1")},
}
"""Code or document -> further files, with their contents; an empty file is removed."""


class Parsed(Exception):
    """The arguments of a program are valid."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a reader: a config, a script, a model and a run with two checkpoints."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    for step in (10, 20):
        saved.local_checkpoint(tmp_path / f"run/checkpoint-{step}", best_model_checkpoint="run/checkpoint-20")
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    (tmp_path / "out").symlink_to("run")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n" * 40))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # python -m scripts.bench changes it
    return tmp_path


def prepare(folder: Path, situation: str) -> None:
    """Write the files of a situation."""
    for name, content in SITUATIONS.get(situation, {}).items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        if content:
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
        else:
            path.unlink()


def reason_not_to_run(command: Command) -> str:
    if command.place.startswith("docs/command_line.md"):
        return "scripts/screenshots.py has run it: tests/unit/test_update_docs.py"
    matching = (why for pattern, why in NOT_RUN.items() if re.match(pattern, command.text))
    return OTHER_SITUATIONS.get(command.code) or next(matching, "")


def words_of(command: Command) -> list[str]:
    """Return the words with the names of this test."""
    words = list(command.words)
    for pattern, name in NAMES.items():
        words = [re.sub(pattern, name, word) for word in words]
    return words


def parse(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parse the arguments of a command as its program does. Programs of others have none that can be parsed."""
    match [Path(words_of(command)[0]).name, *words_of(command)[1:]]:
        case ["hf-fsdp", "help"]:
            pass
        case ["hf-fsdp", verb, *words]:
            parse_arguments(verb, words)
        case ["torchrun", *words]:
            from torch.distributed.run import get_args_parser

            parse_script(get_args_parser().parse_args(words))
        case ["accelerate", "launch", *words]:
            from accelerate.commands.launch import launch_command_parser

            parse_script(launch_command_parser().parse_args(words))
        case ["srun", *_, "bash", "-c", text]:
            for inner in simple_commands(text, command.place):
                parse(inner, monkeypatch)
        case ["python", "-m", module, *words] if module.startswith("scripts."):
            parse_program(module, words, monkeypatch)
        case ["python", path, *words] if path.startswith("scripts/"):
            parse_program(path.removesuffix(".py").replace("/", "."), words, monkeypatch)
        case ["bash", path, *words]:
            parse_shell(path, words, monkeypatch)
        case [name, *words] if name.endswith(".sh"):
            parse_shell(f"scripts/{name}", words, monkeypatch)


def parse_script(args: argparse.Namespace) -> None:
    """Parse what a launcher runs: a script, or this package as a module."""
    if args.training_script == "hf_fsdp_plugin":
        assert args.module
        assert parse_launch_arguments(args.training_script_args).script.endswith(".py")
    else:
        assert args.training_script.endswith(".py")


def parse_shell(path: str, words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Parse the arguments that a shell script passes to its program."""
    assert (ROOT / path).is_file(), path
    programs = {
        "ecosystem.sh": ["scripts.run_ecosystem"],
        "matrix.sh": ["scripts.run_matrix"],
        "gpu_check.sh": ["scripts.bench", "gpu_check"],
        "two_hosts.sh": ["scripts.bench", "two_hosts"],
    }
    name = Path(path).name
    if name == "test.sh":
        for word in words:
            assert not word.startswith("tests/") or (ROOT / word).exists(), f"{word} does not exist"
            assert not word.startswith("--") or f"{word} " in (ROOT / path).read_text(), f"test.sh has no flag {word}"
    elif words:
        module, *first = programs[name]
        parse_program(module, [*first, *words], monkeypatch)


def parse_program(module: str, words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a program until its arguments are parsed."""
    original, process = argparse.ArgumentParser.parse_args, ProcessState.read()

    def parse_args(self: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> NoReturn:
        original(self, *args, **kwargs)
        raise Parsed

    with monkeypatch.context() as patch, pytest.raises(Parsed):
        patch.setattr(argparse.ArgumentParser, "parse_args", parse_args)
        if module == "scripts.bench" and words and not words[0].startswith("-"):
            name, *words = words
            module = f"scripts.bench.measure.{name}"
        patch.setattr(sys, "argv", [module, *words])
        path = ROOT / module.replace(".", "/")
        runpy.run_path(str(path / "__main__.py" if path.is_dir() else path.with_suffix(".py")), run_name="__main__")
    process.restore()  # some programs handle SIGTERM


BLOCKS = [block for block in blocks() if block]


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block[0].place)
def test_commands_of_a_block(
    block: list[Command], folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each command ends with exit code 0, and the example of a problem code reports it."""
    prepare(folder, block[0].code or block[0].place.partition(":")[0])
    for command in block:
        if not command.words:
            continue
        if reason_not_to_run(command):
            with pytest.raises(UsageError) if command.text in REFUSED else nullcontext():
                parse(command, monkeypatch)
            continue
        if command.piped:
            monkeypatch.setattr(sys, "stdin", io.StringIO("\n"))
        assert command.words[0] == "hf-fsdp", f"{command.text} needs a row in NOT_RUN"
        code = main(words_of(command)[1:])
        out, err = capsys.readouterr()
        if command.target:
            (folder / command.target).write_text(out)
        shutil.rmtree("model", ignore_errors=True)  # documents list several commands that write it
        is_right = command.code in out + err if command.code else code == 0
        assert is_right, f"{command.text}\nexit code {code}\n{out}\n{err}"


def test_every_row_has_a_command() -> None:
    commands = [command for block in BLOCKS for command in block]
    texts = [command.text for command in [*commands, *inline_commands()]]
    assert [pattern for pattern in NOT_RUN if not any(re.match(pattern, text) for text in texts)] == []
    codes = {command.code for command in commands} | {command.place.partition(":")[0] for command in commands}
    assert {*OTHER_SITUATIONS, *SITUATIONS} - codes == set() and set(REFUSED) <= set(texts)


def test_flags_of_inline_commands_exist(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands in the text are fragments: their verbs and flags exist, and those of scripts can be parsed."""
    found = inline_commands()
    assert len(found) > 200
    unknown = []
    for command in found:
        match list(command.words):
            case ["hf-fsdp", verb, *words]:
                unknown += [f"{command.place} {command.text}: {word}" for word in unknown_words(verb, words)]
            case _:
                parse(command, monkeypatch)
    assert unknown == []


def unknown_words(verb: str, words: list[str]) -> list[str]:
    """Return the verb if there is none of this name; otherwise the flags that it does not have."""
    if verb not in VERBS:
        return [verb] if re.fullmatch(r"[a-z]+", verb) else []
    own = words[: words.index("--")] if "--" in words else words
    own = own[: next((i for i, word in enumerate(own) if word.endswith(".py")), len(own))]
    flags = {word.partition("=")[0] for word in own if re.match(r"--\w", word)}
    return sorted(flag for flag in flags if not is_flag(verb, flag))


def is_flag(verb: str, flag: str) -> bool:
    return make_parser(verb).find(flag) is not None
