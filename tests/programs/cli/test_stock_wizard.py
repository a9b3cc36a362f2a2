"""Files of stock ``accelerate config``, whose menus run on a pseudo-terminal: every answer arrives in the spec."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import yaml

from hf_fsdp_plugin.sources.config_tree import ConfigFile
from hf_fsdp_plugin.sources.interface import Sources
from hf_fsdp_plugin.spec.load import assess
from hf_fsdp_plugin.strategies import STRATEGIES
from tests.support.matrices import slow
from tests.support.terminal import DOWN, ENTER, Terminal

DRIVER = """
import sys
from accelerate.commands.config.cluster import get_cluster_input
print("loaded", flush=True)
for number in range(int(sys.argv[1])):
    get_cluster_input().to_yaml_file(f"{number}.yaml")
    print(f"written {number}.", flush=True)
"""

Answers = Mapping[str, Any]
POLICIES = ("own classes", "named classes", "size", "none")
LOADING = ("efficient", "synchronized", "separate")
COMMON: dict[str, Sequence[Any]] = {
    "offload": (False, True),
    "policy": POLICIES,
    "checkpointing": (False, True),
    "precision": ("no", "fp16", "bf16"),
    "machines": (1, 2),
}
VERSION_1: dict[str, Sequence[Any]] = {
    "strategy": tuple(STRATEGIES),
    "prefetch": ("pre", "post", "none"),
    "state_dict": ("full", "local", "sharded"),
    "forward_prefetch": (False, True),
    "use_orig": (True, False),
    "loading": LOADING,
    **COMMON,
}
VERSION_2: dict[str, Sequence[Any]] = {
    "reshard": (True, False),
    "state_dict": ("sharded", "full"),
    "loading": LOADING[:2],
    "mesh": (None, (1, 4), (2, 2)),
    **COMMON,
}


def covering(dimensions: Mapping[str, Sequence[Any]], strength: int) -> list[dict[str, Any]]:
    """Return answers in which all values of every `strength` dimensions occur together."""
    wanted = {
        pairs
        for names in itertools.combinations(dimensions, strength)
        for pairs in itertools.product(*([(name, value) for value in dimensions[name]] for name in names))
    }
    found = []
    while wanted:
        answers = dict(min(wanted, key=str))
        for name in dimensions:
            if name not in answers:
                answers[name] = max(dimensions[name], key=lambda value: _gain({**answers, name: value}, wanted))
        wanted -= {pairs for pairs in wanted if all(answers[name] == value for name, value in pairs)}
        found.append(answers)
    return found


def _gain(answers: Answers, wanted: Iterable[tuple[tuple[str, Any], ...]]) -> int:
    return sum(all(answers.get(name, value) == value for name, value in pairs) for pairs in wanted)


def choose(number: int) -> str:
    return DOWN * number + ENTER


def yes(answer: bool) -> str:
    return ("yes" if answer else "no") + ENTER


def keys(answers: Answers) -> Iterator[tuple[str, str]]:
    """Yield each question of the stock wizard, and the keys that answer it."""
    yield "Which type of machine", choose(4)
    yield "How many different machines", f"{answers['machines']}{ENTER}"
    if answers["machines"] > 1:
        yield "rank of this machine", choose(1)
        yield "IP address", f"10.0.0.1{ENTER}"
        yield "port you will use", f"29511{ENTER}"
        yield "same local network", yes(True)
    yield "checked while running", ENTER
    yield "torch dynamo", ENTER
    yield "DeepSpeed", ENTER
    yield "FullyShardedDataParallel", yes(True)
    yield from _fsdp_keys(answers)
    yield "How many GPU(s)", f"4{ENTER}"
    yield "mixed precision", choose(("no", "fp16", "bf16").index(answers["precision"]))


def _fsdp_keys(answers: Answers) -> Iterator[tuple[str, str]]:
    is_1 = "strategy" in answers
    yield "FSDP version", f"\x1b[A{ENTER}" if is_1 else ENTER
    if is_1:
        yield "sharding strategy", choose(list(STRATEGIES).index(answers["strategy"]))
    else:
        yield "resharding after forward", yes(answers["reshard"])
    yield "offload parameters", yes(answers["offload"])
    yield "auto wrap policy", choose((0, 0, 1, 2)[POLICIES.index(answers["policy"])])
    if answers["policy"] in POLICIES[:2]:
        yield "_no_split_modules", yes(answers["policy"] == "own classes")
    if answers["policy"] == "named classes":
        yield "layer class names", f"ABlock,BBlock{ENTER}"
    if answers["policy"] == "size":
        yield "minimum number of parameters", f"2000000{ENTER}"
    if is_1:
        yield "backward prefetch", choose(("pre", "post", "none").index(answers["prefetch"]))
    yield "state dict type", choose((VERSION_1 if is_1 else VERSION_2)["state_dict"].index(answers["state_dict"]))
    if is_1:
        yield "forward prefetch", yes(answers["forward_prefetch"])
        yield "use_orig_params", yes(answers["use_orig"])
    yield "RAM efficient", yes(answers["loading"] == "efficient")
    if is_1 and answers["loading"] != "efficient":
        yield "broadcast module", yes(answers["loading"] == "synchronized")
    yield "activation checkpointing", yes(answers["checkpointing"])
    if not is_1:
        yield "parallelism config", yes(answers["mesh"] is not None)
        if answers["mesh"] is not None:
            for question, size in zip(
                ("replicate size", "shard size", "tensor parallelism", "context parallelism"),
                (*answers["mesh"], 1, 1),
                strict=True,
            ):
                yield question, f"{size}{ENTER}"


def settings(answers: Answers) -> dict[str, Any]:
    """Return the settings that the answers mean."""
    policy = answers["policy"]
    found: dict[str, Any] = {
        "wrap.policy": "transformer" if policy in POLICIES[:2] else policy,
        "wrap.classes": ("ABlock", "BBlock") if policy == "named classes" else (),
        "wrap.min_num_params": 2_000_000 if policy == "size" else 0,
        "offload.params": answers["offload"],
        "checkpoint.state_dict": answers["state_dict"],
        "activation.checkpointing": "full" if answers["checkpointing"] else "none",
        "loading.ram_efficient": answers["loading"] == "efficient",
        "launch.mixed_precision": answers["precision"],
        "precision.param": answers["precision"].replace("no", "auto"),
        "launch.num_machines": answers["machines"],
        "launch.num_processes": 4,
        "launch.machine_rank": answers["machines"] - 1,
        "launch.main_process_ip": "10.0.0.1" if answers["machines"] > 1 else "",
    }
    if "strategy" in answers:
        return found | {
            "fsdp.version": 1,
            "sharding.strategy": answers["strategy"],
            "prefetch.backward": answers["prefetch"],
            "prefetch.forward": answers["forward_prefetch"],
            "params.use_orig": answers["use_orig"],
            "loading.sync_module_states": answers["loading"] != "separate",
        }
    replicate, shard = answers["mesh"] or ("auto", "auto")
    plain = "full_shard" if answers["reshard"] else "shard_grad_op"
    hybrid = "hybrid_shard" if answers["reshard"] else "hybrid_shard_zero2"
    return found | {
        "fsdp.version": 2,
        "sharding.strategy": hybrid if replicate == 2 else plain,
        "mesh.replicate": replicate,
        "mesh.shard": shard,
    }


def stock(tmp_path: Path, *argv: str) -> Terminal:
    variables = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    return Terminal([sys.executable, *argv], cwd=tmp_path, env=variables, columns=250)


def type_answers(
    terminal: Terminal, answers: Answers, other: Mapping[str, str] = MappingProxyType({}), stop: str = ""
) -> None:
    """Type the answers.

    Args:
        other: question -> keys that are typed instead.
        stop: the first question that is not answered.
    """
    for question, typed in itertools.takewhile(lambda step: step[0] != stop, keys(answers)):
        terminal.wait(question)
        if any(part in question for part in MENUS):
            terminal.wait_for_keys()
        terminal.type(other.get(question, typed))


MENUS = ("type of machine", "rank of this", "version", "sharding strategy", "wrap policy", "backward prefetch",
         "state dict", "mixed precision")  # fmt: skip


def assert_read(path: Path, answers: Answers) -> None:
    """Assert that the file has no problems, and that every answer is a setting."""
    assessment = assess(Sources(config=ConfigFile.at(path), environ={}))
    problems = [str(problem) for problem in assessment.problems if problem.severity != "note"]
    assert not problems, (answers, problems)
    expected = settings(answers)
    assert {name: assessment.spec.get(name) for name in expected} == expected


def check_paths(tmp_path: Path, paths: Sequence[Answers]) -> None:
    with stock(tmp_path, "-c", DRIVER, str(len(paths))) as terminal:
        terminal.wait("loaded", 120)
        for number, answers in enumerate(paths):
            type_answers(terminal, answers)
            terminal.wait(f"written {number}.")
            assert_read(tmp_path / f"{number}.yaml", answers)


def test_pairs_of_answers_of_stock_wizard_are_read(tmp_path, hf_fsdp):
    paths = covering(VERSION_1, 2) + covering(VERSION_2, 2)
    check_paths(tmp_path, paths)
    for number, answers in enumerate(paths):  # our wizard keeps them all as defaults
        path = tmp_path / f"{number}.yaml"
        stock_keys = yaml.safe_load(path.read_text())
        assert hf_fsdp("config", "--yes", "--force", "-o", path)[0] == 0
        assert_read(path, answers)
        assert {**yaml.safe_load(path.read_text()), "fsdp_config": 0} == {**stock_keys, "fsdp_config": 0}


FSDP_1 = {name: values for name, values in VERSION_1.items() if name not in ("precision", "machines")}
FSDP_2 = {name: values for name, values in VERSION_2.items() if name not in ("precision", "machines")}
EVERY = [slow(each) for each in (*({**FSDP_1, "strategy": (name,)} for name in STRATEGIES), FSDP_2)]


@pytest.mark.parametrize("dimensions", EVERY, ids=[*STRATEGIES, "version 2"])
def test_every_path_of_stock_wizard_is_read(tmp_path, dimensions):
    others = itertools.cycle(itertools.product(COMMON["precision"], COMMON["machines"]))
    products = itertools.product(*dimensions.values())
    paths = [
        dict(zip(dimensions, values, strict=True)) | {"precision": precision, "machines": machines}
        for values, (precision, machines) in zip(products, others, strict=False)
    ]
    check_paths(tmp_path, paths)


ACCELERATE = ("-m", "accelerate.commands.accelerate_cli", "config")


@pytest.mark.parametrize(
    ("argv", "file", "number"),
    [
        slow((), ".cache/huggingface/accelerate/default_config.yaml", 0),
        slow(("--config_file", "fsdp.json"), "fsdp.json", 5),
        slow(("--config_file", "fsdp.yaml"), "fsdp.yaml", 9),
    ],
)
def test_accelerate_config_from_start_to_end_is_read(tmp_path, argv, file, number):
    answers = covering(VERSION_1 if number % 2 else VERSION_2, 2)[number]
    with stock(tmp_path, *ACCELERATE, *argv) as terminal:
        terminal.wait("In which compute environment", 120)
        terminal.wait_for_keys()
        terminal.type(ENTER)
        type_answers(terminal, answers)
        assert terminal.end() == 0
    assert_read(tmp_path / file, answers)


def test_answers_that_stock_cannot_run_are_reported(tmp_path):
    answers = {**covering(VERSION_2, 2)[0], "policy": "named classes", "mesh": None, "machines": 1}
    with stock(tmp_path, "-c", DRIVER, "2") as terminal:
        terminal.wait("loaded", 120)
        type_answers(terminal, answers, {"layer class names": ENTER})
        terminal.wait("written 0.")
        type_answers(
            terminal, answers, {"FullyShardedDataParallel": ENTER, "mixed precision": ENTER}, stop="FSDP version"
        )
        for question in ("Megatron-LM", "How many GPU(s)", "by id", "numa efficiency", "mixed precision"):
            terminal.wait(question)
            if question == "mixed precision":
                terminal.wait_for_keys()
            terminal.type(f"4{ENTER}" if "many" in question else ENTER)
        terminal.wait("written 1.")
    # Stock Accelerate looks for a layer class without a name, and the second file does not use FSDP.
    for number, code in ((0, "FSDP-E050"), (1, "FSDP-W124")):
        assessment = assess(Sources(config=ConfigFile.at(tmp_path / f"{number}.yaml"), environ={}))
        assert [problem.code for problem in assessment.problems if problem.severity != "note"] == [code]
